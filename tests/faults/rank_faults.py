"""Faults that only one of several real ranks has; a spawned process imports these by name."""

import torch

from blockshock_lib import worker
from blockshock_lib.engine import experiment
from blockshock_lib.layers.row_parallel import RowParallelLinear

SHORT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has")


def first_use_does_not_fit(ctx, case, params, group):
    """Rank 1 runs out of memory when row_parallel first multiplies."""
    if ctx.rank == 1:
        RowParallelLinear.local = _fail
    return worker.measure(ctx, case, params, group)


def copies_do_not_fit(ctx, case, params, group):
    """Rank 1 runs out of memory when it builds the copies of row_parallel that timing rotates over."""
    experiment.copies_past_cache = lambda *_: 3
    if ctx.rank == 1:
        right = experiment.Session.copy
        experiment.Session.copy = lambda self, name: _fail() if name == "row_parallel" else right(self, name)
    return worker.measure(ctx, case, params, group)


def tuning_is_refused(ctx, case, params, group):
    """Rank 0 finds no right algorithm for row_parallel."""
    from blockshock_lib.errors import UnsupportedError

    def refuse(self, x):
        raise UnsupportedError("no algorithm gave right values")

    if ctx.rank == 0:
        RowParallelLinear.tune = refuse
    return worker.measure(ctx, case, params, group)


def _fail(*_):
    raise SHORT
