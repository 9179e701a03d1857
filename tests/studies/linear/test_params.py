"""Plan: the product of what is swept, in a fixed order, each case once and with an id that never changes."""

import dataclasses

import pytest

from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.params import load
from blockshock_lib.studies.linear import STUDY
from blockshock_lib.studies.linear.params import Case, Workload, expand
from tests.cases import case

CASE = case(
    **dict(phase="phase1", methods=("row_parallel", "block_shock"), device="cuda", emulated=False, bias=False),
    **dict(in_features=4096, out_features=16384, batch=16, workload="mlp_up"),
)
CHANGES = dict(
    phase="phase0",
    methods=("block_shock", "row_parallel"),
    mask=Mask(name="checkerboard", family="transposable", pattern="random"),
    workload=Workload(name="mlp_up", distribution="gaussian", out_scale=4),
    **dict(dtype="fp16", device="cpu", product="cslt", optimizer="sgd", dw="full", bias=True, emulated=True),
    **dict(in_features=8192, out_features=4096, batch=17, world_size=4, seed=1),
)


def cases(overrides=None, phase="phase1", hardware="cpu"):
    return expand(load(STUDY, phase, overrides, choose={"hardware": hardware}))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Case)])
def test_every_field_changes_the_id(field):
    assert dataclasses.replace(CASE, **{field: CHANGES[field]}).id != CASE.id


def test_cases_come_once_in_order_of_dtype_workload_mask_size_and_batch():
    swept = {"n": [512, 256], "features": [[128, 1024], [256, 256]], "b": [8, 2, 8], "dtypes": ["fp16", "bf16"]}
    swept |= {"workloads": ["uniform", "gaussian"], "masks": ["random", "checkerboard", "random"]}
    found = cases({f"sweep.{key}": values for key, values in swept.items()})
    assert [(c.dtype, c.workload.name, c.mask.name, c.in_features, c.out_features, c.batch) for c in found] == [
        (dtype, workload, mask, *size, batch)
        for dtype in ("fp16", "bf16")
        for workload in ("uniform", "gaussian")
        for mask in ("random", "checkerboard")
        for size in ((256, 256), (128, 1024), (512, 512))
        for batch in (2, 8)
    ]


def test_workload_scales_n_but_not_explicit_features():
    swept = {"sweep.n": [256], "sweep.features": [[128, 256]], "sweep.b": [1]}
    for workload, scaled in (("mlp_up", (256, 1024)), ("mlp_down", (1024, 256))):
        found = cases(swept | {"workload": workload})
        assert [(c.in_features, c.out_features) for c in found] == [(128, 256), scaled]


def test_every_parameter_of_a_case_reaches_it():
    changed = {"seed": 5, "bias": True, "product": "reference", "hardware.world_size": 4, "methods": ["dense"]}
    (case,) = cases(changed | {"sweep.n": [256], "sweep.b": [3], "hardware.emulated": True})
    assert (case.phase, case.seed, case.bias, case.product) == ("phase1", 5, True, "reference")
    assert (case.device, case.world_size, case.emulated, case.methods) == ("cpu", 4, True, ("dense",))
    (case,) = cases({"optimizers": ["adamw"], "dw": "full", "sweep.n": [256], "sweep.b": [3]}, phase="phase3")
    assert (case.optimizer, case.dw) == ("adamw", "full")
