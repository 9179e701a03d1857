"""A whole study in one file: sorting numbers on several ranks, by three methods, one sometimes wrong on purpose.

It holds the promise that a study needs no change of the house: the general rooms are tested with it.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from blockshock_lib.engine import study
from blockshock_lib.engine import timing as timed
from blockshock_lib.engine.study import CORE, Check, Metric, Phase, Sample, Study
from blockshock_lib.params import RunParams
from blockshock_lib.params.models import Count, Positive
from blockshock_lib.report import answer
from blockshock_lib.report.axes import Axes, Look, Work
from blockshock_lib.report.verdicts import Verdict, speed_verdict

Order = Literal["random", "reversed", "mortal", "fatal check", "fatal call"]  # in which the numbers lie at first
SAMPLED_FROM = 4096  # numbers; beyond, every eighth is checked
MORTAL_STEP = 2  # of a "mortal" case, in which rank 1 dies


class Params(RunParams):
    phase: Literal["sort_check", "sort_time"]
    n: tuple[Count, ...]
    orders: tuple[Order, ...] = ("random",)
    steps: int = 4  # of the series
    step_seconds: float = 0.0  # of each step after the third
    sort_bytes: float = 0.0  # what a method is said to need, 0 for not known
    pace: Positive = 1.0


@dataclass(frozen=True)
class Case(study.Case):
    n: int
    order: str

    @property
    def label(self) -> str:
        return f"{self.n} numbers, {self.order}"


def expand(params: Params) -> tuple[Case, ...]:
    hardware = params.hardware
    general = (params.phase, params.methods, params.dtype, hardware.device, hardware.world_size, hardware.emulated)
    return tuple(Case(*general, params.seed, n, order) for order in params.orders for n in sorted(params.n))


LABELS = {"whole": "Sorts alone", "shared": "Shares", "careless": "Careless"}
METHODS = {name: Look(label, name) for name, label in LABELS.items()}


def table(frame: pd.DataFrame) -> pd.DataFrame:
    times = frame[frame.metric.eq("sort_kernel") & frame.status.eq("ok") & frame.method.isin(list(METHODS))]
    return times.groupby(["method", "n"], as_index=False)["value"].median()


def figure(frame: pd.DataFrame):
    from blockshock_lib.report.figures import Figure

    lead = frame[frame.metric.eq("lead")]
    drawn = Figure()
    ax = drawn.subplots()
    for method, rows in lead.groupby("method"):
        ax.plot(rows["repeat"], rows["value"], label=method)
    ax.set(title="The lead changes sides", xlabel="step", ylabel="lead")
    return drawn


def shared_is_right(frame: pd.DataFrame) -> Verdict:
    checks = frame[frame.metric.eq("check") & frame.method.eq("shared")]
    word = "supported" if len(checks) and checks.status.eq("ok").all() else "refuted"
    rule, numbers = "refuted where a check fails", (float("nan"),) * 3
    return Verdict("T1: the shared sort is right", rule, *numbers, word, f"{len(checks)} checks", checks)


def shared_is_faster(frame: pd.DataFrame) -> Verdict:
    return speed_verdict(frame, STUDY.axes, "T2: sharing the sort is faster", "whole", "shared")


class Sorting(study.Problem):
    """x [n], the same on every rank; each fresh group of processes draws anew."""

    def __init__(self, case: Case, params: Params, **place):
        import torch

        super().__init__(case, params, **place)
        x = torch.randn(case.n, generator=torch.Generator().manual_seed(case.seed + self.repeat))
        self.x = (x.sort(descending=True).values if case.order == "reversed" else x).to(self.device, self.dtype)

    def unsupported(self, method: str) -> str:
        return "fewer numbers than ranks" if method == "shared" and self.case.n < self.group.world_size else ""

    def needed(self, method: str) -> int:
        return int(self.params.sort_bytes)

    def build(self, method: str) -> Sorter:
        return Sorter(self, method)


class Sorter(study.Runner):
    def __init__(self, problem: Sorting, method: str):
        self.problem, self.method, self.x = problem, method, problem.x.clone()

    def sort(self):
        """All numbers, ascending, on every rank. The careless method forgets the last one of many."""
        import torch

        group, x = self.problem.group, self.x
        if self.method == "shared" and group.world_size > 1:
            mine = torch.full((-(-len(x) // group.world_size),), float("inf"), dtype=x.dtype, device=x.device)
            part = x[group.rank :: group.world_size].sort().values
            mine[: len(part)] = part
            x = group.all_gather(mine)
        y = x.sort().values[: len(self.x)]
        if self.method == "careless" and len(y) >= 1024:
            y[-1] = 0
        return y

    def checks(self, run):
        self.end("check")
        with run.weighed():
            made = self.sort()
        yield from self.compared(made)

    def end(self, where):
        """In a fatal case the careless method ends the last rank there."""
        group, order = self.problem.group, self.problem.case.order
        if (self.method, order, group.rank) == ("careless", f"fatal {where}", group.world_size - 1):
            os._exit(3)

    def compared(self, made):
        baseline = self.problem.x.sort().values
        step = 8 if len(baseline) > SAMPLED_FROM else 1
        pick, sampled = slice(step - 1, None, step), len(baseline) if step > 1 else 0
        yield Check("the order", made[pick], baseline[pick], baseline[pick].double(), "", sampled=sampled)

    def weigh(self):
        return {"number_bytes": self.x.nbytes}

    def samples(self, run, done):
        """How far the ranks' pace is ahead (above 0) or behind, by step; rank 1 of a mortal case dies on the way."""
        for step in range(len(done), self.problem.params.steps):
            time.sleep(self.problem.params.step_seconds * (step > 2))
            if self.problem.case.order == "mortal" and step == MORTAL_STEP and self.problem.group.world_size > 1:
                if self.problem.group.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.problem.group = type(self.problem.group)()
            yield Sample("lead", (-1.0) ** step * (step + 1) * self.problem.params.pace, step)

    def works(self, run, copies):
        kernel = timed.Work("sort_kernel", [one.sort for one in copies], recheck=self.compared, heavy=True, traced=True)
        return [kernel, timed.Work("sort_call", [lambda: self.end("call") or self.sort()], eager=True)]

    def facts(self, ceilings):
        return {"floor_sort": 2 * self.x.nbytes / ceilings.copy_bandwidth / 1e6}


