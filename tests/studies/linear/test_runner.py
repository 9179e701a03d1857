"""What a method must pass before it may be timed, and what is sampled of it; the faults are in faults/test_planted."""

from dataclasses import replace

import pytest
import torch

from blockshock_lib.engine import experiment, memory
from blockshock_lib.kernels.sparse24 import backends
from blockshock_lib.layers.block_shock import BlockShockLinear
from blockshock_lib.studies.linear import training
from blockshock_lib.studies.linear.methods.method import FORMULAS
from blockshock_lib.studies.linear.problem import LinearProblem
from blockshock_lib.studies.linear.training import Trainer
from tests.studies.linear.measuring import asked, measured, picked, problem

QUICK = asked("phase3", loss_steps=4)


def run(**changes):
    return measured(QUICK, **{"methods": ("row_parallel",), "optimizer": "sgd", "in_features": 128} | changes)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_every_tensor_of_a_right_method_is_checked_and_weighed(optimizer):
    rows = run(methods=("block_shock", "permuted_dense"), optimizer=optimizer)
    for method in ("block_shock", "permuted_dense"):
        assert [row["value"] for row in picked(rows, method, "check")] == [1]
        assert [row["detail"] for row in picked(rows, method, "error_max_ratio")] == ["", "dx", "dw", "db", "weight"]
        for metric in (*FORMULAS, "weight_bytes"):
            (held,), (formula,) = picked(rows, method, metric), picked(rows, method, f"{metric}_formula")
            assert held["value"] == pytest.approx(formula["value"], rel=1e-3)


def test_a_timed_step_with_a_wrong_gradient_gives_no_number(monkeypatch):
    right, timed, started = Trainer.step, experiment.Session.time, []
    monkeypatch.setattr(experiment.Session, "time", lambda self, runners: started.append(1) or timed(self, runners))

    def wrong(self, x, dy):
        y, dx, dw, db = right(self, x, dy)
        return y, dx, dw * 1.5 if started else dw, db

    monkeypatch.setattr(Trainer, "step", wrong)
    rows = run()
    assert [row["status"] for row in picked(rows, "row_parallel", "check")] == ["ok", "failed"]
    assert "gradient of the timed step is off" in picked(rows, "row_parallel", "check")[1]["reason"]
    assert not picked(rows, "row_parallel", "step_kernel")


@pytest.mark.parametrize("status", ["oom", "unsupported"])
def test_a_step_that_does_not_fit_or_is_multiplied_wrongly_is_refused_before_it_is_built(monkeypatch, status):
    wrong = replace(backends.BACKENDS["reference"], too_large=lambda shape: f"{shape}: no")
    if status == "oom":
        monkeypatch.setattr(memory, "free", lambda device: 60_000)
    else:
        monkeypatch.setitem(backends.BACKENDS, "reference", wrong)
    monkeypatch.setattr(LinearProblem, "build", lambda self, name: pytest.fail("it was built"))
    (row,) = picked(run(methods=("block_shock",), optimizer="adamw"), "block_shock", "check")
    reasons = {"oom": "a training step with adamw needs", "unsupported": "(128, 128): no"}
    assert row["status"] == status and reasons[status] in row["reason"]


def test_a_loss_that_is_not_finite_stops_its_method_and_names_step_and_tensor(monkeypatch):
    right = training.one_step

    def poisoned(problem, trainer, step):
        if step == 2 and type(trainer.layer) is BlockShockLinear:
            trainer.layer.weight.fill_(float("nan"))
        return right(problem, trainer, step)

    monkeypatch.setattr(training, "one_step", poisoned)
    rows = run(methods=("row_parallel", "block_shock"), smallest=True)
    assert picked(rows, "row_parallel", "step_kernel") and not picked(rows, "block_shock", "step_kernel")
    assert len(picked(rows, "row_parallel", "loss")) == 4 and len(picked(rows, "block_shock", "loss")) == 2
    assert "loss is NaN at step 2 (tensor y)" in picked(rows, "block_shock", "check")[-1]["reason"]


def test_a_loss_that_overflows_where_every_tensor_is_finite_is_named():
    own = problem(QUICK, phase="phase3", optimizer="sgd", world_size=1)
    trainer = Trainer(own.layer("dense"), "sgd", 0.1)
    with torch.no_grad():
        trainer.layer.weight.fill_(1e25)
        assert training.one_step(own, trainer, 7)[1] == "loss is infinite at step 7 (tensor loss)"


def test_the_loss_falls_and_packed_weights_follow_the_dense_ones():
    rows = run(methods=("dense", "block_shock", "block_shock_recompress"), smallest=True)
    curves = {m: [row["value"] for row in picked(rows, m, "loss")] for m in ("dense", "block_shock")}
    assert curves["dense"] == sorted(curves["dense"], reverse=True) and len(curves["dense"]) == 4
    assert curves["block_shock"] == pytest.approx(curves["dense"], rel=0.01)
