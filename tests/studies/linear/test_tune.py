"""Tuning ahead of a run, its ranks as threads of this process. Searches on real GPUs: tests/gpu."""

import warnings
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from blockshock_lib import params
from blockshock_lib.__main__ import main
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import BlockShockLinear, ColumnParallelLinear
from blockshock_lib.runs import machine
from blockshock_lib.studies.linear import tune
from tests.studies.linear import measuring

METHODS = ["row_parallel", "permuted_dense", "block_shock"]
load = partial(measuring.load, n=[128], b=[16, 64], methods=METHODS, hardware__emulated=True)


@pytest.fixture
def tuned(monkeypatch, capsys):
    """What the verb says of a phase: its status, the lines, and for which batch each rank's layer searched."""
    seen, own = [], BlockShockLinear.tune

    def searched(layer, x):
        seen.append((layer.group.rank, len(x)))
        own(layer, x)

    monkeypatch.setattr(BlockShockLinear, "tune", searched)
    group = mock.MagicMock()  # whose calls are made in this process
    here = group.return_value.__enter__.return_value
    here.call = lambda fn, *args, seconds: [fn(SimpleNamespace(device=measuring.CPU), *args)]
    monkeypatch.setattr(tune, "WorkerGroup", group)
    monkeypatch.setattr(machine, "probe", lambda: {"unsupported": {}})
    monkeypatch.setattr(machine, "admit", lambda *_: None)

    def tuned(asked):
        monkeypatch.setattr(params, "load", lambda *_, **__: asked)
        status = main(["tune"])
        assert group.call_args.args == (1,) and group.call_args.kwargs["device"] == "cpu"
        return status, [line for line in capsys.readouterr().out.splitlines() if line], seen

    return tuned


def test_each_case_of_a_phase_is_tuned_by_the_layers_themselves_on_all_ranks_and_has_a_line(tuned):
    status, said, seen = tuned(load())
    assert status == 0
    assert seen == [(0, 16), (1, 16), (0, 64), (1, 64)], "rank 0 first, where the others find its choice"
    assert said[-3:-1] == [f"128x128 B={b} bf16 checkerboard gaussian: tuned" for b in (16, 64)]
    assert said[-1].startswith("kept in ")


def test_a_method_that_cannot_run_here_is_left_out_and_one_without_a_right_way_is_named(tuned, monkeypatch):
    def wrong(layer, x):
        warnings.warn("tuning left out what crashed", stacklevel=1)
        raise UnsupportedError("nothing that was tried gave right values")

    monkeypatch.setattr(BlockShockLinear, "tune", wrong)
    monkeypatch.setattr(ColumnParallelLinear, "unsupported", classmethod(lambda *_, **__: "no"))
    monkeypatch.setattr(ColumnParallelLinear, "tune", lambda *_: pytest.fail("it cannot run"))
    status, said, _ = tuned(load(b=[16], methods=["column_parallel", "block_shock"]))
    why = "block_shock unsupported: rank 0: nothing that was tried gave right values"
    assert status == 1 and said[-2].endswith(f"gaussian: tuning left out what crashed; {why}")


def test_a_phase_of_another_study_has_nothing_to_tune(capsys):
    assert main(["tune", "--phase", "attention_speed"]) == 2
    assert "--phase: attention_speed chooses its kernels as it runs; allowed: a phase" in capsys.readouterr().err


def test_a_machine_without_a_gpu_says_why_nothing_can_be_tuned(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["tune", "--phase", "phase3"]) == 2
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith("error: nothing can be tuned on this machine: ")