METRICS = CORE | {
    **dict.fromkeys(("sort_kernel", "sort_call"), Metric("ms", zero=False)),
    **{"floor_sort": Metric("ms"), "number_bytes": Metric("B"), "lead": Metric("1", negative=True)},
}
STUDY = Study(
    name="toy",
    question="Is a sort that several ranks share as right as one alone?",
    params=Params,
    case=Case,
    expand=expand,
    phases={
        "sort_check": Phase("sort_check", "toy_sort_check.ipynb", "Is every sort right?", False),
        "sort_time": Phase("sort_time", "toy_sort_time.ipynb", "Which is faster?", True, "sort_kernel", ("lead",)),
    },
    methods=METHODS,
    metrics=METRICS,
    columns=lambda case: {"n": case["n"], "order": case["order"]},
    axes=Axes(
        **dict(columns=("n", "order"), x="n", y="order", settings=("order",)),
        methods=METHODS,
        over="whole",
        under="shared",
        times={"sort": Work("a sort")},
    ),
    problem="tests.studies.toy:Sorting",
    twin=("whole",),
    defaults={"n": [64, 2048], "methods": list(METHODS), "profile": "last"},
    may_lose=lambda case: frozenset({1}) if case.order == "mortal" else frozenset(),
    hypotheses={"sort_time": (shared_is_right, shared_is_faster)},
    answers={"sort_check": lambda frame: answer.checked(frame, "every sort is right")},
    summary=lambda frame: [f"{frame['case'].nunique()} cases were sorted"],
    tables={"sorts": table},
    figures={"lead": figure},
)
