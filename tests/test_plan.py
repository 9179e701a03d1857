"""Plan: the product of what is swept, in a fixed order, each case once and with an id that never changes."""

import ast
import dataclasses
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from blockshock_lib import plan
from blockshock_lib.params import Mask, Workload, load
from blockshock_lib.plan import Case, expand

CASE = Case(
    phase="phase1",
    methods=("row_parallel", "block_shock"),
    in_features=4096,
    out_features=16384,
    batch=16,
    dtype="bf16",
    bias=False,
    mask=Mask(name="checkerboard", family="transposable", pattern="checkerboard"),
    workload=Workload(name="mlp_up", distribution="activation", out_scale=4),
    product="auto",
    device="cuda",
    world_size=2,
    emulated=False,
    seed=0,
)
CHANGES = {
    "phase": "phase0",
    "methods": ("block_shock", "row_parallel"),
    "in_features": 8192,
    "out_features": 4096,
    "batch": 17,
    "dtype": "fp16",
    "bias": True,
    "mask": Mask(name="checkerboard", family="transposable", pattern="random"),
    "workload": Workload(name="mlp_up", distribution="gaussian", out_scale=4),
    "product": "cslt",
    "device": "cpu",
    "world_size": 4,
    "emulated": True,
    "seed": 1,
    "optimizer": "sgd",
    "dw": "full",
}


def cases(overrides=None, phase="phase1", hardware="cpu"):
    return expand(load(phase, overrides, choose={"hardware": hardware}))


def test_id_is_the_pinned_one():
    assert CASE.id == "6542f8d29cb4"


def test_id_is_the_same_in_another_process():
    code = (
        "import json, sys; from blockshock_lib.plan import Case; print(Case.from_dict(json.load(sys.stdin)).id, end='')"
    )
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(dict(reversed(CASE.as_dict().items()))),
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            cwd=Path(plan.__file__).parent.parent,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == CASE.id


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Case)])
def test_every_field_changes_the_id(field):
    assert dataclasses.replace(CASE, **{field: CHANGES[field]}).id != CASE.id


def test_case_comes_back_from_json_unchanged():
    again = Case.from_dict(json.loads(json.dumps(CASE.as_dict())))
    assert again == CASE and again.id == CASE.id
    assert pickle.loads(pickle.dumps(CASE)) == CASE


@pytest.mark.parametrize(
    "change",
    [{"colour": "red"}, {"mask": {"name": "x", "family": "rndom"}}, {"workload": {"name": "x"}}],
    ids=["unknown_field", "bad_mask", "bad_workload"],
)
def test_damaged_case_is_refused(change):
    with pytest.raises(ValueError):
        Case.from_dict(CASE.as_dict() | change)


def test_case_without_a_field_is_refused():
    plain = CASE.as_dict()
    del plain["seed"]
    with pytest.raises(ValueError, match="seed"):
        Case.from_dict(plain)


def test_a_case_without_the_fields_that_came_later_reads_as_it_was():
    assert not {"optimizer", "dw"} & set(CASE.as_dict())
    assert Case.from_dict(CASE.as_dict()) == CASE
    trained = dataclasses.replace(CASE, phase="phase3", optimizer="adamw", dw="exchange")
    assert {"optimizer", "dw"} < set(trained.as_dict()) and Case.from_dict(trained.as_dict()) == trained


def test_the_committed_reference_run_is_of_the_cases_that_its_phase_expands_to_now():
    folder = Path(plan.__file__).parent.parent / "outputs" / "reference" / "phase1-cpu" / "records"
    recorded = {json.loads(path.read_text())["id"] for path in folder.glob("*.json")}
    assert recorded == {case.id for case in cases()} and len(recorded) == 6


def test_optimizers_are_swept_one_after_the_other():
    found = cases({"sweep.n": [256, 128], "sweep.b": [4]}, phase="phase3")
    assert [(c.optimizer, c.in_features) for c in found] == [("sgd", 128), ("sgd", 256), ("adamw", 128), ("adamw", 256)]
    assert [c.optimizer for c in cases(phase="phase2")] == [""] * 8


