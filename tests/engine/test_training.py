"""A training step on its pieces: it is the step that a user takes, and timing it moves no weight."""

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.engine import curve, optimizers, training
from blockshock_lib.engine.training import STANDSTILL, Trainer, eager_step, reset
from blockshock_lib.layers.problem import LinearProblem
from tests.cases import case

CPU = torch.device("cpu")
TRAINED = (
    *("dense", "row_parallel", "column_parallel", "masked_dense", "permuted_dense"),
    *("block_shock", "block_shock_recompress"),
)


@pytest.fixture(scope="module")
def problem():
    return LinearProblem(case(phase="phase3", methods=TRAINED, optimizer="sgd"), CPU)


def built(problem, name):
    return problem.build(name, Group())


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_bf16_weight_moves_by_the_rate(name):
    # PyTorch 2.13's fused SGD on a CPU leaves a weight of this size as it was.
    weight = torch.nn.Parameter(torch.ones(128, 256, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizers.make(name, [weight], 0.25).step()
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 0.75), rtol=0.01, atol=0)


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ValueError, match="'adam': sgd or adamw"):
        optimizers.make("adam", [torch.nn.Parameter(torch.ones(1))], 0.1)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", TRAINED)
def test_a_step_on_the_pieces_is_the_step_through_autograd(problem, name, optimizer):
    pieces, user = built(problem, name), built(problem, name)
    trainer = Trainer(pieces, optimizer, 0.1)
    other = Trainer(user, optimizer, 0.1).optimizer
    leaf = problem.x.detach().requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            trainer.step(problem.x, problem.dy)
        eager_step(user, other, leaf, problem.dy)
    for mine, theirs in zip(pieces.weights, user.weights, strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(pieces.bias, user.bias)
    with torch.no_grad():
        assert torch.equal(trainer.forward(problem.x), user(problem.x))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", TRAINED)
def test_the_rate_of_a_timed_step_moves_no_weight(problem, name, optimizer):
    runner = built(problem, name)
    before = [weight.detach().clone() for weight in runner.weights]
    with torch.no_grad():
        trainer = Trainer(runner, optimizer, STANDSTILL)
        for _ in range(5):
            trainer.step(problem.x, problem.dy)
    for weight, old in zip(runner.weights, before, strict=True):
        assert torch.equal(weight, old)


@pytest.mark.parametrize("name", TRAINED)
def test_reset_gives_back_the_first_weights_and_all_copies_of_them(problem, name):
    runner, fresh = built(problem, name), built(problem, name)
    with torch.no_grad():
        trainer = Trainer(runner, "sgd", 0.5)
        trainer.step(problem.x, problem.dy)
        assert not torch.equal(trainer.forward(problem.x), fresh(problem.x))
        reset(runner, problem.weight, problem.bias)
        assert torch.equal(trainer.forward(problem.x), fresh(problem.x))
        parts = runner.start_dx(runner.local_dx(problem.dy)).wait()
        assert torch.equal(parts, fresh.start_dx(fresh.local_dx(problem.dy)).wait())
    assert all(weight.grad is None for weight in runner.weights)


def test_old_gradients_are_let_go_before_new_ones_are_made(problem):
    runner = built(problem, "row_parallel")
    seen = []

    class Watched:
        active, weights, bias = True, runner.weights, runner.bias

        def backward(self, dy, x):
            seen.append([weight.grad for weight in runner.weights])
            return runner.backward(dy, x)

    trainer = Trainer(Watched(), "sgd", 0.1)
    for _ in range(2):
        trainer.backward(problem.dy, problem.x)
    assert seen == [[None, None]] * 2


def test_bytes_are_those_of_the_weights_gradients_and_moments(problem):
    for name, size in (("sgd", 0), ("adamw", 2)):
        runner = built(problem, "block_shock")
        with torch.no_grad():
            trainer = Trainer(runner, name, 0.1)
            trainer.step(problem.x, problem.dy)
        values = sum(weight.nbytes for weight in runner.weights)
        assert trainer.gradient_bytes() == values
        assert trainer.state_bytes() - 4 * len(runner.weights) * (size > 0) == size * values


def test_a_list_is_one_entry_a_rank():
    assert training.listed([1, 2]) == [1, 2] and training.listed(3) == [3]


def test_a_loss_that_overflows_where_every_tensor_is_finite_is_named(problem):
    trainer = Trainer(built(problem, "row_parallel"), "sgd", 0.1)
    for weight in trainer.weights:
        weight.data.fill_(1e25)
    assert curve.one_step(problem, trainer, 7)[1] == "loss is infinite at step 7 (tensor loss)"
