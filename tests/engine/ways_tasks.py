"""What a spawned rank measures for test_ways.py, and on GPUs for tests/gpu/test_engine.py."""

from __future__ import annotations

from unittest import mock

from blockshock_lib import params
from blockshock_lib.comm import Group
from blockshock_lib.engine import experiment
from blockshock_lib.layers.problem import LinearProblem
from tests.cases import case

METHODS = ("dense", "row_parallel", "block_shock")


def measured(ctx, features: int = 128, dtype: str = "fp32", methods: tuple[str, ...] = METHODS) -> list[dict]:
    """The rows of a batch of 1024 on two ranks."""
    asked = {"timing.samples": 2, "timing.warmup": 1, "timing.min_sample_ms": 0, "profile": "none"}
    quick = params.load("phase1", asked, choose={"hardware": "cpu"})
    fields = dict(in_features=features, out_features=features, batch=1024, dtype=dtype, device=ctx.device.type)
    one = case(phase="phase1", methods=methods, emulated=False, bias=False, **fields)
    return experiment.measure(
        LinearProblem(one, ctx.device), quick, group_index=0, traces=ctx.log.parent, last=False, first=False
    )


def shared(ctx) -> list[tuple[int, float]]:
    """What the rows say of memory that the sums share, of two ranks that share some."""
    with mock.patch.object(Group, "shared_bytes", lambda self, device: 4096):
        rows = measured(ctx, methods=("row_parallel",))
    return [(row["rank"], row["value"]) for row in rows if row["metric"] == "shared_bytes"]
