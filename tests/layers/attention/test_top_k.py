"""Top-k gradients with error feedback, between two gloo ranks."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from blockshock_lib.layers.attention.top_k import TopK, top_k

STEPS = 9


def trained(rank, state=None, spoilt=None):
    """Weights after each of STEPS steps of SGD; each rank draws its own batches. `spoilt`: what rank 1 multiplies its
    loss by once, in a step that all ranks see and skip.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    ddp, sgd = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.05)
    if state is not None:
        ddp.register_comm_hook(state, top_k)
    seen = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(2 * step + rank)
        x = torch.randn(4, 8, generator=draw)
        if step == 4 and spoilt is not None:
            sgd.zero_grad()
            (ddp(x).mean() * (spoilt if rank else 1.0)).backward()
            assert not all(parameter.grad.isfinite().all() for parameter in model.parameters())
        sgd.zero_grad()
        (ddp(x) - x.sum(1, keepdim=True)).square().mean().backward()
        sgd.step()
        seen.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    return seen


def compared(ctx):
    plain = trained(ctx.rank)
    torch.testing.assert_close(trained(ctx.rank, TopK(1.0)), plain)
    state = TopK(0.1)
    few = trained(ctx.rank, state)
    torch.testing.assert_close(few[:2], plain[:2])  # the first steps are summed whole
    moved = ((few[2] - few[1]) != 0).sum()
    assert 0 < moved <= 2 * round(0.1 * 81) and not torch.allclose(few[2], plain[2])
    assert (state.left[0] != 0).sum() >= 81 - round(0.1 * 81) - 1  # what was not sent is remembered
    for spoilt in (torch.inf, torch.nan):
        left = TopK(0.1)
        torch.testing.assert_close(trained(ctx.rank, left, spoilt), few)
        assert torch.equal(left.left[0], state.left[0])
    ddp = DistributedDataParallel(nn.Linear(8, 7))
    ddp.register_comm_hook(state, top_k)
    with pytest.raises((ValueError, RuntimeError), match="this TopK state is another model's: it remembers 81 values"):
        ddp(torch.randn(2, 8)).sum().backward()
    forgets = TopK(0.1)
    forgets.left = type("Forgets", (dict,), {"__setitem__": lambda *_: None})()
    distance = [(each[-1] - plain[-1]).norm().item() for each in (few, trained(ctx.rank, forgets))]
    assert distance[0] < distance[1]  # without error feedback it strays further


def test_all_sent_is_plain_and_what_is_not_sent_comes_later(pair):
    pair.call(compared, seconds=600)


@pytest.mark.parametrize("options", [{"density": 0}, {"density": 1.5}, {"density": 0.5, "start": 1}])
def test_nonsense_is_refused(options):
    with pytest.raises(ValueError, match="density lies in"):
        TopK(**options)
