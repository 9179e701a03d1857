"""What happens to one rank alone costs its method a row, and neither hangs the others nor ends the case."""

import pytest
import torch

from blockshock_lib import params
from blockshock_lib.engine import experiment
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import RowParallelLinear
from blockshock_lib.ranks import call
from blockshock_lib.runs import measure
from blockshock_lib.studies.linear import STUDY
from tests.cases import case

SHORT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has")


def fail(*_):
    raise SHORT


def refuse(*_):
    raise UnsupportedError("no algorithm gave right values")


def first_use_does_not_fit(ctx, *asked):
    if ctx.rank == 1:
        RowParallelLinear.local = fail
    return measure.measure(ctx, *asked)


def copies_do_not_fit(ctx, *asked):
    """Those of row_parallel that timing rotates over."""
    experiment.copies_past_cache = lambda *_: 3
    if ctx.rank == 1:
        right = experiment.Session.tuned
        experiment.Session.tuned = lambda self, name: fail() if name == "row_parallel" else right(self, name)
    return measure.measure(ctx, *asked)


def tuning_is_refused(ctx, *asked):
    if ctx.rank == 0:
        RowParallelLinear.tune = refuse
    return measure.measure(ctx, *asked)


@pytest.mark.long
@pytest.mark.parametrize(
    "fault, status, reason",
    [
        (first_use_does_not_fit, "oom", "rank 1: CUDA out of memory. Tried to allocate 20.00 GiB."),
        (copies_do_not_fit, "oom", "rank 1: CUDA out of memory. Tried to allocate 20.00 GiB."),
        (tuning_is_refused, "unsupported", "rank 0: no algorithm gave right values"),
    ],
)
def test_a_fault_of_one_rank_is_a_row_and_the_other_methods_are_timed(fault, status, reason, tmp_path):
    few = {"timing.samples": 2, "timing.warmup": 1, "profile": "none"}
    asked = params.load(STUDY, "phase1", few, choose={"hardware": "cpu"})
    one = case(phase="phase1", emulated=False, methods=("row_parallel", "dense", "block_shock"))
    for rows in call(fault, "linear", one, asked, 0, processes=2, logs=tmp_path, seconds=60):
        of = {method: [row for row in rows if row["method"] == method] for method in one.methods}
        (missed,) = (row for row in of["row_parallel"] if row["status"] == status)
        assert missed["reason"].startswith(reason)
        timed = {method: [row["metric"] for row in mine].count("forward_kernel") for method, mine in of.items()}
        assert timed == {"row_parallel": 0, "dense": 2, "block_shock": 2}
