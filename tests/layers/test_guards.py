"""What a wrapper, an optimizer or a rank would do wrong is said by name; the matrix is in test_compositions.py."""

import pytest
import torch
from torch import nn

from blockshock_lib import Linear24, checkpoint
from blockshock_lib.layers import guards
from tests.layers.ranks import N, draw


def test_a_digest_sees_every_change_of_a_tensor():
    weight = draw(N, N, dtype=torch.bfloat16)
    first = guards._digest(weight)
    assert guards._digest(weight.clone()) == first == guards._digest(weight.t().contiguous().t())
    moved = weight.t(), weight.roll(1, 0), weight.roll(1, 1), weight.flip(0)
    for other in (*moved, -weight, weight.float(), weight[:32]):
        assert guards._digest(other) != first
    swapped = weight.clone()
    swapped[3, [5, 7]] = weight[3, [7, 5]]
    assert guards._digest(swapped) != first


@pytest.mark.parametrize("kind", sorted(guards.ENTRYWISE, key=str))
def test_the_state_of_an_entry_wise_optimizer_comes_back(kind, tmp_path):
    packed = Linear24.from_linear(nn.Linear(N, N, dtype=torch.float64), mask="magnitude")
    optimizer = kind(packed.parameters())
    packed(draw(4, N, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "c", packed, optimizer)
    again, wanted = kind(packed.parameters()), packed.to_dense()
    checkpoint.load(tmp_path / "c", packed, again)
    assert again.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
    assert torch.equal(packed.to_dense(), wanted)
