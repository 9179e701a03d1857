"""What a Block-Shock layer holds, when it refreshes its copies, and what it refuses."""

from dataclasses import replace

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import backends
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.kernels.sparse24.pattern import Pattern
from blockshock_lib.layers import BlockShockLinear
from blockshock_lib.studies.linear.methods import METHODS
from blockshock_lib.studies.linear.methods.method import Shape
from tests.cases import MASKS
from tests.layers.ranks import Threads, built, draw

N, K, B = 128, 256, 6
UPDATES = ("packed", "recompress")
BF16 = torch.bfloat16
X, DY, W, BIAS = draw(B, K), draw(B, N), draw(N, K), draw(N)


def pair(mask="checkerboard", dtype=torch.float32, weight=W, **options):
    """Both ranks' layers."""
    mask, weight, bias = Mask.named(mask), weight.to(dtype), BIAS.to(dtype)
    return Threads(lambda group: BlockShockLinear(weight, bias, mask=mask, group=group, **options))


def one(mask="checkerboard", **options):
    """One of two ranks' layers, which no group joins."""
    return BlockShockLinear(W, mask=Mask.named(mask), group=Group(0, 2), **options)


def assert_right(model):
    """y and dX, as the packed copies make them, are those of the weights."""
    found, w = model.passes(X, DY), model.dense()
    torch.testing.assert_close(found, (X @ w.t() + model.layers[0].bias.detach(), DY @ w), rtol=1e-4, atol=1e-4)


def changed(model, change):
    with torch.no_grad():
        for weight in model.weights:
            change(weight)


