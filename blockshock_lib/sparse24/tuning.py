"""The search for an algorithm: the fastest of those whose values are right.

Pure logic: what checks and what times a setting comes in as functions, so a search with a fast and wrong candidate can
be tried without a GPU. Some algorithms of cuSPARSELt have given wrong values, and not every time (pytorch#155333), so a
candidate is checked before it is timed, and again with other inputs before it is chosen. Others have crashed: the
search says what it is about to try, so that whoever watches its process (tuner.py) knows what ended it, and it takes
over the trials of a search that was ended so.

There are two kinds of ways to run a product (ways.py); one search finds the best of each, by the same check and clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blockshock_lib.errors import BlockShockError

if TYPE_CHECKING:
    from blockshock_lib.sparse24.ways import Way

MAX_RATIO = 2.0
RMS_RATIO = 1.25


class BrokenContextError(BlockShockError):
    """A candidate left the CUDA context broken: whatever is tried next would fail too, so the process has to end."""


class Setting(NamedTuple):
    """One way to run cuSPARSELt's product. The defaults are the library's own; split_k -1 is its "segment-K"."""

    alg_id: int = 0
    split_k: int = 1
    split_k_mode: int = -1


class Error(NamedTuple):
    """Largest and RMS error of a product, each relative to the unavoidable one: that of rounding the true values."""

    max_ratio: float
    rms_ratio: float

    @property
    def right(self) -> bool:
        """False also for NaN."""
        return self.max_ratio <= MAX_RATIO and self.rms_ratio <= RMS_RATIO


@dataclass(frozen=True)
class Trial:
    """What became of one way.

    Attributes:
        way: what was tried.
        error: of its values; None where it was refused.
        ms: time of one product, or NaN where it was not timed.
        refused: the reason, the library's or the driver's.
        crashed: how it ended the process that tried it.
    """

    way: Way
    error: Error | None = None
    ms: float = math.nan
    refused: str = ""
    crashed: str = ""

    @property
    def right(self) -> bool:
        return self.error is not None and self.error.right

    @property
    def wrong(self) -> bool:
        """It ran, and its values are wrong."""
        return self.error is not None and not self.error.right


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        trials: every way tried; its `ms` is NaN where it is wrong, was refused or crashed.
        library: the setting that cuSPARSELt's own search picked; None where that would take too long (then the pick
            is one of the trials anyway, as every algorithm is tried) or failed.
        crashes: what crashed, and how, one line each.
        failed: why the search was given up; "" where it was not.
    """

    trials: tuple[Trial, ...] = ()
    library: Setting | None = None
    crashes: tuple[str, ...] = ()
    failed: str = ""

    def best(self, *kinds: type[Way]) -> Trial | None:
        """The fastest right trial, of these kinds if any are named; None where there is none or the search failed."""
        if self.failed:
            return None
        return fastest_right(trial for trial in self.trials if not kinds or isinstance(trial.way, kinds))

    def trial(self, way: Way) -> Trial | None:
        """What became of one way; None if it was not tried."""
        return next((trial for trial in self.trials if trial.way == way), None)

    @property
    def wrong(self) -> int:
        """How many ways ran and gave wrong values."""
        return sum(trial.wrong for trial in self.trials)

    @property
    def refused(self) -> int:
        """How many ways were refused."""
        return sum(bool(trial.refused) for trial in self.trials)


def fastest_right(trials: Iterable[Trial]) -> Trial | None:
    """The fastest trial that is right and timed; the first of two equal ones; None if there is none."""
    return next(iter(_leaders(trials, 1)), None)


def ignore(_: object) -> None:
    """Nobody listens to a search in the same process."""


def search(
    ways: Iterable[Way],
    check: Callable[[Way], Error],
    clock: Callable[[Way, int], float],
    *,
    splits: Iterable[tuple[int, int]] = (),
    finalists: int = 4,
    seconds: float = math.inf,
    now: Callable[[], float] = time.perf_counter,
    known: Iterable[Trial] = (),
    started: Callable[[Way], None] = ignore,
    ended: Callable[[Trial], None] = ignore,
) -> list[Trial]:
    """Try the ways of each kind, then split-K variants of the fastest right settings, then time the leaders again.

    Args:
        ways: those of each kind in the order of trying. The very first is always tried.
        check: way -> error of a fresh product. A RuntimeError is a refusal, anything else ends the search.
        clock: (way, samples) -> milliseconds of one product, the median of that many samples.
        splits: (split_k, split_k_mode) to try with the algorithms of the leading settings.
        finalists: how many leaders of each kind are checked twice more and timed again, as the median of five samples.
        seconds: for each kind, after which no further candidate of it is started; the last step still runs.
        now: a clock in seconds.
        known: trials made before: they count as this search's own and are not made again, except for the last step.
        started: called with each way just before it is tried.
        ended: called with each trial.

    Returns:
        The last trial of every way tried, in order. The fastest right one of each kind has passed all its checks and
        carries a median; the times of those that were no finalists are single samples.
    """
    ways = list(ways)
    kinds = list(dict.fromkeys(type(way) for way in ways))
    trials = {trial.way: trial for trial in known}

    def try_one(way: Way, samples: int) -> Trial:
        started(way)
        trial = trials[way] = _try(way, check, clock, samples)
        ended(trial)
        return trial

    def leaders(kind: type[Way]) -> list[Way]:
        return [trial.way for trial in _leaders((t for t in trials.values() if isinstance(t.way, kind)), finalists)]

    def attempt(candidates: Iterable[Way], start: float) -> None:
        for way in candidates:
            if trials and now() - start > seconds:
                return
            if way not in trials:
                try_one(way, samples=1)

    for kind in kinds:
        start = now()
        attempt((way for way in ways if type(way) is kind), start)
        if kind is Setting:
            pairs = tuple(splits)
            attempt((way._replace(split_k=k, split_k_mode=mode) for way in leaders(kind) for k, mode in pairs), start)

    # A finalist found wrong or slower makes room for the next, until all leaders are confirmed.
    for kind in kinds:
        confirmed: set[Way] = set()
        while waiting := [way for way in leaders(kind) if way not in confirmed]:
            for way in waiting:
                try_one(way, samples=5)
                confirmed.add(way)
    return list(trials.values())


def _leaders(trials: Iterable[Trial], count: int) -> list[Trial]:
    return sorted((t for t in trials if t.right and t.ms > 0), key=lambda t: t.ms)[:count]


def _try(way: Way, check: Callable, clock: Callable, samples: int) -> Trial:
    try:
        error = check(way)
        if not error.right:
            return Trial(way, error)
        ms = clock(way, samples)
        if samples > 1 and not (again := check(way)).right:
            return Trial(way, again)
        return Trial(way, error, ms)
    except RuntimeError as refusal:
        return Trial(way, refused=(str(refusal).strip().splitlines() or ["refused without a reason"])[0])
