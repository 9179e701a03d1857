"""A pruned linear layer packed alone: its values, its mask, its state, and what it refuses."""

from unittest import mock

import pytest
import torch
from torch import nn

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import masks
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.layers import Linear24
from blockshock_lib.layers.linear24 import nonzero_places

N, K = 64, 128


def linear(seed=0, dtype=torch.float32, **options):
    torch.manual_seed(seed)
    return nn.Linear(K, N, dtype=dtype, **options)


def pruned(seed=0, **options):
    """A layer of which a mask was taken with zeros among the kept, and that mask."""
    plain = linear(seed, **options)
    keep = masks.make(Mask.named("random"), (N, K), seed=seed)
    with torch.no_grad():
        plain.weight[~keep] = 0
        plain.weight[torch.rand(N, K) < 0.2] = 0
    return plain, keep


@pytest.mark.parametrize("rows", [1, 7, 64, 200])
@pytest.mark.parametrize("bias", [True, False])
def test_a_pruned_layer_packed_gives_what_it_gave(rows, bias):
    plain, _ = pruned(bias=bias)
    layer, x = Linear24.from_linear(plain), torch.randn(rows, K)
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(layer(x.view(1, rows, 1, K)), plain(x.view(1, rows, 1, K)))
    torch.testing.assert_close(layer.double()(x.double()), plain.double()(x.double()))  # moved with its mask


@pytest.mark.parametrize("mask", ["magnitude", "checkerboard", "random"])
def test_a_dense_layer_is_pruned_by_the_mask_as_a_name_a_mask_or_a_tensor(mask):
    plain = linear()
    keep = masks.make(Mask.named(mask), (N, K), weight=plain.weight)
    for given in (mask, Mask.named(mask), keep):
        again = Linear24.from_linear(plain, mask=given).to_linear()
        assert torch.equal(again.weight, torch.where(keep, plain.weight, 0)) and torch.equal(again.bias, plain.bias)


def test_every_way_to_have_two_nonzeros_or_fewer_keeps_two_and_all_of_them():
    with mock.patch.object(masks, "parts", return_value=[slice(0, 8), slice(8, 11)]) as parts:
        keep = nonzero_places(masks.PATTERNS.float().repeat(2, 3)[:11] * (torch.rand(11, 12) < 0.6))
    assert parts.call_count == 2 and masks.first_bad_group(keep) is None  # rows in any number, by parts
    w = masks.PATTERNS.float().repeat(2, 3)
    assert torch.equal(nonzero_places(w), w != 0)


def test_what_cannot_be_packed_is_refused_as_is_what_is_not_pruned_by_its_first_bad_group():
    dense, _ = pruned()
    with torch.no_grad():
        dense.weight[5, 8:12] = torch.tensor([1.0, 0, 2, 3])
        dense.weight[9] = 1
    for kind, words, plain, options in (
        (ValueError, r"row 5, columns 8 to 11 hold 3 nonzeros.*magnitude", dense, {}),
        (UnsupportedError, "multiples of 64", nn.Linear(96, 64), {"mask": "magnitude"}),
        (ValueError, "a multiple of 4 input features", nn.Linear(66, 64), {}),
        (ValueError, "not 2:4", linear(), {"mask": torch.ones(N, K, dtype=torch.bool)}),
        (UnsupportedError, "NVIDIA", linear(dtype=torch.bfloat16), {"mask": "magnitude", "product": "cslt"}),
    ):
        with pytest.raises(kind, match=words):
            Linear24.from_linear(plain, **options)


@pytest.mark.parametrize("frozen", [True, False])
def test_its_state_is_the_dense_layers_and_loads_both_ways(frozen):
    (plain, keep), x = pruned(), torch.randn(3, K)
    layer = Linear24.from_linear(plain, mask=keep, frozen=frozen)
    for _ in range(2):
        state = layer.state_dict()
        assert list(state) == ["weight", "bias"] and torch.equal(state["weight"], plain.weight)
        with torch.no_grad():
            plain.weight[keep] = torch.randn(int(keep.sum()))
        layer.load_state_dict(plain.state_dict())
        torch.testing.assert_close(layer(x), plain(x))


def test_a_state_that_the_mask_would_drop_is_refused_and_changes_nothing():
    plain, keep = pruned()
    layer = Linear24.from_linear(plain, mask=keep)
    row, column = (~keep).nonzero()[70].tolist()
    wrong = plain.weight.detach().clone()
    wrong[row, column] = 1
    with pytest.raises(RuntimeError, match=rf"W\[{row}, {column}\] is not zero"):
        layer.load_state_dict({"weight": wrong, "bias": plain.bias})
    assert torch.equal(layer.to_linear().weight, plain.weight)
    with pytest.raises(ValueError, match=r"\[64, 128\]"):
        layer.load_dense(wrong[:, :64])
