"""The search for an algorithm: the fastest of those whose values are right.

Pure logic: what checks and what times a setting comes in as functions, so a search with a fast and wrong candidate can
be tried without a GPU. Some algorithms of cuSPARSELt have given wrong values, and not every time (pytorch#155333), so a
candidate is checked before it is timed, and again with other inputs before it is chosen. Others have crashed: the
search says what it is about to try, so that whoever watches its process (tuner.py) knows what ended it, and it takes
over the trials of a search that was ended so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from blockshock_lib.errors import BlockShockError

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
    """What became of one setting.

    Attributes:
        setting: what was tried.
        error: of its values; None where the library refused the setting.
        ms: time of one product, or NaN where it was not timed.
        refused: the library's reason.
        crashed: how it ended the process that tried it.
    """

    setting: Setting
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
        best: the choice, or None where no candidate is right.
        library: the setting that cuSPARSELt's own search picked; None where that would take too long (then the pick
            is one of the trials anyway, as every algorithm is tried) or failed.
        trials: every setting tried; its `ms` is NaN where it is wrong, was refused or crashed.
        crashes: what crashed, and how, one line each.
        failed: why the search was given up; "" where it was not.
    """

    best: Trial | None
    library: Setting | None = None
    trials: tuple[Trial, ...] = ()
    crashes: tuple[str, ...] = ()
    failed: str = ""

    def trial(self, setting: Setting) -> Trial | None:
        """What became of one setting; None if it was not tried."""
        return next((trial for trial in self.trials if trial.setting == setting), None)

    @property
    def wrong(self) -> int:
        """How many settings ran and gave wrong values."""
        return sum(trial.wrong for trial in self.trials)

    @property
    def refused(self) -> int:
        """How many settings the library refused."""
        return sum(bool(trial.refused) for trial in self.trials)


def fastest_right(trials: Iterable[Trial]) -> Trial | None:
    """The fastest trial that is right and timed; the first of two equal ones; None if there is none."""
    timed = (trial for trial in trials if trial.right and trial.ms > 0)
    return min(timed, key=lambda trial: trial.ms, default=None)


def ignore(_: object) -> None:
    """Nobody listens to a search in the same process."""


def search(
    settings: Iterable[Setting],
    check: Callable[[Setting], Error],
    clock: Callable[[Setting, int], float],
    *,
    splits: Iterable[tuple[int, int]] = (),
    finalists: int = 4,
    seconds: float = math.inf,
    now: Callable[[], float] = time.perf_counter,
    known: Iterable[Trial] = (),
    started: Callable[[Setting], None] = ignore,
    ended: Callable[[Trial], None] = ignore,
) -> tuple[Trial | None, list[Trial]]:
    """Try settings, then split-K variants of the fastest right ones, then time the leaders again.

    Args:
        settings: in the order of trying; the first is always tried, later ones until `seconds` have passed.
        check: setting -> error of a fresh product. A RuntimeError is the library's refusal, anything else
            ends the search.
        clock: (setting, samples) -> milliseconds of one product, the median of that many samples.
        splits: (split_k, split_k_mode) to try with the algorithms of the leaders.
        finalists: how many leaders are checked twice more and timed again, as the median of five samples.
        seconds: after which no further candidate is started; the last step still runs.
        now: a clock in seconds.
        known: trials made before: they count as this search's own and are not made again, except for the last step.
        started: called with each setting just before it is tried.
        ended: called with each trial.

    Returns:
        The choice, one of the finalists that passed all their checks (None if no candidate is right), and the last
        trial of every setting tried, in order. Only finalists carry a median; the others' times are single samples.
    """
    start = now()
    trials = {trial.setting: trial for trial in known}

    def try_one(setting: Setting, samples: int) -> Trial:
        started(setting)
        trial = trials[setting] = _try(setting, check, clock, samples)
        ended(trial)
        return trial

    def attempt(candidates: Iterable[Setting]) -> None:
        for setting in candidates:
            if trials and now() - start > seconds:
                return
            if setting not in trials:
                try_one(setting, samples=1)

    attempt(settings)
    pairs = tuple(splits)
    leaders = [leader.setting for leader in _leaders(trials.values(), finalists)]
    attempt(setting._replace(split_k=k, split_k_mode=mode) for setting in leaders for k, mode in pairs)

    # A finalist found wrong or slower makes room for the next, until all leaders are confirmed.
    confirmed: dict[Setting, Trial] = {}
    while waiting := [t.setting for t in _leaders(trials.values(), finalists) if t.setting not in confirmed]:
        for setting in waiting:
            confirmed[setting] = try_one(setting, samples=5)
    return fastest_right(confirmed.values()), list(trials.values())


def _leaders(trials: Iterable[Trial], count: int) -> list[Trial]:
    return sorted((t for t in trials if t.right and t.ms > 0), key=lambda t: t.ms)[:count]


def _try(setting: Setting, check: Callable, clock: Callable, samples: int) -> Trial:
    try:
        error = check(setting)
        if not error.right:
            return Trial(setting, error)
        ms = clock(setting, samples)
        if samples > 1 and not (again := check(setting)).right:
            return Trial(setting, again)
        return Trial(setting, error, ms)
    except RuntimeError as refusal:
        return Trial(setting, refused=(str(refusal).strip().splitlines() or ["refused without a reason"])[0])