def test_label_names_the_weight_as_out_x_in():
    assert CASE.label == "16384x4096 B=16 bf16 checkerboard mlp_up"
    assert dataclasses.replace(CASE, optimizer="adamw").label == f"{CASE.label} adamw"


def test_cases_come_in_order_of_dtype_workload_mask_size_and_batch():
    found = cases(
        {
            "sweep.n": [512, 256],
            "sweep.features": [[128, 1024]],
            "sweep.b": [8, 2],
            "sweep.dtypes": ["fp16", "bf16"],
            "sweep.workloads": ["uniform", "gaussian"],
            "sweep.masks": ["random", "checkerboard"],
        }
    )
    assert [(c.dtype, c.workload.name, c.mask.name, c.in_features, c.out_features, c.batch) for c in found] == [
        (dtype, workload, mask, *size, batch)
        for dtype in ("fp16", "bf16")
        for workload in ("uniform", "gaussian")
        for mask in ("random", "checkerboard")
        for size in ((256, 256), (128, 1024), (512, 512))
        for batch in (2, 8)
    ]


def test_sizes_ascend_by_the_number_of_weights():
    found = cases({"sweep.n": [256], "sweep.features": [[1024, 128], [128, 128]], "sweep.b": [1]})
    assert [(c.in_features, c.out_features) for c in found] == [(128, 128), (256, 256), (1024, 128)]


def test_workload_scales_n_but_not_explicit_features():
    found = cases(
        {"sweep.n": [256], "sweep.features": [[128, 256]], "sweep.b": [1], "sweep.workloads": ["mlp_up", "mlp_down"]}
    )
    assert [(c.workload.name, c.in_features, c.out_features) for c in found] == [
        ("mlp_up", 128, 256),
        ("mlp_up", 256, 1024),
        ("mlp_down", 128, 256),
        ("mlp_down", 1024, 256),
    ]


def test_no_case_comes_twice():
    found = cases(
        {
            "sweep.n": [256, 256],
            "sweep.features": [[256, 256], [256, 256]],
            "sweep.b": [4, 4],
            "sweep.dtypes": ["bf16", "bf16"],
            "sweep.masks": ["random", "random"],
            "sweep.workloads": ["gaussian", "gaussian"],
        }
    )
    assert len(found) == 1


@pytest.mark.parametrize(
    ("phase", "hardware", "number"),
    [("phase0", h, 35) for h in ("cpu", "cuda-1", "cuda", "cuda-4", "cuda-8")]
    + [("phase1", "cpu", 6)]
    + [("phase1", h, 20) for h in ("cuda-1", "cuda", "cuda-4", "cuda-8")]
    + [("phase2", "cpu", 8), ("phase2", "cuda", 9), ("phase3", "cpu", 8), ("phase3", "cuda", 6)],
)
def test_shipped_phases_expand_to_this_many_cases(phase, hardware, number):
    found = cases(phase=phase, hardware=hardware)
    assert len(found) == len({case.id for case in found}) == number


def test_every_parameter_of_a_case_reaches_it():
    changed = {"seed": 5, "bias": True, "product": "reference", "hardware.world_size": 4, "methods": ["dense"]}
    (case,) = cases(changed | {"sweep.n": [256], "sweep.b": [3], "hardware.emulated": True})
    assert (case.phase, case.seed, case.bias, case.product) == ("phase1", 5, True, "reference")
    assert (case.device, case.world_size, case.emulated, case.methods) == ("cpu", 4, True, ("dense",))
    (case,) = cases({"optimizers": ["adamw"], "dw": "full", "sweep.n": [256], "sweep.b": [3]}, phase="phase3")
    assert (case.optimizer, case.dw) == ("adamw", "full")


def test_plan_needs_nothing_but_params_and_the_standard_library():
    tree = ast.parse(Path(plan.__file__).read_text())
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    names |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    assert {name for name in names if name.split(".")[0] not in sys.stdlib_module_names} == {"blockshock_lib.params"}
