"""The protocol of a study: what it brings, and what the engine, the runs and the notebooks ask of it.

A study is one folder of `blockshock_lib.studies` and one row of its table. Loading it imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockshock_lib.files import canonical, sha256

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.figure import Figure

    from blockshock_lib.comm import Group


@dataclass(frozen=True)
class Metric:
    """What a row of this metric holds. `zero`: 0 is a value it may have; `negative`: so is one below."""

    unit: str
    zero: bool = True
    negative: bool = False


STATUSES = ("ok", "failed", "oom", "timeout", "unsupported")
ROW_COLUMNS = ("method", "metric", "unit", "value", "repeat", "rank", "status", "reason", "detail")

CORE: dict[str, Metric] = {
    **dict.fromkeys(("error_max_ratio", "error_rms_ratio"), Metric("x")),  # over the error of a plain product
    "error_line_ratio": Metric("x"),  # of the worst row or column, over what is allowed there
    **dict.fromkeys(("error_max", "error_rms"), Metric("1")),  # over the RMS of the float64 truth
    **dict.fromkeys(("entries_checked", "entries_total"), Metric("1", zero=False)),  # where the truth is a sample
    # one_at_a_time: the methods did not fit beside each other, and the baseline was repeated between them. lost: a rank
    # was lost while the case went on without it.
    **dict.fromkeys(("check", "one_at_a_time", "throttle", "lost"), Metric("bool")),
    "kernel_time": Metric("ms", zero=False),
    **dict.fromkeys(("peak_bytes", "shared_bytes"), Metric("B")),
    **dict.fromkeys(("copy_bandwidth", "allreduce_bandwidth"), Metric("GB/s")),
    "gemm_rate": Metric("TFLOP/s"),
    # Of the machine, over a case; of a method, at the end of a lead-in. Its energy is that of one call on all ranks.
    **{"power": Metric("W"), "sm_clock": Metric("MHz"), "energy": Metric("J", zero=False)},
    "lead_in": Metric("s"),
    "turn": Metric("1"),  # a method's place in the first turn; it moves up by one from turn to turn
}
"""In the metrics of every study: what the engine itself measures, and the machine's own rows."""


def row(metrics: Mapping[str, Metric], method: str, metric: str, value: float, **more: Any) -> dict[str, Any]:
    """One measurement, in the metric's own unit; `more`: other columns. Rank -1 is the slowest of, or all, ranks."""
    made = {"method": method, "metric": metric, "unit": metrics[metric].unit, "value": float(value)}
    return made | {"repeat": 0, "rank": -1, "status": "ok", "reason": "", "detail": ""} | more


@dataclass(frozen=True)
class Phase:
    """One notebook of a study, which adds fields of its own in a subclass."""

    name: str
    notebook: str  # file in notebooks/
    question: str
    timed: bool  # whether its cases are timed after they were checked
    metric: str = ""  # of the headline: the speed of `axes.under` over `axes.over` in this metric
    figures: tuple[str, ...] = ()  # those that every run keeps, also where no notebook drew any; the headline first
    unit: str = ""  # what progress counts; "": cases
    amount: Callable[[Any], float] = lambda case: 1  # of the unit, in a case
    reached: Callable[[Any, Mapping[str, Any]], float] = lambda case, row: 0  # of it, where the case has said `row`
    portable: bool = False  # whether a run may go on on another machine of the same kinds of GPU and libraries


