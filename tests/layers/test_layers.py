"""Each method's layer computes x W^T + b from its ranks' shares, for every world size."""

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import BlockShockLinear, DenseLinear, PermutedDenseLinear, RowParallelLinear
from blockshock_lib.layers.emulated import Emulated
from blockshock_lib.layers.part import Part, part_of
from blockshock_lib.layers.problem import LinearProblem
from blockshock_lib.methods import METHODS
from blockshock_lib.params import Mask
from tests.cases import MASKS, case

CPU = torch.device("cpu")


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("mask", MASKS)
def test_every_method_reaches_the_dense_product_in_float64(mask, world_size):
    # In float64 rounding cannot hide a missing or doubled term.
    torch.manual_seed(0)
    n, k, b = 512, 512, 3
    w, bias, x = torch.randn(n, k).double(), torch.randn(n).double(), torch.randn(b, k).double()
    for name, method in METHODS.items():
        if method.product == "torch" or method.load().unsupported(Mask.named(mask), CPU, torch.float32):
            continue
        options = {"product": "reference"} if method.product == "" else {}
        ranks = [
            method.load()(w, bias, mask=Mask.named(mask), group=Group(r, world_size), **options)
            for r in range(world_size)
        ]
        y = Emulated(ranks)(x)
        torch.testing.assert_close(y, x @ w.T + bias, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("name", METHODS)
def test_parts_cover_every_weight_exactly_once(name, world_size):
    layer, n, k = METHODS[name].load(), 512, 512
    keep = torch.rand(n, k) < 0.5
    total = torch.zeros(n, k)
    for rank in range(layer.ranks(world_size)):
        part = layer.part(rank, world_size, n, k)
        total[part.rows, part.cols] += part_of(torch.ones(n, k), keep, part)
    assert torch.equal(total, torch.ones(n, k))


@pytest.mark.parametrize("name", [n for n in METHODS if n != "block_shock_torch"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_stored_weight_bytes_are_what_the_cost_says(name, world_size):
    problem = LinearProblem(case(world_size=world_size, in_features=512), CPU)
    layers = problem.build(name, Group())
    assert layers.weight_bytes() == problem.cost(name).weights


def test_packed_weight_is_nine_sixteenths_of_the_dense_bytes():
    problem = LinearProblem(case(), CPU)
    dense, packed = (problem.build(name, Group()).weight_bytes() for name in ("masked_dense", "block_shock"))
    assert packed / dense == 9 / 16


def test_terms_hold_no_negative_zero():
    w = -torch.ones(64, 64)
    keep = torch.rand(64, 64) < 0.5
    held = part_of(w, keep, Part(1, slice(0, 64), slice(0, 64)))
    assert not torch.signbit(held[keep]).any()


def test_permuted_dense_refuses_a_mask_that_is_not_periodic():
    reason = PermutedDenseLinear.unsupported(Mask.named("random"), CPU, torch.bfloat16)
    assert "not periodic" in reason and "random" in reason


def test_stock_op_is_unsupported_on_the_cpu_with_a_reason():
    assert BlockShockLinear.unsupported(Mask.named("checkerboard"), CPU, torch.bfloat16, product="torch")


def test_from_linear_keeps_leading_dimensions_and_values():
    linear = torch.nn.Linear(256, 128)
    x = torch.randn(2, 5, 256)
    with torch.no_grad():
        torch.testing.assert_close(RowParallelLinear.from_linear(linear)(x), linear(x))


def test_two_terms_need_an_even_world():
    with pytest.raises(UnsupportedError, match="even number of ranks"):
        BlockShockLinear.from_linear(torch.nn.Linear(256, 128), mask="checkerboard")


def test_wrong_number_of_features_is_named():
    with pytest.raises(ValueError, match="x has 128 features, the layer 256"):
        DenseLinear.from_linear(torch.nn.Linear(256, 64))(torch.randn(1, 128))


def test_a_method_that_splits_by_mask_asks_for_one():
    with pytest.raises(ValueError, match="give mask="):
        BlockShockLinear(torch.randn(64, 64), group=Group(0, 2))
