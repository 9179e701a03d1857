"""The intervals of a ratio of times: over whole runs, the one of its mean and the one that predicts a further run; over
the fresh groups of one run; and of two runs that share nothing.

Each fresh group of processes is one observation, the log of its median or of the ratio of its medians. Between two runs
of unchanged code 82% of the ratios fell into the other's interval over groups, at 99%: a whole run has an effect of its
own (its GPUs, day, choice of kernels). So, with cell c, run r and group g,

    log ratio = mu[c] + m[c, r] + noise,  m of variance M for all cells, noise of variance w[c] within a run.

M comes from the runs, pooled over the cells (`between_runs`), w[c] from the groups within each run. Of R runs of G
groups the mean has variance (M + w/G) / R, and a further run of H groups lies around it with M (1 + 1/R) + w (1/(R G) +
1/H). Degrees of freedom of a sum of variances: Satterthwaite (1946), rounded down. Assumed: effects of runs are normal,
and cells have the same M; what a cell has beyond that is missed.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

LEVEL = 0.99
MACHINE = 0.014  # deviation of a run's effect on a log ratio: seen between three machines of one kind (2x H200)
FALSE = 0.005  # probability that runs without a drift are said to lie apart, were the scatter of cells known
PRIOR = 4  # as many degrees of freedom this value counts, against those of the runs themselves
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


def log_medians(groups: Iterable[np.ndarray]) -> np.ndarray:
    """Of samples > 0, one a group. Where two methods were measured in the same processes, interleaved, what they share
    (clocks, heat) cancels in the difference of theirs.
    """
    return np.log([np.median(values) for values in groups])


def intervals(cells: Sequence[Cell], level: float = LEVEL) -> list[Both]:
    """Of each cell's ratio. `mean`: over runs where any cell has several; of a single run Student's over its groups,
    which says nothing of other runs: (0, inf) for one group. `further`: of a run with as many groups as these have.
    """
    single, cells = max(map(len, cells), default=0) < 2, [*map(_summary, cells)]
    between = between_runs(cells)
    own = Between(0.0, 0) if single else between  # what a run does is then in no interval of the mean
    return [Both(_over_runs(one, own, 0, level), _over_runs(one, between, 1 / one.share, level)) for one in cells]


def predicted(cell: Cell, between: Between, groups: int, level: float = LEVEL) -> Interval:
    """In which the ratio of a further run of `groups` lies in `level` of all cases."""
    return _over_runs(_summary(cell), between, groups, level)


def between_runs(cells: Sequence[Cell]) -> Between:
    """M from the cells of the same runs: the two-way table of cell and run is split into what all cells of a run share
    and what is left; M is the sum of both less the noise within runs. Where cells move together they say little
    more than one cell, and Satterthwaite's degrees of freedom fall from cells x (runs - 1) to runs - 1. M is then
    shrunk to MACHINE**2 as if that had PRIOR degrees (a moderated variance: Smyth 2004), and is never below it.
    """
    runs, count, shared, apart, noise = _split(cells)
    free = len(runs) - 1
    if free < 1:
        return Between(MACHINE**2, PRIOR)
    own = (count - 1) / count * apart
    squares = shared**2 / free + (own**2 / free / (count - 1) if count > 1 else 0.0)
    degrees = (shared + own) ** 2 / squares if squares else float(free)
    beyond = max(0.0, shared + own - (noise or 0.0) - MACHINE**2)
    return Between(MACHINE**2 + beyond * degrees / (degrees + PRIOR), degrees + PRIOR)


def foretold(cells: Sequence[Cell], further: Sequence[np.ndarray], level: float = LEVEL) -> list[bool]:
    """Of each cell that the runs predict, whether the ratio of a further run, whose logs these are, lies there."""
    cells = [*map(_summary, cells)]
    between = between_runs(cells)
    ahead = [predicted(cell, between, len(logs), level) for cell, logs in zip(cells, further, strict=True)]
    told = [(one, np.exp(logs.mean())) for one, logs in zip(ahead, further, strict=True) if one.high < math.inf]
    return [bool(one.low <= ratio <= one.high) for one, ratio in told]


def caught(cells: Sequence[Cell], level: float = LEVEL) -> list[bool]:
    """`foretold` of the ratios of each run by the other runs."""
    found = []
    for run in sorted({run for cell in cells for run in cell}):
        several = [cell for cell in cells if run in cell and len(cell) > 1]
        others = [{name: logs for name, logs in cell.items() if name != run} for cell in several]
        found += foretold(others, [cell[run] for cell in several], level)
    return found


class Drift(NamedTuple):
    run: str  # that lies furthest from the others
    shift: float  # by which its log ratios lie above theirs, in the mean over cells
    scatter: float  # as far as the scatter of the cells, each by itself, lets that mean be off
    most: float  # as far as runs without a drift lie apart, whatever cells of a run share


def drift(cells: Sequence[Cell], tests: int = 1) -> Drift | None:
    """How far apart whole runs lie; None where fewer than two runs or cells tell. `tests`: of how many this is one
    (Bonferroni). What cells have each of their own averages out in the mean over cells: beyond its `scatter` the runs
    differ. What MACHINE**2 has beyond that all cells of a run may share: of 2,000 references without a drift at most 2%
    lie further apart than `most`, however it is shared. A drift of 3%, 1.7 deviations of MACHINE, is thus seen, but
    need not be more than machines differ.
    """
    runs, count, _, apart, noise = _split(cells)
    if len(runs) < 2 or count < 2:
        return None
    own = max(0.0, apart - noise) if noise is not None else 0.0  # one group a run tells no noise
    variance = apart / count
    wide = len(runs) / (len(runs) - 1)  # against the mean of the others, not of all
    run = max(runs, key=lambda run: round(abs(runs[run]), 9))
    quantile = NormalDist().inv_cdf(1 - FALSE / 2 / len(runs) / tests)
    reach = [quantile * (wide * one) ** 0.5 for one in (variance, variance + max(0.0, MACHINE**2 - own))]
    return Drift(run, runs[run] * wide, *reach)


def _split(cells: Sequence[Cell]) -> tuple[dict[str, float], int, float, float, float | None]:
    """Of the cells of those runs that most cells have, for phases are measured in runs of their own: run -> how far its
    mean lies above that of all runs; the number of cells; the variance of what all cells of a run share; that of each
    cell's own, with noise; and the noise of a cell's mean in a run, None where no run has two groups.
    """
    of = [*map(_summary, cells)]
    runs = max(
        Counter(frozenset(one.means) for one in of).items(),
        key=lambda one: (one[1] * (len(one[0]) > 1), sorted(one[0])),
        default=(frozenset(), 0),
    )[0]
    of = [one for one in of if one.means.keys() == runs]
    count, free = len(of), len(runs) - 1
    if free < 1:
        return dict.fromkeys(runs, 0.0), count, 0.0, 0.0, None
    means = np.array([[one.means[run] for run in sorted(runs)] for one in of])
    means = means - means.mean(axis=1, keepdims=True)
    together = means.mean(axis=0)
    shared = float((together**2).sum()) / free
    apart = float(((means - together) ** 2).sum()) / free / (count - 1) if count > 1 else 0.0
    noise = sum(one.noise * one.share for one in of) / count if any(one.free for one in of) else None
    return dict(zip(sorted(runs), map(float, together), strict=True)), count, shared, apart, noise


def by_run(keys: Iterable[tuple], logs: np.ndarray) -> Cell:
    """The cell of `logs`, whose groups have these keys (run, group)."""
    runs = np.array([run for run, _ in keys], dtype=object)
    return {run: logs[runs == run] for run in dict.fromkeys(runs)}


class _Summary(NamedTuple):
    means: dict[str, float]  # of the logs of each run
    share: float  # mean of 1 / groups
    noise: float  # variance of a group within its run; 0 where no run has two
    free: int  # degrees of freedom of the noise


def _summary(cell: Cell | _Summary) -> _Summary:
    if isinstance(cell, _Summary):
        return cell
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
    return _of_sum(ratio, [(ours, between.free), (noise, of.free)], level)


def welch_interval(over: np.ndarray, under: np.ndarray, level: float = LEVEL) -> Interval:
    """t(over) / t(under) of the logs of two runs that share nothing, one a group: Welch's, for unequal spreads. What a
    whole run shares (its day, heat) is not in it.
    """
    ratio = float(np.exp(over.mean() - under.mean()))
    if min(len(over), len(under)) < 2:
        return _around(ratio, math.inf)
    return _of_sum(ratio, [(float(x.var(ddof=1)) / len(x), len(x) - 1) for x in (over, under)], level)


def _of_sum(ratio: float, parts: Sequence[tuple[float, float]], level: float) -> Interval:
    """Around `ratio`, whose log has the sum of these (variance, degrees of freedom)."""
    variance = sum(part for part, _ in parts)
    squares = sum(part**2 / free for part, free in parts if free)
    free = int(variance**2 / squares + 1e-9) if squares else 1
    return _around(ratio, t_quantile((1 + level) / 2, free) * variance**0.5)


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
