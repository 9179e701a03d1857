"""Small cases for the tests, in the shapes that the library really uses."""

from __future__ import annotations

from blockshock_lib.params import Mask, Workload
from blockshock_lib.plan import Case

METHODS = ("dense", "row_parallel", "column_parallel", "masked_dense", "permuted_dense", "block_shock")
MASKS = ("uniform_1100", "uniform_1010", "uniform_1001", "random", "checkerboard", "transposable_random", "magnitude")


def case(**changes) -> Case:
    """An emulated 128 x 256 case of all methods on the CPU; `mask` may be a shipped name."""
    fields = dict(
        phase="phase0",
        methods=METHODS,
        in_features=256,
        out_features=128,
        batch=16,
        dtype="bf16",
        bias=True,
        mask="checkerboard",
        workload=Workload(name="gaussian", distribution="gaussian"),
        product="auto",
        device="cpu",
        world_size=2,
        emulated=True,
        seed=0,
    )
    fields |= changes
    if isinstance(fields["mask"], str):
        fields["mask"] = Mask.named(fields["mask"])
    if isinstance(fields["workload"], str):
        fields["workload"] = Workload(name=fields["workload"], distribution=fields["workload"])
    return Case(**fields)
