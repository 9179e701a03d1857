"""Phase 1's ways on real GPUs: each is there, by its name, and what was timed has been checked."""

import pytest
import torch

from blockshock_lib.kernels.sparse24 import cslt, small
from blockshock_lib.ranks import call
from tests.studies.linear import measuring
from tests.studies.linear.measuring import asked, problem, rows_of

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
            assert details(rows, "forward_chunks_kernel", method) == {"1", "2"}
            assert details(rows, "forward_graph_call", method) == {""}
        assert "nccl" in details(rows, "reduce_by_kernel", "row_parallel")
        assert details(rows, "reduce_kernel", "row_parallel") <= details(rows, "reduce_by_kernel", "row_parallel")
        if details(rows, "reduce_kernel", "row_parallel") & {"one-shot", "two-shot"}:
            shared = {row["rank"]: row["value"] for row in rows if row["metric"] == "shared_bytes"}
            assert set(shared) == {0, 1} and min(shared.values()) >= 1024 * 1024 * 2  # y
