"""What a packed weight survives: an interrupted look at its mask, other threads, and its first backward."""

import threading

import pytest
import torch
from torch import nn

from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.layers import Linear24
from blockshock_lib.layers.weight_stores import PackedValues
from tests.layers.ranks import draw

N, K = 64, 128


def frozen(mask="random"):
    linear = nn.Linear(K, N)
    return Linear24.from_linear(linear, mask=mask, frozen=True)


@pytest.mark.parametrize("interruption", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("look", ["state_dict", "to_dense", "double"])
def test_an_interrupted_first_look_at_a_frozen_layers_mask_leaves_its_weight(monkeypatch, interruption, look):
    layer, x = frozen(), draw(3, K)
    before = layer(x)

    def interrupt(*_):
        raise interruption("planted")

    with monkeypatch.context() as planted:
        planted.setattr(PackedValues, "unpacked", interrupt)
        with pytest.raises(interruption):
            getattr(layer, look)()
            layer(x.double())
    layer.float()
    assert torch.equal(layer(x), before)
    torch.testing.assert_close(layer.to_linear()(x), before)


def test_a_forward_beside_the_first_look_at_the_mask_reads_the_weight(monkeypatch):
    layer, x = frozen(), draw(3, K)
    before, looked, seen = layer(x), PackedValues.unpacked, []

    def beside(self, *packed):
        thread = threading.Thread(target=lambda: seen.append(layer(x)))
        thread.start()
        thread.join()
        return looked(self, *packed)

    monkeypatch.setattr(PackedValues, "unpacked", beside)
    layer.state_dict()
    assert len(seen) == 1 and torch.equal(seen[0], before)


def test_a_transposed_copy_that_was_interrupted_is_not_kept(monkeypatch):
    layer, dy = frozen("checkerboard"), draw(3, N)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as planted:
        planted.setattr(type(layer.pattern), "transpose_values", interrupt)
        with pytest.raises(KeyboardInterrupt):
            layer.local_dgrad(dy)
    torch.testing.assert_close(layer.local_dgrad(dy), dy @ layer.to_dense())


def test_dx_of_a_frozen_layer_is_made_the_same_way_before_and_after_its_first_backward():
    keep = torch.zeros(N, K, dtype=torch.bool)
    keep.view(N // 4, 4, K // 4, 4)[:, :2, :, :2] = keep.view(N // 4, 4, K // 4, 4)[:, 2:, :, 2:] = True
    for mask, by in ((keep, "2:4"), (Mask.named("checkerboard"), "2:4"), (Mask.named("magnitude"), "dense masked")):
        layer, found = frozen(mask), []
        for _ in range(2):
            found.append((layer.dgrad_by, layer.hold_bytes()["copies"] > 0))
            x = draw(3, K).requires_grad_()
            layer(x).sum().backward()
            torch.testing.assert_close(x.grad, layer.to_dense().sum(0).expand(3, K))
        assert found == [(by, False), (by, by == "2:4")]
