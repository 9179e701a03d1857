"""What a Block-Shock layer holds, when it refreshes its copies, and what it refuses."""

import copy
from dataclasses import replace

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import BlockShockLinear
from blockshock_lib.layers.costs import Shape
from blockshock_lib.layers.emulated import Emulated
from blockshock_lib.params import Mask
from blockshock_lib.sparse24 import product
from blockshock_lib.sparse24.pattern import Pattern
from tests.cases import MASKS

N, K, B = 128, 256, 6
UPDATES = ("packed", "recompress")
TRANSPOSABLE = ("checkerboard", "transposable_random")


def pair(mask="checkerboard", dtype=torch.float32, **options):
    """Both ranks' layers in one process, and W, b."""
    seed = torch.Generator().manual_seed(0)
    w, bias = (torch.randn(*shape, generator=seed).to(dtype) for shape in ((N, K), (N,)))
    groups = [Group(rank, 2) for rank in range(2)]
    return Emulated([BlockShockLinear(w, bias, mask=Mask.named(mask), group=g, **options) for g in groups]), w, bias


def draw(rows, columns, seed=1, dtype=torch.float32):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed + columns)).to(dtype)


def dense(model):
    return sum(layer.part_dense(layer.weight.detach()) for layer in model.layers)


def results(model, x, dy):
    """y and dX as the layers' packed copies make them."""
    x = x.clone().requires_grad_()
    y = model(x)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def assert_right(model, x, dy):
    y, dx = results(model, x, dy)
    w = dense(model)
    torch.testing.assert_close(y, x @ w.t() + model.bias.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dx, dy @ w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask", MASKS)
def test_a_frozen_layer_that_runs_forward_holds_its_packed_weight_alone(mask):
    model, _, _ = pair(mask, torch.bfloat16, frozen=True)
    model(draw(B, K, dtype=torch.bfloat16))
    assert model.hold_bytes() == {"weights": 2 * N * K * 9 // 8, "copies": 0, "pattern": 0}
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("mask", MASKS)
def test_a_frozen_layer_makes_dx_and_its_dense_view_without_having_kept_its_mask(mask):
    model, w, _ = pair(mask, frozen=True)
    model.layers[0].load_dense(w)
    dy = draw(B, N)
    _, dx = results(model, draw(B, K), dy)
    torch.testing.assert_close(dx, dy @ w, rtol=1e-4, atol=1e-4)
    assert torch.equal(dense(model), w)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("mask", MASKS)
def test_bytes_held_for_training_are_those_of_the_formula(mask, update):
    for dw in ("full", "exchange"):
        model, _, _ = pair(mask, torch.bfloat16, update=update, dw=dw)
        model(draw(B, K, dtype=torch.bfloat16).requires_grad_()).backward(draw(B, N, dtype=torch.bfloat16))
        shape = Shape(B, K, N, 2, 2, Mask.named(mask), update=update, dw=dw)
        formula = BlockShockLinear.training_bytes(shape, "adamw")
        held, few = model.hold_bytes(), 32  # a mask that repeats one tile holds that tile
        assert held["weights"] == 2 * formula.weights
        assert held["copies"] + held["pattern"] == pytest.approx(2 * formula.copies, abs=few)
        assert sum(p.grad.nbytes for p in model.weights) == 2 * formula.gradients
        optimizer = torch.optim.AdamW(model.weights)
        optimizer.step()
        state = sum(one[key].nbytes for one in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
        assert state == 2 * formula.optimizer
        assert list(model.stages()) == list(BlockShockLinear.cost_stages(shape))


def test_packed_values_halve_gradient_and_optimizer_state():
    packed, recompress = (pair(update=update)[0].weights[0].numel() for update in UPDATES)
    assert packed == N * K // 2 and recompress == N * K


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("mask", MASKS)
def test_copies_follow_every_kind_of_step(mask, update):
    model, _, _ = pair(mask, update=update)
    x, dy = draw(B, K), draw(B, N)
    fused = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for optimizer in (plain, fused, plain):
        optimizer.zero_grad()
        model(x).backward(dy)
        model(x)  # a look at the model between backward and step does not hide the step
        before = dense(model)
        optimizer.step()
        assert not torch.equal(dense(model), before)
        assert_right(model, x, dy)
    with torch.no_grad():
        for weight in model.weights:
            weight.mul_(2)
    assert_right(model, x, dy)


def test_a_master_changed_in_its_holes_is_masked_again():
    model, _, _ = pair(update="recompress")
    kept = [layer.weight != 0 for layer in model.layers]
    with torch.no_grad():
        for weight in model.weights:
            weight.add_(1)
    model(draw(B, K))
    for layer, keep in zip(model.layers, kept, strict=True):
        assert not layer.weight[~keep].any() and layer.weight[keep].any()


def test_pieces_leave_the_stages_to_their_caller():
    model, _, _ = pair()
    dy = draw(B, N)
    stale = model.layers[0].local_dx(dy)
    with torch.no_grad():
        model.weights[0].mul_(2)
    assert torch.equal(model.layers[0].local_dx(dy), stale)
    model.layers[0].stages()["refresh"]()
    assert torch.equal(model.layers[0].local_dx(dy), 2 * stale)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("mask", ["checkerboard", "random"])
def test_a_copy_of_a_layer_trains_on_its_own(mask, update):
    model, w, _ = pair(mask, update=update)
    x, dy = draw(B, K), draw(B, N)
    model(x).backward(dy)
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other.zero_grad()
    other(x).backward(dy)
    optimizer.step()
    assert torch.equal(dense(model), w) and not torch.equal(dense(other), w)
    assert_right(model, x, dy)
    assert_right(other, x, dy)
    assert {layer.handle for layer in model.layers}.isdisjoint(layer.handle for layer in other.layers)


@pytest.mark.parametrize("options", [{"update": "packed"}, {"update": "recompress"}, {"frozen": True}])
def test_a_layer_moved_to_another_dtype_computes_in_it(options):
    model, w, _ = pair("transposable_random", **options)
    model.to(torch.float64)
    x, dy = draw(B, K, dtype=torch.float64), draw(B, N, dtype=torch.float64)
    y, dx = results(model, x, dy)
    torch.testing.assert_close(y, x @ w.double().t() + model.bias.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dx, dy @ w.double(), rtol=1e-10, atol=1e-10)
    assert model.weights[0].dtype == torch.float64


def test_a_kept_weight_of_zero_is_trained():
    w = draw(N, K)
    w[:, ::2] = 0
    groups = [Group(rank, 2) for rank in range(2)]
    model = Emulated([BlockShockLinear(w, torch.zeros(N), mask=Mask.named("checkerboard"), group=g) for g in groups])
    x, dy = draw(B, K), draw(B, N)
    model(x).backward(dy)
    with torch.no_grad():
        for weight in model.weights:
            weight.sub_(weight.grad)
    torch.testing.assert_close(dense(model), w - dy.t() @ x, rtol=1e-4, atol=1e-4)
    assert_right(model, x, dy)


def test_gradients_nobody_asked_for_are_not_computed(monkeypatch):
    model, _, _ = pair()

    def refuse(*_):
        raise AssertionError("computed")

    x, dy = draw(B, K), draw(B, N)
    monkeypatch.setattr(Emulated, "local_dx", refuse)
    model(x).backward(dy)
    monkeypatch.undo()
    monkeypatch.setattr(Emulated, "local_dw", refuse)
    for weight in model.weights:
        weight.requires_grad = False
    x.requires_grad = True
    model(x).backward(dy)
    assert x.grad is not None and model.bias.grad is not None


def test_inputs_of_any_leading_dimensions_and_expanded_gradients():
    model, w, bias = pair()
    x = draw(6, K).view(2, 3, K).requires_grad_()
    y = model(x)
    torch.testing.assert_close(y, x @ w.t() + bias, rtol=1e-4, atol=1e-4)
    y.sum().backward()
    torch.testing.assert_close(x.grad, w.sum(0).expand_as(x), rtol=1e-4, atol=1e-4)


def test_a_weight_changed_between_forward_and_backward_is_an_error():
    model, _, _ = pair()
    y = model(draw(B, K))
    with torch.no_grad():
        model.weights[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask not in TRANSPOSABLE])
def test_a_mask_that_cannot_be_transposed_is_refused_a_2_4_backward(mask):
    with pytest.raises(UnsupportedError, match=f"mask {mask} does not keep two of every four .* output dimension"):
        pair(mask, dx="2:4")
    assert pair(mask)[0].dx_by == "dense masked"


@pytest.mark.parametrize("mask", TRANSPOSABLE)
def test_a_transposable_mask_has_a_2_4_backward(mask):
    assert pair(mask, dx="2:4")[0].dx_by == "2:4"


def test_a_packed_layer_refuses_another_mask():
    layer = pair()[0].layers[0]
    with pytest.raises(UnsupportedError, match=r"metadata is made once.*make a new layer"):
        layer.mask = Mask.named("random")
    with pytest.raises(UnsupportedError, match="metadata is made once"):
        layer.keep = torch.ones(N, K, dtype=torch.bool)


def test_a_strategy_that_the_mask_cannot_run_is_refused_with_those_it_can():
    with pytest.raises(UnsupportedError, match="'periodic' cannot run with mask random on 2 ranks; there are full, ex"):
        pair("random", dw="periodic")
    with pytest.raises(ValueError, match="dw='fast': there are auto, full, periodic, exchange"):
        pair(dw="fast")


def test_a_term_that_its_backend_cannot_multiply_is_refused_before_anything_is_made_of_it(monkeypatch):
    small = replace(product.BACKENDS["reference"], too_large=lambda shape: f"{shape} has too many weights")
    monkeypatch.setitem(product.BACKENDS, "reference", small)
    monkeypatch.setattr(Pattern, "of", lambda mask: pytest.fail("its pattern was made"))
    with pytest.raises(UnsupportedError, match=rf"\[{N}, {K}\]\) has too many weights"):
        pair()


def test_strategies_of_a_layer_by_its_mask():
    assert pair("checkerboard")[0].dw_by == "periodic"
    assert pair("random")[0].dw_by == "full"  # emulated ranks have nobody to exchange with
    assert pair("random")[0].dw_strategies() == ("full", "exchange")


def test_a_mask_given_as_it_is_not_named_is_not_taken_for_periodic():
    w, keep = draw(N, K), torch.zeros(N, K, dtype=torch.bool)
    keep[:, 0::4] = keep[:, 3::4] = True
    layer = BlockShockLinear(w, mask=Mask.named("checkerboard"), keep=keep, group=Group(0, 2))
    assert layer.dw_strategies() == ("full", "exchange") and layer.dx_by == "dense masked"
    x, dy = draw(B, K), draw(B, N)
    grad = layer.part_dense(layer.finish_dw(layer.local_dw(dy, x)))
    torch.testing.assert_close(grad, (dy.t() @ x) * keep, rtol=1e-4, atol=1e-4)


def test_loading_writes_in_place_and_refreshes_both_copies():
    model, _, _ = pair("transposable_random")
    storage = model.weights[0].data_ptr()
    x, dy = draw(B, K), draw(B, N)
    results(model, x, dy)
    other = draw(N, K, seed=7)
    for layer in model.layers:
        layer.load_dense(other)
    assert model.weights[0].data_ptr() == storage and torch.equal(dense(model), other)
    assert torch.equal(model.layers[0].packed.values, model.weights[0])
    assert_right(model, x, dy)
    with pytest.raises(ValueError, match=r"the weight is \[128, 256\], not \[256, 128\]"):
        model.layers[0].load_dense(other.t())


def test_the_dense_view_of_a_master_that_an_optimizer_filled_holds_each_entry_once():
    weight = torch.randn(64, 64)
    layers = [
        BlockShockLinear(weight, mask=Mask.named("random"), group=Group(r, 2), update="recompress") for r in range(2)
    ]
    kept = [layer.weight.detach().clone() for layer in layers]
    with torch.no_grad():
        for layer in layers:
            layer.weight.add_(1)
    for layer in layers:
        layer.group = Group()
    parts = [layer.to_dense() for layer in layers]
    assert torch.equal(sum(parts), weight + 1)
    assert all(torch.equal(part != 0, own != 0) for part, own in zip(parts, kept, strict=True))


@pytest.mark.parametrize("mask", ["checkerboard", "random"])
def test_a_frozen_layer_used_twice_before_its_backward_makes_dx(mask):
    weight = torch.randn(64, 64)
    layer = BlockShockLinear(weight, mask=Mask.named(mask), frozen=True, group=Group(0, 2))
    layer.group = Group()
    x = torch.randn(3, 64, requires_grad=True)
    (layer(x) + layer(2 * x)).sum().backward()
    torch.testing.assert_close(x.grad, 3 * layer.to_dense().sum(0).expand_as(x))


def test_a_frozen_layer_keeps_its_transposed_copy_where_a_graph_is_captured():
    layer = BlockShockLinear(torch.randn(64, 64), mask=Mask.named("checkerboard"), frozen=True, group=Group(0, 2))
    layer.local_dx(torch.randn(2, 64))
    held = layer.packed_t
    layer.prepare(always=True)
    assert layer.packed_t is held


def test_a_master_is_packed_both_ways_at_once_where_its_backend_can(monkeypatch):
    made, plain = [], product.BACKENDS["reference"]

    def pack_both(weight, pattern):
        made.append(weight.shape)
        return plain.pack(weight, pattern.mask()), plain.pack(weight.t(), pattern.t().mask())

    monkeypatch.setitem(product.BACKENDS, "reference", replace(plain, pack_both=pack_both))
    weight, options = draw(N, K), dict(update="recompress", group=Group(0, 2))
    assert BlockShockLinear(weight, mask=Mask.named("random"), **options).packed_t is None and not made
    layer = BlockShockLinear(weight, mask=Mask.named("transposable_random"), **options)
    assert made == [(N, K)]
    dy = draw(B, N)
    torch.testing.assert_close(layer.local_dx(dy), dy @ layer.weight.detach(), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        layer.weight.mul_(-2)
    layer.prepare()
    torch.testing.assert_close(layer.local_dx(dy), dy @ layer.weight.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.local(draw(B, K)), draw(B, K) @ layer.weight.detach().t(), rtol=1e-4, atol=1e-4)
    copy.deepcopy(layer).prepare()
    assert len(made) == 2
