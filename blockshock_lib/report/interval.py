"""The interval of a ratio of times, over fresh groups of processes: of one run (paired), or of two (independent)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """A ratio and its interval, all in "x" (times)."""

    ratio: float
    low: float
    high: float


def ratio_interval(over: Sequence[np.ndarray], under: Sequence[np.ndarray]) -> Interval:
    """t(over) / t(under) with its 99% interval.

    Args:
        over, under: the samples (any unit, > 0) of each group, the same groups in both; over[g] and under[g] were
            measured in the same processes, interleaved, so that what they share (clocks, heat, placement) cancels in
            their ratio.

    Each fresh group of processes is one independent observation: the log of the ratio of its medians. The ratio is
    their mean, the interval the mean +- t(G - 1) s / sqrt(G), Student's for G observations. The samples inside a group
    are not independent of each other, so they narrow nothing but the group's median. A percentile bootstrap over the
    groups holds the truth in 81% of simulations with 3 groups and in 56% with 2, for no resample can lie outside what
    was seen; this interval holds it in at least 97% (tests/report/test_interval.py). One group says nothing about the
    spread: (0, inf).

    Raises:
        ValueError: no group, an empty group, or groups that do not match.
    """
    if len(over) != len(under) or not over:
        raise ValueError(f"the two sides need the same groups, at least one: {len(over)} and {len(under)} were given")
    return _mean_interval(_log_medians(over) - _log_medians(under))


def quotient_interval(
    upper: tuple[Sequence[np.ndarray], Sequence[np.ndarray]], lower: tuple[Sequence[np.ndarray], Sequence[np.ndarray]]
) -> Interval:
    """The ratio of `upper` over the ratio of `lower` with its 99% interval, as `ratio_interval`.

    Args:
        upper, lower: (over, under) each, the samples of the same groups in all four: t(over) / t(under) of either pair.

    Raises:
        ValueError: no group, an empty group, or groups that do not match.
    """
    four = [*upper, *lower]
    if len({len(side) for side in four}) > 1 or not four[0]:
        raise ValueError(f"the four sides need the same groups, at least one: {[len(side) for side in four]} given")
    a, b, c, d = map(_log_medians, four)
    return _mean_interval((a - b) - (c - d))


def _mean_interval(logs: np.ndarray) -> Interval:
    ratio, groups = float(np.exp(logs.mean())), len(logs)
    if groups == 1:
        return Interval(ratio, 0.0, float("inf"))
    return _around(ratio, t_quantile(0.995, groups - 1) * float(logs.std(ddof=1)) / groups**0.5)


def welch_interval(over: Sequence[np.ndarray], under: Sequence[np.ndarray], level: float = 0.99) -> Interval:
    """t(over) / t(under) of two runs that share nothing, with its interval at `level`.

    Args:
        over, under: the samples (any unit, > 0) of each group of either run; the runs may have different numbers of
            groups.
        level: how often the interval is to hold the truth, 0 < level < 1.

    Each group is one observation, the log of its median. The ratio is that of the two geometric means; the interval is
    Welch's for unequal spreads, t(df) sqrt(s1^2 / G1 + s2^2 / G2), its Welch-Satterthwaite degrees of freedom rounded
    down, and never below the smaller G - 1, which is their least. What a whole run shares (another day, its heat, its
    neighbours) is in no group's spread, so it is not in the interval. One group on a side: (0, inf).

    Raises:
        ValueError: a side without a group, or an empty group.
    """
    if not over or not under:
        raise ValueError(f"either side needs a group at least: {len(over)} and {len(under)} were given")
    sides = _log_medians(over), _log_medians(under)
    ratio = float(np.exp(sides[0].mean() - sides[1].mean()))
    free = [len(side) - 1 for side in sides]
    if min(free) == 0:
        return Interval(ratio, 0.0, float("inf"))
    parts = [float(side.var(ddof=1)) / len(side) for side in sides]
    spread = sum(part**2 / df for part, df in zip(parts, free, strict=True))
    df = max(min(free), int(sum(parts) ** 2 / spread + 1e-9)) if spread else min(free)
    return _around(ratio, t_quantile((1 + level) / 2, df) * sum(parts) ** 0.5)


def _log_medians(groups: Sequence[np.ndarray]) -> np.ndarray:
    if any(len(values) == 0 for values in groups):
        raise ValueError("a group has no samples")
    return np.log([np.median(values) for values in groups])


def _around(ratio: float, reach: float) -> Interval:
    # A reach that exp() cannot hold is no interval; with df = 1 and a high level it is soon there.
    if reach > 700:
        return Interval(ratio, 0.0, float("inf"))
    return Interval(ratio, ratio * math.exp(-reach), ratio * math.exp(reach))


@cache
def t_quantile(p: float, df: int) -> float:
    """The p-quantile of Student's t with `df` degrees of freedom, to about 9 digits for p up to 1 - 1e-7.

    The finite series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4), bisected.

    Raises:
        ValueError: `p` is not between 0 and 1, or `df` is no whole number from 1 up.
    """
    if not 0 < p < 1 or df != int(df) or df < 1:
        raise ValueError(f"no quantile of Student's t: p = {p}, df = {df}")
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while _within(high, int(df)) < 2 * p - 1:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, int(df)) < 2 * p - 1 else (low, middle)
    return (low + high) / 2


def _within(t: float, df: int) -> float:
    """P(|T| <= t) for t >= 0."""
    angle = math.atan(t / math.sqrt(df))
    squared = math.cos(angle) ** 2
    odd = df % 2
    # 1 + 1/2 c^2 + 1*3/(2*4) c^4 + ...; for odd df cos * (1 + 2/3 c^2 + 2*4/(3*5) c^4 + ...); the last power is df - 2.
    term = total = 1.0 if not odd else (math.cos(angle) if df > 1 else 0.0)
    for k in range(2 + odd, df - 1, 2):
        term *= (k - 1) / k * squared
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
