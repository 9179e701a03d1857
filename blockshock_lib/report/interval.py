"""The 99% interval of a ratio of times, over fresh groups of processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Student's t, 99.5% quantile, for 1, 2, ... 30 degrees of freedom.
_T995 = (
    *(63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169),
    *(3.106, 3.055, 3.012, 2.977, 2.947, 2.921, 2.898, 2.878, 2.861, 2.845),
    *(2.831, 2.819, 2.807, 2.797, 2.787, 2.779, 2.771, 2.763, 2.756, 2.750),
)


class Interval(NamedTuple):
    """A ratio and its 99% interval, all in "x" (times)."""

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
    if any(len(values) == 0 for values in (*over, *under)):
        raise ValueError("a group has no samples")
    logs = np.log([np.median(a) / np.median(b) for a, b in zip(over, under, strict=True)])
    ratio, groups = float(np.exp(logs.mean())), len(logs)
    if groups == 1:
        return Interval(ratio, 0.0, float("inf"))
    reach = _T995[min(groups - 1, len(_T995)) - 1] * float(logs.std(ddof=1)) / groups**0.5
    return Interval(ratio, ratio * float(np.exp(-reach)), ratio * float(np.exp(reach)))
