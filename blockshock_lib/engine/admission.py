"""What a method must pass before it may be timed: built, tuned, checked tensor by tensor, and weighed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from blockshock_lib.engine import memory, optimizers
from blockshock_lib.engine.memory import Peak
from blockshock_lib.engine.protocol import Problem, Runner
from blockshock_lib.engine.training import Trainer, reset
from blockshock_lib.engine.trial import Compared, Trial


def prepare(trial: Trial, learning_rates: Any) -> None:
    """Makes the truths, before any method is weighed, so that their bytes are no method's."""
    problem = trial.problem
    references = [problem.reference]
    if trial.phase.train:
        name = problem.case.optimizer
        rate = getattr(learning_rates, name)
        problem.train(lambda parameters: optimizers.make(name, parameters, rate))
        references.append(problem.trained)
    for reference in references:
        _ = reference.y, trial.phase.backward and reference.dx


def admit(trial: Trial, name: str, learning_rates: Any) -> Runner | None:
    """One method alone; None when it may not be timed, and the rows say why.

    The forward is checked first, then dX, dW and db, then the weights after a few steps of the optimizer, and y and dX
    with those weights. The method has its first weights again at the end.
    """
    problem, rows, phase = trial.problem, trial.rows, trial.phase
    if reason := problem.unsupported(name):
        rows.miss(name, "unsupported", reason)
        return None
    if phase.train and not trial.agree(name, lambda: _room(trial, name)):
        return None
    baselines(trial, name)
    meter = Peak(trial.device)
    runner = trial.agree(name, lambda: problem.build(name, trial.group))
    if runner is None or not tune(trial, name, runner):
        return None
    dy = problem.dy.clone() if phase.backward else None  # a step holds its own, as a loss would make it
    if dy is not None and forward_and_dx(trial, name, runner, dy) is None:  # makes what a layer makes but once
        return None
    meter.restart()
    poison(problem)
    made = forward_and_dx(trial, name, runner, dy)
    if made is None:
        return None
    peak = meter.read()
    fault = problem.sharding_fault(name) if runner.active else ""
    if not check_outputs(trial, name, made, fault=fault):
        return None
    del made
    if phase.train:
        trainer = Trainer(runner, problem.case.optimizer, getattr(learning_rates, problem.case.optimizer))
        if not check_gradients(trial, name, trainer, dy):
            return None
        peak = train(trial, name, trainer, dy, meter)
        if peak is None or not check_trained(trial, name, trainer, dy):
            return None
        del trainer
        reset(runner, problem.weight, problem.bias)
    rows.add(name, "check", 1.0)
    weigh(trial, name, runner, peak)
    return runner


def baselines(trial: Trial, name: str) -> None:
    """Makes what the method will be compared with before it is weighed: those bytes are not its own."""
    problem, phase = trial.problem, trial.phase
    for reference in (problem.reference, problem.trained) if phase.train else (problem.reference,):
        for what in ("y", "dx")[: 1 + phase.backward]:
            problem.expected(name, what, reference)
    if phase.train:
        _ = problem.reference.expected_dw, problem.reference.expected_db


def _room(trial: Trial, name: str) -> bool:
    case = trial.problem.case
    needed = trial.problem.training_bytes(name).peak
    memory.make_room(trial.device, needed, f"a training step with {case.optimizer}")
    return True


def tune(trial: Trial, name: str, runner: Runner, metric: str = "check") -> bool:
    """Rank 0 searches first and keeps its choice in a file; the other ranks then read the same choice. The way to add
    up the ranks' results is searched by all of them together.

    Returns whether it can run; where not, a row of `metric` says why.
    """

    def search(turn: bool) -> bool:
        if turn and runner.active:
            runner.tune(trial.problem.x)
            if trial.phase.backward:
                runner.tune_dx(trial.problem.dy)
        return True

    turns = (trial.group.rank == 0, trial.group.rank != 0)
    if not all(trial.agree(name, partial(search, turn), metric) for turn in turns):
        return False
    if runner.active:
        runner.tune_reduce(trial.problem.x)
    return True


def alone(trial: Trial, name: str, runner: Runner, fn: Callable[[], Any]) -> Any:
    """What a working rank makes without communication; () on one that stands by, None when any rank failed."""
    return trial.agree(name, lambda: fn() if runner.active else ())


def forward_and_dx(trial: Trial, name: str, runner: Runner, dy: torch.Tensor | None) -> dict | None:
    """{"y": y, "dx": dX}, each None on a rank that stands by; without dX where `dy` is None. None when a rank failed.

    What one rank alone cannot do is found out before any rank enters a collective.
    """
    made = {}
    part = alone(trial, name, runner, lambda: runner.local(trial.problem.x))
    if part is None:
        return None
    made["y"] = runner.reduce(part) if runner.active else None
    if dy is not None:
        part = alone(trial, name, runner, lambda: runner.local_dx(dy))
        if part is None:
            return None
        made["dx"] = runner.start_dx(part).wait() if runner.active else None
    return made


