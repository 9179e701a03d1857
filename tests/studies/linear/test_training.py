"""A training step on its pieces: it is the step that a user takes, and timing it moves no weight."""

from types import SimpleNamespace

import pytest
import torch

from blockshock_lib.studies.linear import training
from blockshock_lib.studies.linear.training import NEGLIGIBLE_LR, Trainer, eager_step
from tests.cases import METHODS
from tests.studies.linear.measuring import on_ranks, problem

TRAINED = (*METHODS, "block_shock_recompress")


@pytest.fixture(scope="module")
def own():
    return problem(phase="phase3", methods=TRAINED, optimizer="sgd")


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_bf16_weight_moves_by_the_rate(name):
    # PyTorch 2.13's fused SGD on a CPU leaves a weight of this size as it was.
    weight = torch.nn.Parameter(torch.ones(128, 256, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    training.make_optimizer(name, [weight], 0.25).step()
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 0.75), rtol=0.01, atol=0)


def test_old_gradients_are_dropped_before_new_ones_are_made():
    weight, bias = (torch.nn.Parameter(torch.ones(size)) for size in (4, 2))
    backward = lambda dy, x: seen.append((weight.grad, bias.grad)) or (None, weight.data, bias.data)  # noqa: E731
    layer, seen = SimpleNamespace(active=True, weight=weight, bias=bias, backward=backward), []
    trainer = Trainer(layer, "sgd", 0.1)
    for _ in range(2):
        trainer.backward(None, None)
        assert weight.grad is not None and bias.grad is not None
    assert seen == [(None, None)] * 2


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", TRAINED)
def test_a_step_on_the_pieces_is_that_of_autograd_is_undone_by_a_reset_and_moves_no_weight_where_it_is_timed(
    own, name, optimizer
):
    def both(mine):
        pieces, user, fresh = (mine.layer(name) for _ in range(3))
        if not pieces.active:
            return
        trainer = Trainer(pieces, optimizer, 0.1)
        other, leaf = Trainer(user, optimizer, 0.1).optimizer, mine.x.detach().requires_grad_()
        for _ in range(2):
            with torch.no_grad():
                trainer.step(mine.x, mine.dy)
            eager_step(user, other, leaf, mine.dy)
        assert torch.equal(pieces.weight, user.weight) and torch.equal(pieces.bias, user.bias)
        with torch.no_grad():
            assert torch.equal(trained := pieces.multiply(mine.x), user(mine.x))
            trainer.reset(mine.weight, mine.bias)
            assert torch.equal(pieces.multiply(mine.x), first := fresh(mine.x)) and not torch.equal(trained, first)
            dx, wanted = (one.start_dgrad(one.local_dgrad(mine.dy)).wait() for one in (pieces, fresh))
            assert torch.equal(dx, wanted) and pieces.weight.grad is None
            timed, before = Trainer(fresh, optimizer, NEGLIGIBLE_LR), fresh.weight.detach().clone()
            for _ in range(5):
                timed.step(mine.x, mine.dy)
            assert torch.equal(fresh.weight, before)

    on_ranks(own, both)
