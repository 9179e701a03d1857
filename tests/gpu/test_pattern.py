"""The moves of training on a real GPU: the Triton kernels, and packing by mask in cuSPARSELt's own buffer."""

from types import SimpleNamespace

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.layers import BlockShockLinear
from blockshock_lib.params import Mask
from blockshock_lib.sparse24 import Pattern, masks

from .test_products import MASKS, assert_right, backend_for, problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available"),
]
SHAPES = [(64, 64), (64, 192), (192, 1024), (4096, 2048)]


def mask_of(mask, shape, device="cuda"):
    return masks.make(SimpleNamespace(family=mask[0], pattern=mask[1]), shape, seed=5, device=device)


def bits(tensor):
    return tensor.cpu().view(torch.int16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS[:-1], ids=" ".join)
def test_the_kernels_give_the_oracles_bits(mask, shape, dtype):
    keep = mask_of(mask, shape)
    for term in (keep, ~keep):
        ours, oracle = Pattern.of(term), Pattern.of(term.cpu())
        assert torch.equal(ours.tiles.cpu(), oracle.tiles) and ours.tile == oracle.tile
        dense = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device="cuda").view(dtype)
        values = ours.gather(dense)
        assert torch.equal(bits(values), bits(oracle.gather(dense.cpu())))
        full = oracle.scatter(values.cpu())
        assert torch.equal(bits(ours.scatter(values)), bits(full))
        assert torch.equal(bits(ours.masked(dense)), bits(full))
        assert torch.equal(bits(ours.masked(dense, out=dense)), bits(full))
        if ours.transposable:
            turned = oracle.transpose_values(values.cpu())
            assert torch.equal(bits(ours.transpose_values(values)), bits(turned))


def test_more_than_two_to_the_31_bytes_are_moved_right():
    keep = mask_of(("transposable", "random"), (36864, 32768))
    found, last = Pattern.of(keep), slice(36864 - 64, 36864)
    dense = torch.randint(-(1 << 15), 1 << 15, keep.shape, dtype=torch.int16, device="cuda").view(torch.bfloat16)
    values = found.gather(dense)
    turned = found.transpose_values(values)
    oracle = Pattern.of(keep[last].cpu())
    assert torch.equal(bits(values[last]), bits(oracle.gather(dense[last].cpu())))
    assert torch.equal(bits(turned[:, -32:]), bits(oracle.transpose_values(values[last].cpu())))
    back = found.scatter(values).view(torch.int16)
    assert torch.equal(found.masked(dense).view(torch.int16), back)
    assert torch.equal(back, dense.view(torch.int16).mul_(keep))
    assert torch.equal(found.t().scatter(turned).view(torch.int16).t(), back)


def test_the_moves_can_be_captured_in_a_graph_and_follow_new_values():
    found = Pattern.of(mask_of(("transposable", "random"), (256, 512)))
    dense = torch.randn(256, 512, device="cuda").bfloat16()

    def step():
        values = found.gather(dense)
        return values, found.scatter(values), found.masked(dense), found.transpose_values(values)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    dense.mul_(-3)
    graph.replay()
    assert all(map(torch.equal, captured, step()))


def test_other_dtypes_on_a_gpu_are_moved_by_torch():
    keep = mask_of(("transposable", "random"), (128, 64))
    dense = torch.randn(128, 64, device="cuda", dtype=torch.float64)
    values = Pattern.of(keep).gather(dense)
    assert torch.equal(values, dense[keep].view(128, 32))
    assert torch.equal(Pattern.of(keep).transpose_values(values), dense.t()[keep.t()].view(64, 64))


@pytest.mark.parametrize("name", ["cslt", "reference"])
@pytest.mark.parametrize("mask", MASKS[:-1], ids=" ".join)
def test_a_kept_zero_stays_kept_and_written_values_reach_the_product(name, mask):
    backend = backend_for(name)
    x, weight, keep = problem(512, 1024, 64, mask=mask)
    weight.masked_fill_(torch.rand(weight.shape, device="cuda") < 0.3, 0)
    found = Pattern.of(keep)
    for start in (weight, torch.zeros_like(weight)):
        packed = backend.pack(start, keep)
        assert torch.equal(packed.values, start[keep].view(512, 512))
        assert_right(backend.linear(x, packed), x, start, keep)
        changed, values = torch.randn_like(weight), packed.values
        before = values._version
        found.gather(changed, out=values)
        assert values._version > before  # a Triton kernel's write is told to whoever keeps a copy
        assert_right(backend.linear(x, packed), x, changed, keep)


@pytest.mark.parametrize("name", ["cslt", "reference", "torch"])
def test_values_written_into_a_blank_reach_the_product(name):
    backend = backend_for(name)
    x, weight, keep = problem(512, 1024, 64)
    weight.masked_fill_(torch.rand(weight.shape, device="cuda") < 0.3, 0)
    packed = backend.blank(Pattern.of(keep), weight.dtype)
    packed.values.copy_(weight[keep].view(512, 512))
    assert_right(backend.linear(x, packed), x, weight, keep)


def test_the_stock_products_values_are_a_view_of_its_buffer():
    backend = backend_for("torch")
    x, weight, keep = problem(512, 1024, 64)
    packed = backend.pack(weight, keep)
    assert torch.equal(packed.values, weight[keep].view(512, 512))
    changed = 2 * weight + 1
    packed.values.copy_(changed[keep].view(512, 512))
    assert_right(backend.linear(x, packed), x, changed, keep)


def test_the_refreshed_transposed_copy_gives_dx():
    backend = backend_for("cslt")
    _, weight, keep = problem(512, 1024, 64, mask=("transposable", "random"))
    dy = torch.randn(64, 512, device="cuda").bfloat16()
    forward, backward = backend.pack(weight, keep), backend.pack(weight.t(), keep.t())
    forward.values.mul_(-2)
    Pattern.of(keep).transpose_values(forward.values, out=backward.values)
    assert_right(backend.linear(dy, backward), dy, -2 * weight.t(), keep.t())


def test_a_frozen_stock_layer_with_a_kept_zero_makes_dx():
    # The stock op packs by value: a kept zero may be given another place, which is then no mask's.
    backend_for("torch")
    _, weight, keep = problem(512, 1024, 64, mask=("transposable", "checkerboard"))
    weight.masked_fill_(torch.rand(weight.shape, device="cuda") < 0.01, 0)
    options = dict(mask=Mask.named("checkerboard"), keep=keep, group=Group(0, 2), frozen=True)
    layer = BlockShockLinear(weight, product="torch", **options)
    dy = torch.randn(64, 512, device="cuda").bfloat16()
    assert_right(layer.local_dx(dy), dy, weight.t(), keep.t())
