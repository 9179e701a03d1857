"""Every way of the product works on the layer's own packed weight, by its own tuned choice."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.layers import BlockShockLinear, RowParallelLinear, block_shock_ways
from blockshock_lib.layers.emulated import Emulated
from blockshock_lib.params import Mask
from blockshock_lib.sparse24 import small
from blockshock_lib.sparse24.tuning import Setting

N, K = 128, 256


@pytest.fixture
def layer():
    torch.manual_seed(0)
    weight = torch.randn(N, K)
    return BlockShockLinear(
        weight, mask=Mask.named("checkerboard"), group=Group(1, 2), frozen=True, product="reference"
    )


@pytest.fixture
def asked(layer, monkeypatch):
    """The layer as `tuned` packs it, with backends that tell what they were given: (name, what, rows of x, packed)."""
    seen = []

    def backend(name):
        def linear(x, packed):
            seen.append((name, "multiply", x.shape[0], packed))

        def tune(x, packed):
            seen.append((name, "tune", x.shape[0], packed))
            packed.extra[x.shape[0]] = name

        return SimpleNamespace(name=name, linear=linear, tune=tune, unsupported=lambda *_: "")

    monkeypatch.setattr(block_shock_ways, "BACKENDS", {name: backend(name) for name in ("cslt", "small")})
    layer.backend = SimpleNamespace(name="tuned")
    layer.packed = dataclasses.replace(layer.packed, backend="tuned", extra={"its": "own"})
    return seen


def test_each_way_is_tuned_by_itself_on_the_one_packed_weight(layer, asked):
    products = layer.products(torch.ones(16, K))
    assert list(products) == ["cslt", "small"]
    for call in products.values():
        call()
    assert [(name, what) for name, what, *_ in asked] == [
        ("cslt", "tune"),
        ("small", "tune"),
        ("cslt", "multiply"),
        ("small", "multiply"),
    ]
    for name, _, _, packed in asked:
        assert packed.backend == name and packed.extra == {16: name}
        assert packed.values.data_ptr() == layer.packed.values.data_ptr()
    assert layer.packed.extra == {"its": "own"}


def test_the_small_batch_kernel_is_offered_for_small_batches_where_it_runs(layer, asked, monkeypatch):
    assert list(layer.products(torch.ones(small.MOST_ROWS, K))) == ["cslt", "small"]
    assert list(layer.products(torch.ones(small.MOST_ROWS + 1, K))) == ["cslt"]
    monkeypatch.setattr(block_shock_ways.BACKENDS["small"], "unsupported", lambda *_: "no Hopper")
    assert list(layer.products(torch.ones(16, K))) == ["cslt"]


def test_the_way_that_was_tuned_is_named(layer, asked):
    x = torch.ones(13, K)
    assert layer.product_by(x) == ""
    for way, name in ((Setting(), "cslt"), (small.Config(1, 1, 1, 3, 1), "small")):
        layer.packed.extra[16] = way
        assert layer.product_by(x) == name


def test_a_layer_with_one_way_offers_what_it_does(layer):
    x = torch.randn(5, K)
    ((name, call),) = layer.products(x).items()
    assert name == layer.product_by(x) == "reference" and torch.equal(call(), layer.local(x))
    dense = RowParallelLinear(torch.randn(N, K), group=Group(0, 2))
    assert dense.product_by(x) == "dense" and torch.equal(dense.products(x)["dense"](), dense.local(x))


def test_emulated_ranks_make_each_way_together():
    weight, mask, x = torch.randn(N, K), Mask.named("checkerboard"), torch.randn(5, K)
    layers = [BlockShockLinear(weight, mask=mask, group=Group(r, 2), frozen=True, product="reference") for r in (0, 1)]
    both = Emulated(layers)
    made = both.products(x)["reference"]()
    assert both.product_by(x) == "reference" and both.reductions(x) == {}
    assert all(torch.equal(one, two) for one, two in zip(made, both.local(x), strict=True))
