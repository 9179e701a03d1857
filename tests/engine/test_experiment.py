"""The engine's stages: rows for everything asked, and a reason where there is no number."""

import gzip
import json

import pytest
import torch

from blockshock_lib import params
from blockshock_lib.comm import Group
from blockshock_lib.engine import experiment, trial
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers.problem import LinearProblem
from blockshock_lib.layers.row_parallel import RowParallelLinear
from blockshock_lib.records import METRICS
from tests.cases import METHODS, case

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def quick():
    return params.load(
        "phase1", {"timing.samples": 3, "timing.warmup": 1, "profile": "all"}, choose={"hardware": "cpu"}
    )


def run(quick, tmp_path, **changes):
    return experiment.measure(LinearProblem(case(**changes), CPU), quick, group_index=0, traces=tmp_path, last=True)


def picked(rows, method, metric):
    return [row for row in rows if row["method"] == method and row["metric"] == metric]


def test_phase_0_checks_and_weighs_but_times_nothing(quick, tmp_path):
    rows = run(quick, tmp_path, phase="phase0")
    for method in METHODS:
        assert picked(rows, method, "check")[0]["value"] == 1
        assert (
            picked(rows, method, "weight_bytes")[0]["value"] == picked(rows, method, "weight_bytes_formula")[0]["value"]
        )
    assert not [row for row in rows if row["unit"] == "ms"]


def test_phase_1_keeps_every_sample_of_every_method(quick, tmp_path):
    rows = run(quick, tmp_path, phase="phase1")
    for method in METHODS:
        for metric in ("forward_call", "forward_kernel", "compute_kernel"):
            samples = picked(rows, method, metric)
            assert [row["repeat"] for row in samples] == [0, 1, 2] and all(row["value"] > 0 for row in samples)
        assert picked(rows, method, "floor_forward")[0]["value"] > 0
    assert picked(rows, "ceiling", "gemm_rate")[0]["value"] > 0
    assert {row["unit"] for row in rows} <= set(METRICS.values())


def test_traces_are_chrome_traces_and_their_top_kernels_become_rows(quick, tmp_path):
    rows = run(quick, tmp_path, phase="phase1", methods=("row_parallel",))
    (path,) = tmp_path.glob("*row_parallel-rank0.json.gz")
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert [row["detail"] for row in picked(rows, "row_parallel", "kernel_time")]


def test_a_method_that_cannot_run_gets_a_row_with_its_reason_and_the_others_go_on(quick, tmp_path):
    rows = run(quick, tmp_path, mask="random", methods=("permuted_dense", "block_shock_torch", "row_parallel"))
    for method, word in (("permuted_dense", "periodic"), ("block_shock_torch", "NVIDIA")):
        (row,) = picked(rows, method, "check")
        assert row["status"] == "unsupported" and word in row["reason"]
    assert picked(rows, "row_parallel", "check")[0]["status"] == "ok"


@pytest.mark.parametrize(
    "error, status",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 21474836480 bytes."), "oom"),
        (UnsupportedError("needs a kernel that is not here"), "unsupported"),
    ],
)
@pytest.mark.parametrize("stage", ["hold", "local"])
def test_a_method_that_does_not_fit_keeps_the_bytes_it_asked_for(quick, tmp_path, monkeypatch, error, status, stage):
    def fail(*_):
        raise error

    monkeypatch.setattr(RowParallelLinear, stage, fail)
    rows = run(quick, tmp_path, phase="phase1", methods=("row_parallel", "dense"))
    (row,) = picked(rows, "row_parallel", "check")
    assert row["status"] == status and str(error) in row["reason"] and row["reason"].startswith("rank 0: ")
    assert not picked(rows, "row_parallel", "forward_call") and picked(rows, "dense", "forward_call")


def test_an_unexpected_error_is_not_swallowed(quick, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(RowParallelLinear, "local", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(quick, tmp_path)


def test_a_timed_graph_with_a_wrong_output_gives_no_number(quick, tmp_path, monkeypatch):
    calls = {"n": 0}
    right = RowParallelLinear.local

    def decays(self, x):
        calls["n"] += 1
        y = right(self, x)
        return y if calls["n"] <= 4 else y * 1.5

    monkeypatch.setattr(RowParallelLinear, "local", decays)
    rows = run(quick, tmp_path, phase="phase1", methods=("row_parallel",))
    assert [row["status"] for row in picked(rows, "row_parallel", "check")] == ["ok", "failed"]
    assert not picked(rows, "row_parallel", "forward_kernel")


def test_attempt_gives_the_result_when_nothing_fails():
    assert trial.attempt(lambda: 3) == (3, "")


def test_a_lone_rank_agrees_with_itself():
    assert Group().first_word("oom: 3 GiB", CPU) == (0, "oom: 3 GiB") and Group().first_word("", CPU) == (-1, "")
