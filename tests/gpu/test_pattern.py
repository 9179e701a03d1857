"""The moves of training on a real GPU: the Triton kernels, and packing by mask in cuSPARSELt's own buffer."""

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.kernels.sparse24.pattern import Pattern, larger
from blockshock_lib.layers import BlockShockLinear

from .test_products import MASKS, assert_right, backend_for, mask_of, problem

SHAPES = [(64, 64), (64, 192), (192, 1024), (4096, 2048)]


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (12, 520)])
def test_the_larger_two_are_the_oracles(shape, dtype):
    scores, dense = torch.randint(-(1 << 15), 1 << 15, (2, *shape), dtype=torch.int16, device="cuda").view(dtype)
    scores[:4] = torch.randint(-2, 3, (4, shape[1]), device="cuda").to(dtype)  # many are equal
    (ours, kept), (oracle, wanted) = larger(scores, dense), larger(scores.cpu(), dense.cpu())
    assert torch.equal(ours.tiles.cpu(), oracle.tiles) and torch.equal(bits(kept), bits(wanted))


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


def test_a_frozen_stock_layer_with_a_kept_zero_makes_dx():
    # The stock op packs by value: a kept zero may be given another place, which is then no mask's.
    backend_for("torch")
    _, weight, keep = problem(512, 1024, 64, mask=("transposable", "checkerboard"))
    weight.masked_fill_(torch.rand(weight.shape, device="cuda") < 0.01, 0)
    options = dict(mask=Mask.named("checkerboard"), keep=keep, group=Group(0, 2), frozen=True)
    layer = BlockShockLinear(weight, product="torch", **options)
    dy = torch.randn(64, 512, device="cuda").bfloat16()
    assert_right(layer.local_dgrad(dy), dy, weight.t(), keep.t())
