"""Products of Block-Shock that are not finite, planted in one of several real ranks, which import these by name."""

import math
from unittest import mock

from blockshock_lib.layers.block_shock import BlockShockLinear
from blockshock_lib.runs import measure

# What is planted -> the batch size of the case that it is planted in (one group of workers measures them all), the
# value, its rank, how many entries it takes (None: all), and how many calls are right before.
PLANTED = {
    "nothing": (16, None, None, None, 0),
    "NaN on one rank": (32, math.nan, 1, None, 0),
    "one Inf": (48, math.inf, 0, 1, 0),
    "NaN after the first check": (64, math.nan, 1, None, 1),  # the method is admitted and timed before it shows
}


def by_batch(ctx, study, case, params, group, done=()):
    value, rank, entries, right_calls = next(fault for batch, *fault in PLANTED.values() if batch == case.batch)
    right, calls = BlockShockLinear.local, 0

    def local(self, x):
        nonlocal calls
        calls += 1
        y = right(self, x)
        if ctx.rank == rank and calls > right_calls:
            y.flatten()[:entries] = value
        return y

    with mock.patch.object(BlockShockLinear, "local", local if value else right):
        return measure.measure(ctx, study, case, params, group)
