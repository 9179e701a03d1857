"""Products of Block-Shock that are not finite, planted in one of several real ranks, which import these by name."""

from blockshock_lib import worker
from blockshock_lib.layers.block_shock import BlockShockLinear

RIGHT = BlockShockLinear.local


# The batch size of the case says what is planted in it: one group of workers measures them all.
PLANTED = {
    "nothing": 16,
    "NaN on one rank": 32,
    "one Inf": 48,
    "NaN after the first check": 64,  # the method is admitted and timed before it shows
}


def by_batch(ctx, case, params, group):
    what = {
        16: None,
        32: dict(value=float("nan"), rank=1),
        48: dict(value=float("inf"), rank=0, entries=1),
        64: dict(value=float("nan"), rank=1, right_calls=1),
    }[case.batch]
    return _measure(ctx, case, params, group, **what) if what else worker.measure(ctx, case, params, group)


def _measure(ctx, case, params, group, value, *, rank, entries=None, right_calls=0):
    calls = 0

    def local(self, x):
        nonlocal calls
        calls += 1
        y = RIGHT(self, x)
        if ctx.rank == rank and calls > right_calls:
            y.flatten()[:entries] = value
        return y

    BlockShockLinear.local = local
    try:
        return worker.measure(ctx, case, params, group)
    finally:
        BlockShockLinear.local = RIGHT