@dataclass(frozen=True)
class Case:
    """One thing to check and measure by several methods. A study adds its fields in a subclass; a later one has a
    default and is left out of `as_dict` at that value, so that older ids stay what they are.
    """

    phase: str
    methods: tuple[str, ...]
    dtype: str
    device: str
    world_size: int
    emulated: bool
    seed: int

    @cached_property
    def id(self) -> str:
        """12 hex digits of the SHA-256 of all fields: the same in any process and Python version."""
        return sha256(canonical(self.as_dict()))[:12]

    @property
    def label(self) -> str:
        """For people: "4096x4096 B=16 bf16"."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        plain = {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}
        return json.loads(json.dumps(plain, default=vars))


@dataclass(frozen=True, eq=False)
class Check:
    """One tensor of a method against the truth: whole, or the entries that were sampled."""

    what: str  # names the tensor where it is refused
    made: torch.Tensor | None  # None on a rank that stands by
    baseline: torch.Tensor | None  # the same by plain torch; None: `made` must be the truth but for a few roundings
    truth: torch.Tensor | None  # float64, of `made`'s shape
    detail: str | None = None  # of its rows; None: `what`, "": a method's main output
    sampled: int = 0  # of how many entries these are a sample; 0 where they are all
    record: bool = True  # whether its errors become rows
    fault: str = ""  # what is known to be wrong beside it
    looser: float = 1.0  # errors may be so many times what the gate allows, where roundings fall at other places
    depth: int = 1  # products one after another: of so many roundings' errors the squares add up in the baseline too


@dataclass(frozen=True)
class Sample:
    """A loss, an accuracy; the largest of all ranks counts. `step` grows among those of one (metric, detail)."""

    metric: str
    value: float
    step: int = 0
    detail: str = ""


class Runner:
    """One method on one rank: every member runs on all ranks in step; one that is not `active` only stands by. `run` is
    the engine's CaseRun: `agree` before a collective, `weighed` around what is weighed, `timer` while works are made.
    """

    active: bool = True

    def tune(self) -> None:
        """Searches for its fastest kernels. Communicates nothing: one rank searches, the others find what it kept."""

    def tune_together(self) -> None:
        """The same for what all ranks must try together."""

    def checks(self, run: Any) -> Iterator[Check]:
        """Every tensor that must be right, made as it is asked for. As many on every rank."""
        raise NotImplementedError

    def weigh(self) -> dict[str, float]:
        """Metric -> bytes; the fullest rank counts. The same metrics on every rank."""
        return {}

    def samples(self, run: Any, done: Sequence[Mapping[str, Any]]) -> Iterator[Sample]:
        """What comes step by step; goes on behind `done`, the rows that are kept of a case that was cut off."""
        return iter(())

    def operand_bytes(self) -> int:
        """What a timed call must not find in the cache; the calls rotate over as many copies of the method."""
        return 0

    def works(self, run: Any, copies: Sequence[Any]) -> list[Any]:
        """The engine.timing.Work to time, over all copies of this runner, itself the first."""
        return []

    def facts(self, ceilings: Any) -> dict[str, float]:
        """Metric -> what follows from the case and the measured ceilings: floors, counts."""
        return {}

    def finish(self) -> None:
        """All is timed: drops what only timing needed."""


class Problem:
    """One case on one rank: its inputs and truths, and the methods that must reach them. A study that lets a case go on
    without some ranks gives `group` those that are left. `repeat`: index of the fresh group of processes.
    """

    state: Path | None = None  # a file for what samples go on from, removed when the case's record is written
    begins: Callable[[str], None] = staticmethod(lambda method: None)  # hears on every rank whose work comes next

    def __init__(self, case: Any, params: Any, *, device: torch.device, group: Group, repeat: int = 0):
        from blockshock_lib.engine.memory import DTYPES  # a study is loaded without torch

        self.case, self.params, self.device, self.group, self.repeat = case, params, device, group, repeat
        self.dtype = DTYPES[case.dtype]

    def unsupported(self, method: str) -> str:
        """Why it cannot run here; "" where it can. The same on every rank."""
        return ""

    def prepare(self, method: str) -> None:
        """Makes what the method is compared with before its memory is weighed; OutOfMemoryError where it cannot fit."""

    def build(self, method: str) -> Runner:
        raise NotImplementedError

    def forget(self) -> None:
        """Drops what only checks need: all that fit were checked."""

    def needed(self, method: str) -> int:
        """Bytes on one device while it is measured; 0: not known. Where all do not fit, one is timed at a time."""
        return 0


@dataclass(frozen=True)
class Need:
    """What a case asks of a machine, said before anything starts."""

    bytes: int  # that the fullest rank holds while the case is measured, without its process; 0: not known
    unsupported: Mapping[str, str]  # method -> why it cannot run there; "" where it can
    # Method that can run -> what is counted ("weights", "sent") -> bytes of a rank.
    held: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """Everything of a study. The whole house takes it as an argument and knows no study by name."""

    name: str  # also the folder params/<name>/ and the first part of its notebooks' names
    question: str
    params: type  # pydantic model of a run, a subclass of params.RunParams
    case: type[Case]
    expand: Callable[[Any], tuple[Case, ...]]  # params -> cases, in order
    phases: Mapping[str, Phase]
    methods: Mapping[str, Any]  # an object with `name`, `label` and what the study needs of it
    metrics: Mapping[str, Metric]
    columns: Callable[[Mapping[str, Any]], dict[str, Any]]  # record's `case` -> its own columns of a records frame
    axes: Any  # how tables and figures name and order its cases
    problem: str  # "module:Class" of its Problem, imported in ranks only
    twin: tuple[str, ...] = ()  # a timed case times its one of these once more, as another: what it cannot tell apart
    may_lose: Callable[[Any], frozenset[int]] = lambda case: frozenset()  # ranks that may die while the others go on
    # Columns -> headers of the table of what is asked: those that name a line, those that are joined in it.
    plan: tuple[Mapping[str, str], ...] = ()
    need: str = ""  # "module:function" (case, machine card) -> Need, for a dry run
    # Parameter -> name -> value: what a name stands for. The model of parameters looks the names up.
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of parameters, under params/<name>/base.yaml
    # Phase -> functions frame -> Verdict; the study's own sentences at the end of a run's verdict line.
    hypotheses: Mapping[str, tuple[Callable[[pd.DataFrame], Any], ...]] = field(default_factory=dict)
    summary: Callable[[pd.DataFrame], list[str]] = lambda frame: []
    # Phase -> records -> its answer in a sentence; "": of all phases together. By default report.answer says it.
    answers: Mapping[str, Callable[[pd.DataFrame], str]] = field(default_factory=dict)
    # By name, as notebooks, pages, index and widgets take them from here.
    tables: Mapping[str, Callable[[pd.DataFrame], pd.DataFrame]] = field(default_factory=dict)
    figures: Mapping[str, Callable[[pd.DataFrame], Figure]] = field(default_factory=dict)
    findings: str = ""  # file in notebooks/ that answers the question from all records
    results: Callable[[pd.DataFrame], str] | None = None  # records that are weighed together -> docs/results/<name>.md
    picture: str = ""  # the figure on that page
    joined: bool = False  # whether phases that machines of their own measured are weighed together
    live: str = ""  # "module:function" -> (controls by name, (phase, values) -> settings): a run, from a notebook
