"""The intervals of a ratio of times: over whole runs, the one of its mean and the one that predicts a further run; over
the fresh groups of one run; and of two runs that share nothing.

Each fresh group of processes is one observation, the log of its median or of the ratio of its medians. Between two runs
of unchanged code 82% of the ratios fell into the other's interval over groups, at 99%: a whole run has an effect of its
own (its GPUs, day, choice of kernels). So, with cell c, run r and group g,

    log ratio = mu[c] + m[c, r] + noise,  m of variance M for all cells, noise of variance w[c] within a run.

M comes from the runs, pooled over the cells (`between_runs`), w[c] from the groups within each run. Of R runs of G
groups the mean has variance (M + w/G) / R, and a further run of H groups lies around it with M (1 + 1/R) + w (1/(R G) +
1/H). Degrees of freedom of a sum of variances: Satterthwaite (1946), rounded down. Assumed: effects of runs are normal,
and cells have the same M; what a cell has beyond that is missed. Samples are arrays > 0, one a group; a side without a
group, or an empty group, raises ValueError.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

LEVEL = 0.99
MACHINE = 0.014  # deviation of a run's effect on a log ratio: seen between three machines of one kind (2x H200)
PRIOR = 4  # as many degrees of freedom this value counts, against those of the runs themselves
NEGLIGIBLE = 0.01  # a shift of a whole run that nobody needs to be told
Groups = Sequence[np.ndarray]
Cell = Mapping[str, np.ndarray]  # run -> log ratios of one case, one a fresh group


class Interval(NamedTuple):
    ratio: float
    low: float
    high: float


class Between(NamedTuple):
    variance: float  # of what a whole run does to a cell's log ratio: M
    free: float  # degrees of freedom of that estimate


class Both(NamedTuple):
    mean: Interval  # by which verdicts are said
    further: Interval  # predicts the ratio of a further run, by which a rerun is judged


def log_ratios(over: Groups, under: Groups) -> np.ndarray:
    """log t(over) / t(under), one a group. over[g] and under[g] were measured in the same processes, interleaved, so
    that what they share (clocks, heat) cancels.
    """
    a, b = _log_medians(over, under)
    return a - b


def intervals(cells: Sequence[Cell], level: float = LEVEL) -> list[Both]:
    """Of each cell's ratio. `mean`: over runs where any cell has several; of a single run Student's over its groups,
    which says nothing of other runs: (0, inf) for one group. `further`: of a run with as many groups as these have.
    """
    of, found = [_summary(cell) for cell in cells], []
    between, single = between_runs(cells), max(map(len, cells), default=0) < 2
    for cell, one in zip(cells, of, strict=True):
        further = _over_runs(one, between, 1 / one.share, level)
        mean = _student(*cell.values(), level) if single else _over_runs(one, between, 0, level)
        found.append(Both(mean, further))
    return found


def predicted(cell: Cell, between: Between, groups: int, level: float = LEVEL) -> Interval:
    """In which the ratio of a further run of `groups` lies in `level` of all cases."""
    return _over_runs(_summary(cell), between, groups, level)


def between_runs(cells: Sequence[Cell]) -> Between:
    """M from the cells of the same runs: the two-way table of cell and run is split into what all cells of a run share
    and what is left; M is the sum of both less the noise within runs. Where cells move together they say little
    more than one cell, and Satterthwaite's degrees of freedom fall from cells x (runs - 1) to runs - 1. M is then
    shrunk to MACHINE**2 as if that had PRIOR degrees (a moderated variance: Smyth 2004), and is never below it.
    """
    runs, whole = _alike(cells)
    free = len(runs) - 1
    if free < 1:
        return Between(MACHINE**2, PRIOR)
    of = [_summary(cell) for cell in whole]
    means = np.array([[one.means[run] for run in runs] for one in of])
    means = means - means.mean(axis=1, keepdims=True)
    count, together = len(whole), means.mean(axis=0)
    shared = float((together**2).sum()) / free
    apart = float(((means - together) ** 2).sum()) / free / (count - 1) if count > 1 else 0.0
    own = (count - 1) / count * apart
    squares = shared**2 / free + (own**2 / free / (count - 1) if count > 1 else 0.0)
    degrees = (shared + own) ** 2 / squares if squares else float(free)
    beyond = shared + own - sum(one.noise * one.share for one in of) / count - MACHINE**2
    return Between(MACHINE**2 + max(0.0, beyond) * degrees / (degrees + PRIOR), degrees + PRIOR)


def caught(cells: Sequence[Cell], level: float = LEVEL) -> tuple[int, int]:
    """How many ratios of single runs fell into the interval that the other runs predict, of how many."""
    inside = []
    for run in sorted({run for cell in cells for run in cell}):
        others = [{name: logs for name, logs in cell.items() if name != run} for cell in cells]
        between = between_runs([other for other in others if other])
        for cell, other in ((cell, other) for cell, other in zip(cells, others, strict=True) if other and run in cell):
            inside.append(holds(predicted(other, between, len(cell[run]), level), cell[run]))
    return sum(inside), len(inside)


def holds(interval: Interval, logs: np.ndarray) -> bool:
    return bool(interval.low <= np.exp(logs.mean()) <= interval.high)


def drift(cells: Sequence[Cell], level: float = LEVEL) -> dict[str, float]:
    """The run that lies furthest from the others -> by which factor its ratios lie above theirs in the mean over cells,
    where Student's t of the cells' differences excludes 1 (at `level` over all runs: Bonferroni) and the shift is at
    least NEGLIGIBLE; {} without one.
    """
    runs, whole = _alike(cells)
    if len(runs) < 2 or len(whole) < 2:
        return {}
    means, found = np.array([[cell[run].mean() for run in runs] for cell in whole]), {}
    for place, run in enumerate(runs):
        apart = _student(means[:, place] - np.delete(means, place, axis=1).mean(axis=1), 1 - (1 - level) / len(runs))
        if not apart.low <= 1 <= apart.high and abs(math.log(apart.ratio)) >= NEGLIGIBLE:
            found[run] = apart.ratio
    furthest = sorted(found, key=lambda run: round(abs(math.log(found[run])), 9))[-1:]
    return {run: found[run] for run in furthest}


def by_run(keys: Iterable[tuple], logs: np.ndarray) -> Cell:
    """The cell of `logs`, whose groups have these keys (run, group)."""
    runs = np.array([run for run, _ in keys], dtype=object)
    return {run: logs[runs == run] for run in dict.fromkeys(runs)}


def _alike(cells: Sequence[Cell]) -> tuple[list[str], list[Cell]]:
    # Phases are measured in runs of their own: the cells of the runs that most cells have, and these.
    runs = max(
        Counter(frozenset(cell) for cell in cells).items(),
        key=lambda one: (one[1] * (len(one[0]) > 1), sorted(one[0])),
        default=(frozenset(), 0),
    )[0]
    return sorted(runs), [cell for cell in cells if cell.keys() == runs]


class _Summary(NamedTuple):
    means: dict[str, float]  # of the logs of each run
    share: float  # mean of 1 / groups
    noise: float  # variance of a group within its run; 0 where no run has two
    free: int  # degrees of freedom of the noise


def _summary(cell: Cell) -> _Summary:
    means = {run: float(logs.sum()) / len(logs) for run, logs in cell.items()}
    free = sum(map(len, cell.values())) - len(cell)
    squares = sum(float(((logs - means[run]) ** 2).sum()) for run, logs in cell.items())
    share = sum(1 / len(logs) for logs in cell.values()) / len(cell)
    return _Summary(means, share, squares / free if free else 0.0, free)


def _over_runs(of: _Summary, between: Between, further: float, level: float) -> Interval:
    # further: groups of the run that is predicted; 0: the interval of the mean.
    runs = len(of.means)
    ratio = math.exp(sum(of.means.values()) / runs)
    if runs == 1 and not of.free:
        return _around(ratio, math.inf)
    ours = between.variance * (1 / runs + bool(further))
    noise = of.noise * (of.share / runs + (1 / further if further else 0.0))
    squares = ours**2 / between.free + (noise**2 / of.free if of.free else 0.0)
    free = int((ours + noise) ** 2 / squares + 1e-9)
    return _around(ratio, t_quantile((1 + level) / 2, free) * (ours + noise) ** 0.5)


def _student(logs: np.ndarray, level: float = LEVEL) -> Interval:
    free = len(logs) - 1
    reach = t_quantile((1 + level) / 2, free) * float(logs.std(ddof=1)) / len(logs) ** 0.5 if free else math.inf
    return _around(float(np.exp(logs.mean())), reach)


def welch_interval(over: Groups, under: Groups, level: float = 0.99) -> Interval:
    """t(over) / t(under) of two runs that share nothing, which may differ in groups, with its interval at `level`: that
    of the geometric means, with Welch's interval for unequal spreads, t(df) sqrt(s1^2 / G1 + s2^2 / G2), df after
    Welch-Satterthwaite rounded down, at least the smaller G - 1. What a whole run shares (its day, heat) is not in it.
    """
    sides = *_log_medians(over), *_log_medians(under)
    ratio, free = float(np.exp(sides[0].mean() - sides[1].mean())), [len(side) - 1 for side in sides]
    if min(free) == 0:
        return _around(ratio, math.inf)
    parts = [float(side.var(ddof=1)) / len(side) for side in sides]
    spread = sum(part**2 / df for part, df in zip(parts, free, strict=True))
    df = max(min(free), int(sum(parts) ** 2 / spread + 1e-9)) if spread else min(free)
    return _around(ratio, t_quantile((1 + level) / 2, df) * sum(parts) ** 0.5)


def _log_medians(*sides: Groups) -> list[np.ndarray]:
    if len({len(side) for side in sides}) > 1 or not sides[0]:
        raise ValueError(f"the sides need the same groups, at least one: {[len(side) for side in sides]} given")
    if any(len(values) == 0 for side in sides for values in side):
        raise ValueError("a group has no samples")
    return [np.log([np.median(values) for values in side]) for side in sides]


def _around(ratio: float, reach: float) -> Interval:
    # A reach that exp() cannot hold is no interval; with df = 1 and a high level it is soon there.
    if reach > 700:
        return Interval(ratio, 0.0, math.inf)
    return Interval(ratio, ratio * math.exp(-reach), ratio * math.exp(reach))


@cache
def t_quantile(p: float, df: int) -> float:
    """The p-quantile of Student's t, p from 0.5 to 1 - 1e-7, `df` whole, to about 9 digits: the finite series of
    Abramowitz and Stegun (26.7.3 and 26.7.4), bisected.
    """
    low, high = 0.0, 1.0
    while _within(high, df) < 2 * p - 1:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, df) < 2 * p - 1 else (low, middle)
    return (low + high) / 2


def _within(t: float, df: int) -> float:
    angle = math.atan(t / math.sqrt(df))
    squared, odd = math.cos(angle) ** 2, df % 2
    # 1 + 1/2 c^2 + 1*3/(2*4) c^4 + ...; for odd df cos * (1 + 2/3 c^2 + 2*4/(3*5) c^4 + ...); the last power is df - 2.
    term = total = 1.0 if not odd else (math.cos(angle) if df > 1 else 0.0)
    for k in range(2 + odd, df - 1, 2):
        term *= (k - 1) / k * squared
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
