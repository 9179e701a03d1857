"""The gate catches every planted fault, gives no time for it, and raises no false alarm on correct code."""

import pytest
import torch

from blockshock_lib import params
from blockshock_lib.engine import experiment
from blockshock_lib.layers.problem import LinearProblem
from tests.cases import MASKS, METHODS, case
from tests.faults.planted import FAULTS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def quick():
    return params.load(
        "phase1", {"timing.samples": 2, "timing.warmup": 1, "profile": "none"}, choose={"hardware": "cpu"}
    )


def rows_of(method, world_size, mask, quick, tmp_path, **changes):
    one = case(phase="phase1", methods=(method,), world_size=world_size, mask=mask, in_features=512, **changes)
    problem = LinearProblem(one, CPU)
    return experiment.measure(problem, quick, group_index=0, traces=tmp_path, last=False)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_planted_fault_is_caught_and_has_no_time(fault, dtype, monkeypatch, quick, tmp_path):
    fault(monkeypatch)
    rows = rows_of(*FAULTS[fault], quick, tmp_path, dtype=dtype)
    checks = [row for row in rows if row["metric"] == "check"]
    assert [row["status"] for row in checks] == ["failed"] and checks[0]["reason"]
    assert not [row for row in rows if row["unit"] == "ms" and row["status"] == "ok"]


@pytest.mark.parametrize("broken", sorted(set(FAULTS.values())), ids=str)
def test_without_the_fault_the_same_case_passes_and_is_timed(broken, quick, tmp_path):
    rows = rows_of(*broken, quick, tmp_path)
    assert [row["status"] for row in rows if row["metric"] == "check"] == ["ok"]
    assert [row for row in rows if row["metric"] == "forward_call"]


def test_200_seeds_of_correct_code_raise_no_false_alarm(quick, tmp_path):
    dtypes, workloads, worlds = ("bf16", "fp16", "fp32"), ("gaussian", "uniform", "activation"), (2, 4, 8)
    alarms = []
    for seed in range(200):
        one = case(
            seed=seed,
            mask=MASKS[seed % len(MASKS)],
            dtype=dtypes[seed % 3],
            workload=workloads[seed // 3 % 3],
            world_size=worlds[seed // 9 % 3],
            in_features=512,
            out_features=512,
        )
        rows = experiment.measure(LinearProblem(one, CPU), quick, group_index=0, traces=tmp_path, last=False)
        checked = {row["method"]: row for row in rows if row["metric"] == "check"}
        assert set(checked) == set(METHODS)
        alarms += [(seed, one.label, row) for row in checked.values() if row["status"] == "failed"]
    assert alarms == []
