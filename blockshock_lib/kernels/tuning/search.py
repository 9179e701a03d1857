"""The search for the fastest way to do a thing among those whose values are right.

Some algorithms of cuSPARSELt have given wrong values, and not every time (pytorch#155333), so a candidate is checked
before it is timed, and again with other inputs before it is chosen. Others have crashed (child.py). A way is a
NamedTuple; its class is its kind. In JSON it is {"kind": the kind's name} and its fields.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

from blockshock_lib.errors import BlockShockError, first_line

MAX_RATIO, RMS_RATIO = 2.0, 1.25
"""How wrong a candidate's product may be, against the rounding of the true values alone; the engine's gate is narrower,
for it has a low-precision product to compare with."""

Way = Any  # a NamedTuple of numbers and names; one that has `valid()` is refused where that is False


class BrokenContextError(BlockShockError):
    """A candidate left the CUDA context broken: the process has to end."""


class Error(NamedTuple):
    """Largest and RMS error, each relative to the unavoidable one: that of rounding the true values."""

    max_ratio: float
    rms_ratio: float

    @property
    def right(self) -> bool:  # NaN is not
        return self.max_ratio <= MAX_RATIO and self.rms_ratio <= RMS_RATIO


@dataclass(frozen=True)
class Trial:
    way: Way
    error: Error | None = None  # None where it was refused or crashed
    ms: float = math.nan  # of one call; NaN where it was not timed
    refused: str = ""  # why
    crashed: str = ""  # how it ended the process that tried it

    @property
    def right(self) -> bool:
        return self.error is not None and self.error.right

    @property
    def wrong(self) -> bool:
        return self.error is not None and not self.error.right


@dataclass(frozen=True)
class Found:
    """What a search found: every way tried, a line for each crash, why it was given up ("" = it was not)."""

    trials: tuple[Trial, ...] = ()
    crashes: tuple[str, ...] = ()
    failed: str = ""

    def best(self, *kinds: type) -> Trial | None:
        """The fastest right trial, of these kinds if any are named; None where there is none or the search failed."""
        trials = [trial for trial in self.trials if not kinds or isinstance(trial.way, kinds)]
        return None if self.failed else next(iter(leaders(trials)), None)

    def trial(self, way: Way) -> Trial | None:
        return next((trial for trial in self.trials if same(trial.way) == same(way)), None)


def same(way: Way) -> tuple[type, Way]:
    """What two ways that are the same have in common; as tuples, ways of two kinds may be equal too."""
    return type(way), way


def leaders(trials: Iterable[Trial]) -> list[Trial]:
    """Those that are right and timed, the fastest first; of two equal ones the first stays first."""
    return sorted((t for t in trials if t.right and t.ms > 0), key=lambda t: t.ms)


def search(
    ways: Iterable[Way],
    check: Callable[[Way], Error],
    timed: Callable[[Way], AbstractContextManager[Callable[[], float]]],
    *,
    kind: Callable[[Way], object] = type,
    variants: Callable[[Way], Iterable[Way]] = lambda way: (),
    finalists: int = 4,
    samples: int = 5,
    seconds: float = math.inf,
    now: Callable[[], float] = time.perf_counter,
    known: Iterable[Trial] = (),
    started: Callable[[Way], None] = lambda way: None,
    ended: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Tries the ways of each kind, then variants of the fastest right ones, then checks and times the leaders again.

    `check` gives the error of fresh values, `timed` a clock of milliseconds a sample; a RuntimeError is a refusal. Of
    each `kind`, so many finalists are checked twice more and timed again, in turns; after its `seconds` no candidate of
    it is started, but the very first is always tried. `known`: trials made before, as if made here. `started` and
    `ended` are called with each way just before it is run, and with each trial. Returns the last trial of every way
    tried, in order; the fastest right one of each kind carries a median, who was no finalist a single sample.
    """
    ways = list(ways)
    kinds = list(dict.fromkeys(map(kind, ways)))
    trials = {same(trial.way): trial for trial in known}

    def end(trial: Trial) -> None:
        trials[same(trial.way)] = trial
        ended(trial)

    def run(way: Way, step: Callable, *args: Any) -> Any:
        """The step's result; None where it was refused, which ends the way's trial."""
        started(way)
        try:
            return step(*args)
        except RuntimeError as refusal:
            return end(Trial(way, refused=first_line(refusal)))

    def checked(way: Way) -> Error | None:
        """The error of a right call; None where it is wrong or was refused, which ends the way's trial."""
        error = run(way, check, way)
        return error if error is None or error.right else end(Trial(way, error))

    def sample_once(way: Way) -> float:
        with timed(way) as clock:
            return clock()

    def attempt(candidates: Iterable[Way], start: float) -> None:
        for way in candidates:
            if trials and now() - start > seconds:
                return
            if same(way) in trials or (error := checked(way)) is None:
                continue
            if (ms := run(way, sample_once, way)) is not None:
                end(Trial(way, error, ms))

    def leading(of: object) -> list[Way]:
        return [trial.way for trial in leaders(t for t in trials.values() if kind(t.way) == of)][:finalists]

    def confirm(candidates: list[Way]) -> None:
        """Checks them again, times them in turns, so that drift cancels, and checks them once more."""
        clocks = []
        with contextlib.ExitStack() as stack:
            for way in candidates:
                error = checked(way)
                clock = error and run(way, lambda way: stack.enter_context(timed(way)), way)
                if clock is not None:
                    clocks.append((way, clock, error, []))
            for _ in range(samples):
                for way, clock, _, taken in clocks:
                    taken.append(run(way, clock))
        for way, _, error, taken in clocks:
            if None not in taken and checked(way) is not None:
                end(Trial(way, error, statistics.median(taken)))

    for one in kinds:
        start = now()
        attempt((way for way in ways if kind(way) == one), start)
        attempt((other for way in leading(one) for other in variants(way)), start)
    # A finalist found wrong or slower makes room for the next, until all leaders are confirmed.
    confirmed = set()
    while waiting := [way for one in kinds for way in leading(one) if same(way) not in confirmed]:
        confirm(waiting)
        confirmed.update(map(same, waiting))
    return list(trials.values())


def to_json(way: Way, kinds: Mapping[str, type]) -> dict[str, str | int]:
    return {"kind": next(name for name, kind in kinds.items() if type(way) is kind), **way._asdict()}


def from_json(plain: Mapping[str, object], kinds: Mapping[str, type]) -> Way:
    """The inverse of `to_json`. ValueError where it is not that of a way."""
    kind = kinds.get(plain.get("kind"))
    values = {name: value for name, value in plain.items() if name != "kind"}
    if kind is None or {name: type(value) for name, value in values.items()} != get_type_hints(kind):
        raise ValueError(f"not a way: {plain}")
    way = kind(**values)
    if not getattr(way, "valid", lambda: True)():
        raise ValueError(f"a way out of range: {plain}")
    return way


def words(way: Way, kinds: Mapping[str, type]) -> str:
    """For people, e.g. "cslt alg_id 17 split_k 2 split_k_mode 1"."""
    plain = to_json(way, kinds)
    return " ".join((plain.pop("kind"), *(f"{field} {value}" for field, value in plain.items())))
