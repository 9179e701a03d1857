"""Phase 1's ways on real GPUs: each is there, by its name, and what was timed has been checked."""

import pytest
import torch

from blockshock_lib.engine.case_run import judge
from blockshock_lib.kernels.sparse24 import cslt, small
from tests.gpu import reduce_tasks
from tests.processes import call
from tests.studies.linear import measuring
from tests.studies.linear.measuring import asked, on_ranks, picked, problem, rows_of
from tests.studies.linear.test_lines import fp8_forward

METHODS = ("row_parallel", "block_shock", "block_shock_torch")


def details(rows, metric, method):
    return set(measuring.details(rows, metric, method))


@pytest.fixture(scope="module")
def sparse():
    if reason := cslt.unsupported(torch.device("cuda", 0), torch.bfloat16):
        pytest.skip(reason)
    return {"cslt"} if small.unsupported(torch.device("cuda", 0), torch.bfloat16) else {"cslt", "small"}


@pytest.mark.parametrize("mask", ["checkerboard", "random"])
@pytest.mark.parametrize("batch", [5, 256])
def test_one_gpu_times_every_product(sparse, mask, batch):
    fields = dict(in_features=512, out_features=1024, batch=batch, mask=mask, device="cuda")
    quick = asked("phase1", "cuda-1")
    rows = rows_of(problem(quick, on=torch.device("cuda", 0), phase="phase1", methods=METHODS, **fields))
    assert {row["status"] for row in rows if row["metric"] == "check"} == {"ok"}
    ways = sparse if batch <= small.MOST_ROWS else {"cslt"}
    assert details(rows, "product_by_kernel", "block_shock") == (ways if len(ways) > 1 else set())
    assert details(rows, "compute_kernel", "block_shock") <= ways
    assert not details(rows, "forward_graph_call", "block_shock"), "emulated ranks have no graph of their own"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
def test_two_gpus_time_their_graphs_their_cut_batches_and_their_all_reduces(sparse, tmp_path):
    ranks = dict(processes=2, device="cuda", backend="nccl", logs=tmp_path, seconds=300)
    for rows in call(measuring.on_two_ranks, 1024, "bf16", METHODS, **ranks):
        assert {row["status"] for row in rows if row["metric"] == "check"} == {"ok"}
        for method in METHODS:
            assert details(rows, "forward_chunks_kernel", method) == {"1", "2", "4"}
            assert details(rows, "forward_graph_call", method) == {""}
        assert "nccl" in details(rows, "reduce_by_kernel", "row_parallel")
        assert details(rows, "reduce_kernel", "row_parallel") <= details(rows, "reduce_by_kernel", "row_parallel")
        if details(rows, "reduce_kernel", "row_parallel") & {"one-shot", "two-shot"}:
            shared = {row["rank"]: row["value"] for row in rows if row["metric"] == "shared_bytes"}
            assert set(shared) == {0, 1} and min(shared.values()) >= 1024 * 1024 * 2  # y


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
@pytest.mark.parametrize("mask", ["checkerboard", "random"])
def test_two_gpus_time_their_passes_and_steps_in_every_order_and_way(sparse, tmp_path, mask):
    ranks = dict(processes=2, device="cuda", backend="nccl", logs=tmp_path, seconds=300)
    for rows in call(measuring.backward_on_two_ranks, 1024, "bf16", mask, **ranks):
        assert [row for one in rows.values() for row in one if row["status"] == "failed"] == []
        timed = {(row["method"], row["metric"]) for one in rows.values() for row in one}
        assert {("block_shock", "pass_kernel"), ("block_shock_recompress", "step_kernel")} <= timed
        ways = {"full", "exchange", *["periodic"] * (mask == "checkerboard")}
        assert details(rows["phase3"], "dw_strategy_kernel", "block_shock") == ways


@torch.no_grad()
@pytest.mark.parametrize("wrong", ["", "a lost row of W", "the other rank's columns", "the bias twice"])
def test_an_fp8_product_is_right_and_a_wrong_one_is_refused(wrong):
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("no fp8")
    fields = dict(in_features=256 if wrong else 16384, out_features=1024, batch=64, device="cuda")
    for _, check in on_ranks(problem(on=device, **fields), lambda own: fp8_forward(own, wrong)):
        assert bool(judge(check)[0]) == bool(wrong), judge(check)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
def test_two_gpus_time_the_reference_lines_or_say_why_not(tmp_path):
    ranks = dict(processes=2, device="cuda", backend="nccl", logs=tmp_path, seconds=300)
    why = {"compiled": "", "fp8": "8.9" if torch.cuda.get_device_capability() < (8, 9) else ""}
    why["fused"] = call(reduce_tasks.unsupported, **ranks)[0]
    for rows in call(measuring.on_two_ranks, 1024, "bf16", ("row_parallel",), **ranks):
        assert [row["status"] for row in picked(rows, "row_parallel", "check")] == ["ok"]
        for line, reason in why.items():
            calls, kernels = (picked(rows, "row_parallel", f"forward_{line}_{kind}") for kind in ("call", "kernel"))
            assert {row["status"] for row in calls} == {"unsupported" if reason else "ok"}, calls
            assert reason in calls[0]["reason"]
            assert {row["status"] for row in kernels} <= {"ok", "unsupported"}
        if not why["fp8"]:
            (error,) = picked(rows, "row_parallel", "fp8_error_rms")
            assert 0.01 < error["value"] < 0.06
