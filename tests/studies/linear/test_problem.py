"""Inputs come from independent seeds; truths are float64, of autograd and torch's optimizers; baselines are plain."""

import pytest
import torch

from blockshock_lib.studies.linear import training
from tests.cases import METHODS
from tests.studies.linear import measuring


def trained_problem(**changes):
    return measuring.problem(phase="phase3", optimizer="sgd", **changes)


@pytest.fixture
def problem():
    return trained_problem()


def trained(problem, name, rate):
    problem.reference.optimizer = lambda parameters: training.make_optimizer(name, parameters, rate)
    return problem.reference.trained


def test_weight_input_gradient_and_teacher_have_seeds_of_their_own():
    p = trained_problem(batch=128, out_features=256, bias=False, dtype="fp32", in_features=256)
    drawn = [one.float().flatten() for one in (p.weight, p.teacher)]
    assert abs(torch.corrcoef(torch.stack(drawn))[0, 1]) < 0.02
    drawn = [drawn[0][: p.x.numel()], p.x.flatten(), p.dy.flatten(), p.batch(0).flatten(), p.batch(1).flatten()]
    assert (torch.corrcoef(torch.stack(drawn)) - torch.eye(5)).abs().max() < 0.03


def test_the_same_case_gives_the_same_numbers_and_another_draw_changes_input_and_gradient_alone():
    one, same, other = (trained_problem(repeat=repeat) for repeat in (0, 0, 1))
    for name in ("weight", "bias", "x", "dy"):
        assert torch.equal(getattr(one, name), getattr(same, name))
        assert torch.equal(getattr(one, name), getattr(other, name)) == (name not in ("x", "dy"))
    assert torch.equal(one.batch(1), one.batch(1)) and one.dy.shape == (one.case.batch, one.case.out_features)


def test_activation_inputs_have_heavy_tails_and_outlier_channels():
    x = measuring.problem(workload="activation", batch=4096, dtype="fp32").x
    spread = x.abs().quantile(0.5, dim=0)
    assert (spread > 8 * spread.median()).sum() == 2
    calm = x[:, spread < 2 * spread.median()]
    assert calm.abs().max() > 8 * calm.std()


def test_truths_are_those_of_autograd_in_float64(problem):
    x, w, b = (t.double().requires_grad_() for t in (problem.x, problem.weight, problem.bias))
    y = torch.nn.functional.linear(x, w, b)
    y.backward(problem.dy.double())
    for name, wanted in {"y": y.detach(), "dx": x.grad, "dw": w.grad, "db": b.grad}.items():
        truth = getattr(problem.reference, name)
        assert truth.dtype == torch.float64
        torch.testing.assert_close(truth, wanted, rtol=1e-12, atol=1e-12 if name == "y" else 1e-14)


def test_truths_are_the_same_in_chunks(problem, monkeypatch):
    monkeypatch.setattr("blockshock_lib.studies.linear.reference.TRUTH_ROWS", 48)
    other = trained_problem()
    after = [trained(one, "adamw", 0.01) for one in (other, problem)]
    for what in ("y", "dx", "dw"):
        torch.testing.assert_close(getattr(other.reference, what), getattr(problem.reference, what), rtol=0, atol=1e-12)
    torch.testing.assert_close(*(one.exact_weight for one in after), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("name", "rate"), [("sgd", 0.5), ("adamw", 0.001)])
def test_trained_weights_are_those_of_plain_training_in_float64(problem, name, rate):
    after = trained(problem, name, rate)
    w, b = (torch.nn.Parameter(t.double()) for t in (problem.weight, problem.bias))
    plain = training.make_optimizer(name, [w, b], rate)
    for _ in range(after.steps):
        plain.zero_grad()
        torch.nn.functional.linear(problem.x.double(), w, b).backward(problem.dy.double())
        plain.step()
    torch.testing.assert_close(after.exact_weight, w.detach(), rtol=0, atol=1e-12)
    y = torch.nn.functional.linear(problem.x.double(), w, b).detach()
    torch.testing.assert_close(after.y, y, rtol=0, atol=1e-11)
    moved = (w.detach() - problem.weight.double()).square().mean() / problem.weight.double().square().mean()
    assert moved > 1e-3 and after.weight.dtype == problem.dtype


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", METHODS)
def test_the_baseline_of_each_sharding_is_right_up_to_rounding(name, world_size):
    problem = measuring.problem(world_size=world_size, in_features=512, phase="phase2", dtype="fp32")
    for what in ("y", "dx"):
        expected, truth = problem.expected(name, what), getattr(problem.reference, what)
        off = (expected.double() - truth).square().mean() / truth.square().mean()
        assert expected.dtype == torch.float32 and off.sqrt() < 1e-6


def test_gradient_entries_are_as_large_as_the_weights():
    wide = trained_problem(in_features=1024, out_features=256, batch=64)
    ratio = wide.reference.dw.square().mean().sqrt() / wide.weight.double().square().mean().sqrt()
    assert ratio == pytest.approx(1, rel=0.1)
