"""The gate catches every planted fault, gives no time for it, and raises no false alarm on correct code."""

import pytest

from blockshock_lib.report.axes import TWIN
from tests.cases import MASKS, METHODS
from tests.faults.planted import FORWARD, TRAINING
from tests.studies.linear.measuring import asked, measured

TIMED, TRAINED = asked("phase1"), asked("phase3", loss_steps=0)


def of_forward(fault):
    return dict(methods=(fault.method,), in_features=512) | fault.case


def of_training(fault):
    return dict(methods=(fault.method,), in_features=128, out_features=128) | fault.case


def checks(rows):
    # Where B1 is timed its twin, the same code, is checked beside it.
    return [row for row in rows if row["metric"] == "check" and row["method"] != TWIN]


def assert_refused(rows, *reasons):
    (found,) = checks(rows)
    assert found["status"] == "failed" and found["reason"].startswith(reasons)
    timed = [row for row in rows if row["unit"] == "ms" and row["status"] == "ok"]
    assert not [row for row in timed if row["method"] in (found["method"], TWIN)]


def assert_timed(rows, metric):
    assert [row["status"] for row in checks(rows)] == ["ok"]
    assert any(row["metric"] == metric and row["status"] == "ok" for row in rows)


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_fault_of_the_forward_is_caught_and_has_no_time(name, dtype, monkeypatch):
    FORWARD[name].plant(monkeypatch)
    assert_refused(measured(TIMED, dtype=dtype, **of_forward(FORWARD[name])), "rank ")


@pytest.mark.parametrize("name", TRAINING)
def test_a_fault_of_training_is_caught_by_its_tensor_and_has_no_time(name, monkeypatch):
    fault = TRAINING[name]
    fault.beside(monkeypatch)
    fault.plant(monkeypatch)
    assert_refused(measured(TRAINED, **of_training(fault)), f"rank 0: {fault.tensor}", f"rank 1: {fault.tensor}")


@pytest.mark.parametrize(
    "fault", {str(of_training(one)): one for one in TRAINING.values()}.values(), ids=lambda fault: fault.method
)
def test_without_the_fault_the_same_step_passes_and_is_timed(fault, monkeypatch):
    fault.beside(monkeypatch)
    assert_timed(measured(TRAINED, **of_training(fault)), "step_call")


@pytest.mark.long
def test_200_seeds_of_correct_code_raise_no_false_alarm():
    dtypes, workloads, worlds = ("bf16", "fp16", "fp32"), ("gaussian", "uniform", "activation"), (2, 4, 8)
    only_checked, alarms = asked("phase0"), []
    for seed in range(200):
        drawn = dict(dtype=dtypes[seed % 3], workload=workloads[seed // 3 % 3], world_size=worlds[seed // 9 % 3])
        size = 512 if seed % 10 == 0 else 256
        drawn |= dict(mask=MASKS[seed % len(MASKS)], seed=seed, in_features=size, out_features=size)
        rows = measured(only_checked, **drawn)
        assert {row["method"] for row in checks(rows)} == set(METHODS)
        alarms += [(seed, row) for row in checks(rows) if row["status"] == "failed"]
    assert alarms == []
