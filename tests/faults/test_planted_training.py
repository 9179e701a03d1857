"""The check of a training step catches every planted fault, names the tensor, and gives no time for it."""

import pytest
import torch

from blockshock_lib import params
from blockshock_lib.engine import experiment
from blockshock_lib.layers.problem import LinearProblem
from tests.cases import case
from tests.faults.planted_training import ALONGSIDE, FAULTS

CPU = torch.device("cpu")
N = 128


@pytest.fixture(scope="module")
def quick():
    settings = {
        "timing.samples": 1,
        "timing.warmup": 1,
        "timing.min_sample_ms": 0.01,
        "profile": "none",
        "loss_steps": 0,
    }
    return params.load("phase3", settings, choose={"hardware": "cpu"})


def rows_of(method, quick, tmp_path, **changes):
    one = case(phase="phase3", methods=(method,), in_features=N, out_features=N, **changes)
    return experiment.measure(LinearProblem(one, CPU), quick, group_index=0, traces=tmp_path, last=False)


def checks(rows):
    return [row for row in rows if row["metric"] == "check"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_caught_by_its_tensor_and_has_no_time(fault, monkeypatch, quick, tmp_path):
    method, changes, tensor = FAULTS[fault]
    if fault in ALONGSIDE:
        ALONGSIDE[fault](monkeypatch)
    fault(monkeypatch)
    rows = rows_of(method, quick, tmp_path, **changes)
    (found,) = checks(rows)
    assert found["status"] == "failed" and found["reason"].startswith((f"rank 0: {tensor}:", f"rank 0: {tensor} "))
    assert not [row for row in rows if row["unit"] == "ms" and row["status"] == "ok" and row["method"] == method]


WITHOUT = {(method, *changes.items()): ALONGSIDE.get(fault) for fault, (method, changes, _) in FAULTS.items()}


@pytest.mark.parametrize("broken", WITHOUT, ids=str)
def test_without_the_fault_the_same_case_passes_and_its_step_is_timed(broken, monkeypatch, quick, tmp_path):
    method, *changes = broken
    if WITHOUT[broken] is not None:
        WITHOUT[broken](monkeypatch)
    rows = rows_of(method, quick, tmp_path, **dict(changes))
    assert [row["status"] for row in checks(rows)] == ["ok"]
    assert [row for row in rows if row["metric"] == "step_call" and row["status"] == "ok"]