@pytest.mark.parametrize("mask", MASKS)
def test_a_frozen_layer_holds_its_packed_weight_alone_and_makes_dx_and_its_dense_view_without_its_mask(mask):
    model = pair(mask, BF16, frozen=True)
    model.each(lambda layer: layer(X.to(BF16)))
    held = {"weights": N * K * 9 // 8, "copies": 0, "pattern": 0}  # 9/16 of 2 N K bytes
    assert all(layer.hold_bytes() == held for layer in model.layers)
    assert not any(p.requires_grad for layer in model.layers for p in layer.parameters())
    model = pair(mask, frozen=True)
    model.each(lambda layer: layer.load_dense(W))
    assert_right(model)
    assert torch.equal(model.dense(), W)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("mask", MASKS)
def test_bytes_held_for_training_are_those_of_the_formula(mask, update):
    for dw in ("full", "exchange"):
        model, method = pair(mask, BF16, update=update, dw=dw), METHODS["block_shock"]
        model.passes(X.to(BF16), DY.to(BF16))
        shape = Shape(B, K, N, 2, 2, Mask.named(mask), update=update, dw=dw)
        formula = method.training_bytes(shape, "adamw")
        for layer in model.layers:
            held = layer.hold_bytes()
            assert held["weights"] == formula.weights  # and of a mask that repeats one tile, that tile:
            assert held["copies"] + held["pattern"] == pytest.approx(formula.copies, abs=32)
            assert layer.weight.grad.nbytes == formula.gradients
            optimizer = torch.optim.AdamW([layer.weight])
            optimizer.step()
            (state,) = optimizer.state.values()
            assert state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes == formula.optimizer
            assert list(layer.post_step()) == list(method.cost_post_step(shape))


def test_the_packed_copy_of_a_weight_that_lies_in_a_buffer_of_somebody_else_is_counted():
    model = pair("random", BF16, frozen=True)
    for layer in model.layers:
        layer.weight.data = layer.weight.detach().clone()
    model.each(lambda layer: layer(X.to(BF16)))
    for layer in model.layers:
        values = layer.weight.nbytes
        assert layer.hold_bytes() == {"weights": values, "copies": values * 9 // 8, "pattern": 0}


@pytest.mark.parametrize("kind", ["block_shock_recompress", "masked_dense"])
def test_data_that_is_set_and_belongs_to_another_is_masked_in_a_copy(kind):
    *theirs, weight = (draw(N, K, seed=seed, dtype=torch.float64) for seed in (3, 4, 5))
    x, model = draw(B, K, dtype=torch.float64), Threads(lambda group: built(kind, "random", weight, None, group))
    kept = [layer.weight != 0 for layer in model.layers]
    before = [one.clone() for one in theirs]
    for layer, one in zip(model.layers, theirs, strict=True):
        layer.weight.data = one
    made = model.each(lambda layer: layer(x))[0]
    assert all(map(torch.equal, theirs, before)), "the other holder reads what it had"
    parts = [one * keep for one, keep in zip(before, kept, strict=True)]
    torch.testing.assert_close(made, x @ sum(parts).T)
    for layer, keep in zip(model.layers, kept, strict=True):
        assert not layer.weight[~keep].any()


def test_a_dense_weight_that_is_lent_to_c_is_refused_and_left_as_it_was():
    weight, lent = draw(N, K), torch.nn.Parameter(draw(N, K, seed=3))
    before, layers = lent.clone(), Threads(lambda group: built("masked_dense", "random", weight, None, group)).layers
    with pytest.raises(UnsupportedError, match="was lent a weight with more than its mask keeps"):
        torch.func.functional_call(layers[0], {"weight": lent}, X)
    assert torch.equal(lent, before)


def test_a_master_changed_in_its_holes_is_masked_again_and_its_dense_view_holds_each_entry_once():
    model = pair("random", update="recompress")
    kept = [layer.weight != 0 for layer in model.layers]
    changed(model, lambda weight: weight.add_(1))
    assert all(torch.equal(dense, W + 1) for dense in model.each(lambda layer: layer.to_dense()))
    changed(model, lambda weight: weight.add_(1))
    model.each(lambda layer: layer(X))
    for layer, keep in zip(model.layers, kept, strict=True):
        assert not layer.weight[~keep].any() and layer.weight[keep].any()


def test_a_weight_changed_between_forward_and_backward_is_an_error():
    model = pair()
    made = model.each(lambda layer: layer(X).sum())
    changed(model, lambda weight: weight.add_(1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made[0].backward()


def test_what_a_layer_can_run_follows_from_its_mask_and_group():
    for mask in MASKS:
        assert one(mask).dgrad_by == ("2:4" if mask in ("checkerboard", "transposable_random") else "dense masked")
    assert one().wgrad_by == "periodic" and one("random").wgrad_strategies() == ("full", "exchange")
    assert one("random").wgrad_by == "full"  # threads and single ranks have no link to exchange over
    with pytest.raises(UnsupportedError, match="'periodic' cannot run with mask random on 2 ranks; there are full, ex"):
        one("random", dw="periodic")
    with pytest.raises(ValueError, match="dw='fast': there are auto, full, periodic, exchange"):
        one(dw="fast")
    for name in ("mask", "keep"):
        with pytest.raises(UnsupportedError, match=r"metadata is made once.*make a new layer"):
            setattr(one(), name, Mask.named("random"))
    keep = torch.arange(K).expand(N, K) % 4 % 3 == 0  # columns 0 and 3 of four, under the name of another mask
    layer = one(keep=keep)
    assert layer.wgrad_strategies() == ("full", "exchange") and layer.dgrad_by == "dense masked"
    grad = layer.part_dense(layer.finish_wgrad(layer.local_wgrad(DY, X)))
    torch.testing.assert_close(grad, (DY.t() @ X) * keep, rtol=1e-4, atol=1e-4)


def test_a_term_that_its_backend_cannot_multiply_is_refused_before_anything_is_made_of_it(monkeypatch):
    small = replace(backends.BACKENDS["reference"], too_large=lambda shape: f"{shape} has too many weights")
    monkeypatch.setitem(backends.BACKENDS, "reference", small)
    monkeypatch.setattr(Pattern, "of", lambda mask: pytest.fail("its pattern was made"))
    with pytest.raises(UnsupportedError, match=rf"\[{N}, {K}\]\) has too many weights"):
        one()


def test_a_master_that_is_multiplied_or_tied_past_its_layer_is_refused():
    layer, embedding = one("random", update="recompress"), torch.nn.Embedding(N, K)
    embedding.weight = layer.weight
    for use in (lambda: torch.nn.functional.linear(X, layer.weight), lambda: embedding(torch.arange(3))):
        with pytest.raises(UnsupportedError, match=r"of the weight of BlockShockLinear\(256, 128, rank 0 of 2"):
            use()
