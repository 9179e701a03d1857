"""The loss curve: a layer learns a teacher's weights, with a fresh batch each step, the same for every method."""

from __future__ import annotations

import math

import torch.nn.functional as F

from blockshock_lib.engine import training
from blockshock_lib.engine.protocol import Problem, Runner
from blockshock_lib.engine.timing import tensors
from blockshock_lib.engine.training import Trainer
from blockshock_lib.engine.trial import Trial
from blockshock_lib.params import Params


def draw(trial: Trial, runners: dict[str, Runner], params: Params) -> None:
    """Adds a row a step and method, or one that says at which step and in which tensor a number was not finite.

    A runner has its first weights again afterwards; one whose loss was not finite is taken out of `runners`.
    """
    problem, name = trial.problem, trial.problem.case.optimizer
    rate = getattr(params.learning_rates, name)
    for method, runner in list(runners.items()):
        trainer = Trainer(runner, name, rate)
        losses, word = learn(trial, trainer, params.loss_steps)
        for step, loss in enumerate(trial.group.largest(losses, trial.device)):
            trial.rows.add(method, "loss", loss, step)
        del trainer
        training.reset(runner, problem.weight, problem.bias)
        if word:
            trial.rows.miss(method, "failed", word)
            del runners[method]


def learn(trial: Trial, trainer: Trainer, steps: int) -> tuple[list[float], str]:
    """(the finite losses, why it ended early or ""). A rank that stands by has zeros."""
    problem, losses = trial.problem, []
    for step in range(steps):
        loss, word = one_step(problem, trainer, step) if trainer.runner.active else (0.0, "")
        _, word = trial.group.first_word(word, trial.device)
        if word:
            return losses, word
        losses.append(loss)
    return losses, ""


def one_step(problem: Problem, trainer: Trainer, step: int) -> tuple[float, str]:
    """(loss before the step, what was not finite or "").

    The loss is the mean of (y - x W*^T)^2, summed in float32. The gradient is that of half the sum of squares over
    B + K: the largest eigenvalue of x^T x is about (sqrt B + sqrt K)^2, at most twice that, so SGD is stable for any
    size below a rate of 1.
    """
    x = problem.batch(step)
    y = trainer.forward(x)
    off = (y - F.linear(x, problem.teacher)).float()
    loss = off.square().mean().item()
    if not math.isfinite(loss) and y.isfinite().all():
        return loss, f"loss is {_kind(loss)} at step {step} (tensor loss)"
    dy = (off / (x.shape[0] + x.shape[1])).to(y.dtype)
    dx, dw, db = trainer.backward(dy, x)
    trainer.update()
    seen = {"x": x, "y": y, "dy": dy, "dx": dx, "dw": dw, "db": db, "weight": trainer.weights}
    for what, value in seen.items():
        bad = next((t for t in tensors(value) if not t.isfinite().all()), None)
        if bad is not None:
            kind = _kind(math.nan if bad.isnan().any() else math.inf)
            return loss, f"loss is {kind} at step {step} (tensor {what})"
    return loss, ""


def _kind(value: float) -> str:
    return "NaN" if math.isnan(value) else "infinite"
