"""Parameters of the attention study, and the cases that they expand into. No torch here."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from blockshock_lib.engine import study
from blockshock_lib.errors import allowed
from blockshock_lib.params.models import Count, DType, Frozen, Positive, RunParams, by_name, known, wrong
from blockshock_lib.studies.attention.methods import METHODS
from blockshock_lib.studies.attention.phases import PHASES

NAMES = (
    *("full", "causal", "window", "dilated_window", "global_local", "documents", "packed_windows"),
    *("block_diagonal", "strided", "random", "nearly_empty", "pairs", "by_head", "blocks", "quarter", "longnet"),
)
"""Those of patterns.PATTERNS, which needs torch."""
_NAMED = ("alone", "auto", "dilated", "dilated_sdpa", "send")  # in no set of all kernels; on a CPU "send" is "pull"
_PLAIN = [m for m in METHODS.values() if not m.layer and m.name == (m.strategy or m.name) and m.name not in _NAMED]
_ONE = ("dense", "dense_fa4", "alone")
SETS = {
    "all": tuple(m.name for m in _PLAIN if not (m.dense or m.tuned)),
    # The reference is an oracle: in plain torch it takes minutes where kernels take milliseconds.
    "kernels": tuple(m.name for m in _PLAIN if not m.strategy and m.name not in ("sdpa", "reference")),
    "scaling": tuple(m.name for m in METHODS.values() if m.strategy or m.layer == "block" or m.name in _ONE),
    "models": tuple(m.name for m in METHODS.values() if m.layer == "model" or m.name in (*_ONE, "ring")),
    "pruned": _ONE,
}
PRESETS = {"methods": SETS}


def _known(name: str) -> str:
    base, _, density = name.partition(" ")
    if base not in NAMES:
        raise wrong("", f"{base!r} is no pattern; {allowed(base, NAMES)}")
    if density and not (density.replace(".", "", 1).isdigit() and 0 <= float(density) <= 1):
        raise wrong("", f"{density!r} is no density; allowed: between 0 and 1, as in 'random 0.05'")
    return name


class Shape(Frozen):
    """`heads` of queries share `kv_heads`; each is `head_dim` wide."""

    heads: Count = 4
    kv_heads: Count = 4
    head_dim: Annotated[int, Field(strict=True, ge=8, le=256)] = 64

    @model_validator(mode="after")
    def _shared_evenly(self) -> "Shape":
        if self.heads % self.kv_heads:
            raise wrong("kv_heads", f"{self.heads} heads cannot share {self.kv_heads} evenly; allowed: its divisors")
        return self


Methods = Annotated[tuple[str, ...], BeforeValidator(by_name("set of methods", SETS))]


class Sweep(Frozen):
    """What is varied. `cover`: "all" combinations, or "pairs", as few as hold each pair of values once. `methods`: of
    these cases; none: those of the run. `tuned`: kernels are tuned for each case; others take what was kept for the
    nearest.
    """

    patterns: Annotated[tuple[Annotated[str, AfterValidator(_known)], ...], Field(min_length=1)]
    lengths: Annotated[tuple[Annotated[tuple[Count, ...], Field(min_length=1, max_length=2)], ...], Field(min_length=1)]
    shapes: Annotated[tuple[Shape, ...], Field(min_length=1)]
    blocks: Annotated[
        tuple[Annotated[int, Field(strict=True, ge=32, le=256, multiple_of=32)], ...], Field(min_length=1)
    ]
    dtypes: tuple[DType, ...] = ()
    cover: Literal["all", "pairs"] = "all"
    methods: Methods = ()
    tuned: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _enough_keys(self) -> "Sweep":
        if short := [pair for pair in self.lengths if pair[0] > pair[-1]]:
            raise wrong(
                "lengths", f"{list(short[0])}: queries are the last of the keys' positions; allowed: as many at most"
            )
        return self


class Params(RunParams):
    """`batch`: sequences of a case. `more`: further sweeps, measured after the first. `tune_seconds`: after which no
    further cut of a kernel is tried.
    """

    study: Literal["attention"] = "attention"
    phase: Literal[tuple(PHASES)]
    methods: Annotated[Methods, Field(min_length=1)]
    batch: Count = 1
    sweep: Sweep
    more: tuple[Sweep, ...] = ()
    tune_seconds: Positive = 60.0

    @model_validator(mode="after")
    def _known_methods(self) -> "Params":
        places = {"methods": self.methods, "sweep.methods": self.sweep.methods}
        places |= {f"more.{i}.methods": one.methods for i, one in enumerate(self.more)}
        for where, names in places.items():
            known(where, names, METHODS)
        return self


@dataclass(frozen=True)
class Case(study.Case):
    """One attention to check and measure: q [batch, heads, q_len, head_dim], k and v [batch, kv_heads, k_len, ...]."""

    pattern: str
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    q_len: int
    k_len: int
    block: int
    tuned: bool = False

    @property
    def label(self) -> str:
        """ "random 0.05, 4096 keys, 16 heads of 128, bf16"."""
        return f"{self.pattern}, {lengths(vars(self))}, {shape(vars(self))}, blocks of {self.block}, {self.dtype}"


def density(pattern: str) -> float:
    """The number that may follow a pattern's name: "random 0.05"."""
    return float(pattern.partition(" ")[2] or 0.25)


