"""Each method's pieces make the gradients of a dense layer, for every mask, world size and strategy for dW."""

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.layers.emulated import Emulated
from blockshock_lib.methods import METHODS
from blockshock_lib.params import Mask
from tests.cases import MASKS

CPU = torch.device("cpu")
N, K, B = 128, 256, 12
RUNNABLE = [name for name in METHODS if name != "block_shock_torch"]


def problem(seed=0):
    torch.manual_seed(seed)
    return torch.randn(N, K).double(), torch.randn(N).double(), torch.randn(B, K).double(), torch.randn(B, N).double()


def ranks(name, w, bias, mask, world_size, **changes):
    method = METHODS[name]
    options = method.options("reference", frozen=False) | changes
    group = [Group(r, world_size) for r in range(world_size)]
    return [method.load()(w, bias, mask=Mask.named(mask), group=one, **options) for one in group]


def whole(layers, tensors):
    """What the ranks hold of a dense matrix, put together in one process."""
    dense = torch.zeros(N, K, dtype=torch.float64)
    for layer, tensor in zip(layers, tensors, strict=True):
        dense[layer.rows, layer.cols] += layer.part_dense(tensor)
    return dense


def close(got, want, what):
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", RUNNABLE)
def test_gradients_are_those_of_a_dense_layer(name, mask, world_size):
    if METHODS[name].load().unsupported(Mask.named(mask), CPU, torch.float64, product="reference"):
        pytest.skip("the method does not take this mask")
    w, bias, x, dy = problem()
    model = Emulated(ranks(name, w, bias, mask, world_size))
    for by in model.dw_strategies():
        x.grad, x.requires_grad = None, True
        model.zero_grad()
        for layer in model.layers:
            if by != layer.dw_by:
                layer.asked_dw = by
        model(x).backward(dy)
        close(x.grad, dy @ w, f"{by} dX")
        close(whole(model.layers, [p.grad for p in model.weights]), dy.T @ x.detach(), f"{by} dW")
        close(model.bias.grad, dy.sum(0), f"{by} db")
        assert all(p.grad.shape == p.shape for p in model.weights)


@pytest.mark.parametrize("name", RUNNABLE)
def test_holes_of_the_mask_get_no_gradient(name):
    w, bias, x, dy = problem()
    layers = ranks(name, w, bias, "checkerboard", 2)
    if not layers[0].uses_mask:
        pytest.skip("the method has no mask")
    model = Emulated(layers)
    model(x).backward(dy)
    kept = [layer.part_dense(layer.from_dense(torch.ones_like(w))) for layer in model.layers]
    assert torch.equal(kept[0] + kept[1], torch.ones_like(w))
    for layer, keep in zip(model.layers, kept, strict=True):
        assert not layer.part_dense(layer.weight.grad)[keep == 0].any()