def check_outputs(
    trial: Trial, name: str, made: dict[str, torch.Tensor | None], *, trained: bool = False, fault: str = "", **how
) -> bool:
    """The gate for y and dX, with the first weights or the trained ones."""
    problem = trial.problem
    reference = problem.trained if trained else problem.reference
    for what, value in made.items():
        compared: list[Compared] = []
        if value is not None:
            compared = [(value, problem.expected(name, what, reference), getattr(reference, what))]
        said = f"{what} after {reference.steps} steps" if trained else what
        if not trial.check(name, said, compared, fault=fault, **how):
            return False
    return True


def check_gradients(trial: Trial, name: str, trainer: Trainer, dy: torch.Tensor) -> bool:
    """dX, dW and db by the backward that will be timed; the last two are left with the parameters.

    dW is compared as a dense [N, K], joined from all ranks: so an entry in a wrong place shows as a wrong value.
    """
    runner, reference = trainer.runner, trial.problem.reference
    if alone(trial, name, runner, lambda: runner.local_dw(dy, trial.problem.x)) is None:
        return False
    dx, dw, db = trainer.backward(dy, trial.problem.x) if runner.active else (None, None, None)
    if not check_outputs(trial, name, {"dx": dx}, record=False):
        return False
    del dx
    dense = runner.to_dense(dw)
    del dw
    if not trial.check(name, "dw", [(dense, reference.expected_dw, reference.dw)]):
        return False
    if trial.problem.bias is None:
        return True
    compared = [] if db is None else [(db, reference.expected_db, reference.db)]
    return trial.check(name, "db", compared)


def train(trial: Trial, name: str, trainer: Trainer, dy: torch.Tensor, meter: Peak) -> int | None:
    """Takes the steps that the trained reference took; the first with the gradients that were checked.

    Returns the peak of the last one in bytes (-1 where there is none), or None when a rank failed.
    """
    runner, problem = trainer.runner, trial.problem
    if alone(trial, name, runner, lambda: trainer.update() or True) is None:
        return None
    outputs = ()
    for _ in range(problem.trained.steps - 1):
        del outputs
        meter.restart()
        outputs = trainer.step(problem.x, dy) if runner.active else ()
    peak = meter.read()
    activations = sum(t.nbytes for t in (*outputs[:2], dy)) if runner.active else 0
    parts = memory.held(runner, trainer, activations)
    formula = problem.training_bytes(name)
    for (metric, part), value in zip(
        memory.FORMULAS.items(), trial.group.largest(list(parts.values()), trial.device), strict=True
    ):
        trial.rows.add(name, metric, value)
        trial.rows.add(name, f"{metric}_formula", getattr(formula, part))
    return -1 if peak is None else peak


def check_trained(trial: Trial, name: str, trainer: Trainer, dy: torch.Tensor) -> bool:
    """The weights, then y and dX with them: a copy of the weights that was left behind shows there."""
    runner, reference = trainer.runner, trial.problem.trained
    trainer.drop_gradients()
    made = forward_and_dx(trial, name, runner, dy)  # before `to_dense`, which refreshes what the steps left behind
    if made is None:
        return False
    if not trial.check(name, "weight", [(runner.to_dense(), reference.weight, reference.exact_weight)]):
        return False
    return check_outputs(trial, name, made, trained=True, record=False)


def weigh(trial: Trial, name: str, runner: Runner, peak: int | None) -> None:
    """Bytes of the weights and the peak, of the fullest rank, with their formulas."""
    cost = trial.problem.cost(name)
    formula = trial.problem.training_bytes(name).peak if trial.phase.backward else cost.peak
    values = [runner.weight_bytes(), -1.0 if peak is None else peak]
    weights, peak = trial.group.largest(values, trial.device)
    trial.rows.add(name, "weight_bytes", weights)
    trial.rows.add(name, "weight_bytes_formula", cost.weights)
    trial.rows.add(name, "peak_bytes_formula", formula)
    if peak < 0:
        trial.rows.miss(name, "unsupported", "the CPU's allocator keeps no peak", metric="peak_bytes")
    else:
        trial.rows.add(name, "peak_bytes", peak)


def poison(problem: Problem) -> None:
    """Leaves NaN in the memory that the next output will likely be given, so that an entry never written shows."""
    if problem.device.type == "cuda":
        torch.full(problem.reference.y.shape, float("nan"), dtype=problem.dtype, device=problem.device)