def shape(case: Mapping[str, Any]) -> str:
    shared = f" over {case['kv_heads']}" * (case["heads"] != case["kv_heads"])
    return f"{case['heads']} heads{shared} of {case['head_dim']}"


def lengths(case: Mapping[str, Any]) -> str:
    return f"{case['k_len']} keys" if case["q_len"] == case["k_len"] else f"{case['q_len']} of {case['k_len']} keys"


def expand(params: Params) -> tuple[Case, ...]:
    """The cases of one sweep after the other, each once: by pattern as listed, the shortest first. No "blocks" with
    less than a block a row.
    """
    found = {}
    for sweep in (params.sweep, *params.more):
        for case in _expanded(params, sweep):
            found.setdefault((*columns(vars(case)).values(), case.dtype), case)
    return tuple(found.values())


def _expanded(params: Params, sweep: Sweep) -> Iterator[Case]:
    hardware = params.hardware
    axes = [sweep.patterns, sweep.lengths, sweep.shapes, sweep.blocks, sweep.dtypes or (params.dtype,)]
    rows = list(itertools.product(*axes)) if sweep.cover == "all" else covering(axes)
    rows = [row for row in rows if not row[0].startswith("blocks ") or density(row[0]) * (row[1][-1] // row[3]) >= 1]
    place = {name: at for at, name in enumerate(sweep.patterns)}
    rows.sort(key=lambda row: (place[row[0]], row[1][-1], row[1][0]))
    general = {"phase": params.phase, "methods": sweep.methods or params.methods, "seed": params.seed}
    general |= {"batch": params.batch, "tuned": sweep.tuned}
    general |= {key: getattr(hardware, key) for key in ("device", "world_size", "emulated")}
    for name, pair, shape, block, dtype in rows:
        size = {"q_len": pair[0], "k_len": pair[-1], "block": block, **dict(shape)}
        yield Case(**general, dtype=dtype, pattern=name, **size)


def covering(axes: Sequence[Sequence]) -> list[tuple]:
    """Few rows that hold each pair of values of two axes at least once: always the row with the most new pairs, the
    first of equals.
    """
    places = list(itertools.product(*(range(len(axis)) for axis in axes)))

    def pairs(row: tuple) -> set:
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(axes)), 2)}

    left, rows = set().union(*map(pairs, places)), []
    while left:
        best = max(places, key=lambda row: len(pairs(row) & left))
        left -= pairs(best)
        rows.append(tuple(axis[at] for axis, at in zip(axes, best, strict=True)))
    return rows


def columns(case: Mapping[str, Any]) -> dict[str, Any]:
    """A record's `case` -> the study's own columns of a records frame."""
    own = {key: case[key] for key in ("pattern", "batch", "heads", "kv_heads", "head_dim", "q_len", "k_len", "block")}
    return own | {"lengths": lengths(case), "shape": shape(case)}
