"""The interval of a ratio of times, over fresh groups of processes: of one run (paired), or of two (independent).

Each fresh group of processes is one independent observation, the log of its median or of the ratio of its medians. A
percentile bootstrap over the groups holds the truth in 81% of simulations with 3 groups and in 56% with 2, for no
resample can lie outside what was seen; Student's interval holds it in at least 97%. One group says nothing of the
spread: (0, inf). Samples are arrays > 0, one a group; a side without a group, or an empty group, raises ValueError.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

Groups = Sequence[np.ndarray]


class Interval(NamedTuple):
    ratio: float
    low: float
    high: float


def ratio_interval(over: Groups, under: Groups) -> Interval:
    """t(over) / t(under) with its 99% interval: mean +- t(G - 1) s / sqrt(G) of G groups, in logs. over[g] and under[g]
    were measured in the same processes, interleaved, so that what they share (clocks, heat) cancels.
    """
    a, b = _log_medians(over, under)
    return _mean_interval(a - b)


def quotient_interval(upper: tuple[Groups, Groups], lower: tuple[Groups, Groups]) -> Interval:
    """The ratio of `upper`, an (over, under), over that of `lower`, with its 99% interval, as `ratio_interval`."""
    a, b, c, d = _log_medians(*upper, *lower)
    return _mean_interval((a - b) - (c - d))


def _mean_interval(logs: np.ndarray) -> Interval:
    free = len(logs) - 1
    reach = t_quantile(0.995, free) * float(logs.std(ddof=1)) / len(logs) ** 0.5 if free else math.inf
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
