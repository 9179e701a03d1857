"""Truths are float64 and those of autograd and torch's optimizers; baselines are the plainest products of each part."""

import pytest
import torch

from blockshock_lib.engine import optimizers
from blockshock_lib.layers.problem import LinearProblem
from tests.cases import METHODS, case

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def problem():
    return LinearProblem(case(phase="phase3", optimizer="sgd"), CPU)


def test_gradients_are_those_of_autograd_in_float64(problem):
    x, w, b = (t.double().requires_grad_() for t in (problem.x, problem.weight, problem.bias))
    torch.nn.functional.linear(x, w, b).backward(problem.dy.double())
    for mine, theirs in (("dx", x), ("dw", w), ("db", b)):
        truth = getattr(problem.reference, mine)
        assert truth.dtype == torch.float64
        torch.testing.assert_close(truth, theirs.grad, rtol=1e-12, atol=1e-14)


def test_truths_are_the_same_in_chunks(problem, monkeypatch):
    monkeypatch.setattr("blockshock_lib.layers.reference.TRUTH_ROWS", 48)
    other = LinearProblem(problem.case, CPU)
    other.train(lambda ps: optimizers.make("adamw", ps, 0.01))
    problem.train(lambda ps: optimizers.make("adamw", ps, 0.01))
    for what in ("y", "dx", "dw"):
        torch.testing.assert_close(getattr(other.reference, what), getattr(problem.reference, what), rtol=0, atol=1e-12)
    torch.testing.assert_close(other.trained.exact_weight, problem.trained.exact_weight, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("name", "rate"), [("sgd", 0.5), ("adamw", 0.001)])
def test_trained_weights_are_those_of_plain_training_in_float64(problem, name, rate):
    problem.train(lambda ps: optimizers.make(name, ps, rate))
    w, b = (torch.nn.Parameter(t.double()) for t in (problem.weight, problem.bias))
    plain = optimizers.make(name, [w, b], rate)
    for _ in range(problem.trained.steps):
        plain.zero_grad()
        torch.nn.functional.linear(problem.x.double(), w, b).backward(problem.dy.double())
        plain.step()
    torch.testing.assert_close(problem.trained.exact_weight, w.detach(), rtol=0, atol=1e-12)
    y = torch.nn.functional.linear(problem.x.double(), w, b).detach()
    torch.testing.assert_close(problem.trained.y, y, rtol=0, atol=1e-11)
    moved = (w.detach() - problem.weight.double()).square().mean() / problem.weight.double().square().mean()
    assert moved > 1e-3 and problem.trained.weight.dtype == problem.dtype


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", METHODS)
def test_the_baseline_of_each_sharding_is_right_up_to_rounding(name, world_size):
    problem = LinearProblem(case(world_size=world_size, in_features=512, phase="phase2", dtype="fp32"), CPU)
    for what in ("y", "dx"):
        expected, truth = problem.expected(name, what), getattr(problem.reference, what)
        off = (expected.double() - truth).square().mean() / truth.square().mean()
        assert expected.dtype == torch.float32 and off.sqrt() < 1e-6


def test_what_has_the_weights_size_is_forgotten(problem):
    problem.train(lambda ps: optimizers.make("sgd", ps, 0.01))
    assert "dw" in vars(problem.reference)
    problem.forget()
    assert problem.trained is None and not {"dw", "expected_dw"} & set(vars(problem.reference))


def test_the_gradients_seed_is_its_own_and_follows_the_draw(problem):
    other = LinearProblem(problem.case, CPU, draw=1)
    assert not torch.equal(other.dy, problem.dy) and torch.equal(LinearProblem(problem.case, CPU).dy, problem.dy)
    assert problem.dy.shape == (problem.case.batch, problem.case.out_features)


def test_gradient_entries_are_as_large_as_the_weights():
    wide = LinearProblem(case(phase="phase3", optimizer="sgd", in_features=1024, out_features=256, batch=64), CPU)
    ratio = wide.reference.dw.square().mean().sqrt() / wide.weight.double().square().mean().sqrt()
    assert ratio == pytest.approx(1, rel=0.1)


def test_batches_of_the_curve_differ_by_step_and_the_teacher_is_another_weight(problem):
    assert not torch.equal(problem.batch(0), problem.batch(1)) and torch.equal(problem.batch(1), problem.batch(1))
    both = torch.stack([problem.teacher.float().flatten(), problem.weight.float().flatten()])
    assert abs(torch.corrcoef(both)[0, 1]) < 0.02
