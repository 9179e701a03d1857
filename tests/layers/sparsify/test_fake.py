"""Layers that are trained as if they were sparse: what a pass multiplies, its gradient, and how they become real."""

import copy
import io
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from blockshock_lib import PruneSchedule, Sparse24, dense_, fake_sparsify_, sparsify_
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import masks
from blockshock_lib.kernels.sparse24.backends import BACKENDS
from blockshock_lib.layers.linear24 import nonzero_places
from blockshock_lib.layers.sparsify import convert
from blockshock_lib.layers.sparsify.fake import GRADIENTS, FakeSparse
from tests.layers.sparsify.models import Model, same, state
from tests.layers.sparsify.test_convert import ALL, TOKENS


def trained(schedule, steps, seed=0):
    """A model after some steps of AdamW in float64, and its fake layers."""
    model = Model(seed).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # made before: the parameters stay
    report = fake_sparsify_(model, Sparse24(), schedule=schedule)
    assert report.converted == ALL
    for _ in range(steps):
        optimizer.zero_grad()
        model(TOKENS).square().mean().backward()
        optimizer.step()
        schedule.step()
    return model


KINDS = [PruneSchedule(), PruneSchedule("gradual", 6), PruneSchedule("decay", 6, "sparse"), PruneSchedule("s-ste")]


@pytest.mark.parametrize("schedule", KINDS, ids=lambda schedule: schedule.kind)
def test_a_trained_model_becomes_real_and_dense_with_equal_values(schedule):
    model = trained(schedule, 8)
    y, dense = model(TOKENS), Model().double()
    assert model.state_dict().keys() == dense.state_dict().keys()
    report = sparsify_(model, Sparse24("given"))
    assert report.converted == ALL
    torch.testing.assert_close(model(TOKENS), y)
    dense_(model)
    torch.testing.assert_close(model(TOKENS), y)
    model = trained(PruneSchedule(schedule.kind, schedule.steps, schedule.gradient), 8)
    torch.testing.assert_close(model(TOKENS), y)
    dense_(model)
    assert [type(m) for n, m in model.named_modules() if n in ALL] == [type(dense.get_submodule(n)) for n in ALL]
    torch.testing.assert_close(model(TOKENS), y)


def test_a_schedule_that_has_not_ended_cannot_become_real():
    model = trained(PruneSchedule("gradual", 9), 4)
    with pytest.raises(UnsupportedError, match="the weight is not pruned 2:4"):
        sparsify_(model, Sparse24("given"))
    with pytest.raises(UnsupportedError, match="already: call sparsify_ or dense_ first"):
        fake_sparsify_(model, Sparse24())
    assert isinstance(model.blocks[0].up, FakeSparse)


def layer(schedule, weight):
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    model[0].weight.data.copy_(weight)
    fake_sparsify_(model, Sparse24(), schedule=schedule)
    return model[0]


def test_what_a_pass_multiplies_at_each_step_is_what_the_schedule_says():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    keep = masks.make(masks.named.MASKS["magnitude"], (64, 64), weight=weight)
    once = layer(PruneSchedule(), weight)
    assert torch.equal(once.effective(), weight * keep)
    once.weight.data.neg_().sub_(1)
    assert torch.equal(once.effective(), (-weight - 1) * keep)  # its mask stays
    for kind in ("gradual", "decay"):
        schedule = PruneSchedule(kind, 4)
        one = layer(schedule, weight)
        for done in range(6):
            value, t = one.effective(), min(1, done / 4)
            assert torch.equal(value[keep], weight[keep])
            if kind == "decay":
                torch.testing.assert_close(value[~keep], (1 - t) * weight[~keep])
            else:
                sizes, gone = weight[~keep].abs(), value[~keep] == 0
                assert gone.sum() == round((1 - (1 - t) ** 3) * 2048)
                assert done == 0 or done > 3 or sizes[gone].max() < sizes[~gone].min()
            schedule.step()
        one.weight.data.copy_(weight.flip(1))
        assert torch.equal(one.effective(), (weight * keep).flip(1))  # its mask follows the weight
    soft = layer(PruneSchedule("s-ste"), weight)
    value, ratio = soft.effective(), soft.effective() / weight
    groups = weight.unflatten(1, (-1, 4))
    second = groups.abs().sort(-1).values[..., 1:2]
    wanted = (groups - groups.sign() * second).flatten(1) * keep
    scale = (weight * wanted).sum() / wanted.square().sum()
    torch.testing.assert_close(value, scale * wanted)
    assert bool((ratio >= 0).all()) and nonzero_places(value).equal(keep)
    least = torch.linalg.vector_norm(weight - value)
    assert all(torch.linalg.vector_norm(weight - value * c) > least for c in (0.99, 1.01))
    soft.weight.data[:32] *= 0.1
    wanted[:32] *= 0.1
    torch.testing.assert_close(soft.effective(), scale * wanted)  # the scale stays


@pytest.mark.parametrize("kind", ["once", "s-ste"])
def test_a_state_that_is_loaded_is_pruned_as_if_the_layers_were_made_from_it(kind):
    model, other = Model(), Model(seed=1)
    for one in (model, other):
        fake_sparsify_(one, Sparse24(), schedule=PruneSchedule(kind))
        one(TOKENS)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(TOKENS), other(TOKENS))
    model.blocks[0].q.weight.data.neg_().sub_(1)
    y = model(TOKENS)
    model.load_state_dict({"blocks.0.q.none": torch.ones(1)}, strict=False)
    assert torch.equal(model(TOKENS), y)  # its mask and scale stay where no weight comes


def test_a_state_that_is_not_pruned_is_refused_where_the_mask_is_given():
    weight = torch.randn(64, 64)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    model[0].weight.data.copy_(weight * masks.make(masks.named.MASKS["magnitude"], (64, 64), weight=weight))
    fake_sparsify_(model, Sparse24("given"))
    with pytest.raises(RuntimeError, match=r"0.weight: the weight is not pruned 2:4: row 0"):
        model.load_state_dict({"0.weight": weight})


@pytest.mark.parametrize("gradient", ["straight-through", "sparse"])
def test_the_gradient_goes_straight_through_or_is_the_true_one(gradient):
    weight, x = torch.randn(64, 64), torch.randn(5, 64)
    for kind, share in (("once", 0.0), ("decay", 0.75), ("s-ste", 0.0)):
        schedule = PruneSchedule(kind, 4 * (kind == "decay"), gradient)
        one = layer(schedule, weight)
        schedule.step()
        one(x).sum().backward()
        whole, keep = x.sum(0).expand(64, 64), masks.make(masks.named.MASKS["magnitude"], (64, 64), weight=weight)
        wanted = whole if gradient == "straight-through" else torch.where(keep, whole, share * whole)
        if kind == "s-ste" and gradient == "sparse":
            wanted = wanted * one.scale
        torch.testing.assert_close(one.weight.grad, wanted)


def test_an_interrupted_one_leaves_the_model_and_words_that_are_none_are_refused():
    model = Model()
    before, kinds = state(model), [type(module) for module in model.modules()]
    held = [set(vars(module)) | set(module._buffers) for module in model.modules()]
    right = convert.fake

    def fails(module, *given):
        right(module, *given)
        if module is model.blocks[1].up:
            raise KeyboardInterrupt

    with mock.patch.object(convert, "fake", fails), pytest.raises(KeyboardInterrupt):
        fake_sparsify_(model, Sparse24())
    assert same(model, before) and [type(module) for module in model.modules()] == kinds
    left = [set(vars(module)) | set(module._buffers) for module in model.modules()]
    assert all(a - b <= {"out_features", "in_features"} for a, b in zip(left, held, strict=True))
    with pytest.raises(ValueError, match="'wanda' needs calibration"):
        fake_sparsify_(model, Sparse24("wanda"))
    for given, words in (
        (("gradua", 3), "did you mean 'gradual'"),
        (("decay",), "takes steps"),
        (("once", 3), "no steps"),
    ):
        with pytest.raises(ValueError, match=words):
            PruneSchedule(*given)
    with pytest.raises(ValueError, match=r"schedule is a PruneSchedule\(kind=...\), not 'gradual'"):
        fake_sparsify_(Model(), Sparse24(), schedule="gradual")
    with pytest.raises(ValueError, match="gradient 'x': allowed"):
        PruneSchedule(gradient="x")


def test_a_master_of_32_bits_trains_where_only_16_can_be_multiplied(monkeypatch):
    half = replace(BACKENDS["reference"], unsupported=lambda device, dtype: "no fp32" * (dtype.itemsize > 2))
    monkeypatch.setitem(BACKENDS, "reference", half)
    model = nn.Sequential(nn.Linear(64, 64))
    assert not fake_sparsify_(model, Sparse24(product="reference")).refused
    with pytest.raises(UnsupportedError, match="no fp32"):
        sparsify_(model, Sparse24(product="reference"))
    assert not sparsify_(model.bfloat16(), Sparse24(product="reference")).refused


@pytest.mark.parametrize("kind", ["once", "gradual", "decay", "s-ste"])
def test_a_training_that_is_resumed_goes_on_as_if_it_had_not_stopped(kind):
    def made():
        model = Model().double()
        return model, torch.optim.AdamW(model.parameters(), lr=0.01), PruneSchedule(kind, 9 * (kind[0] in "gd"))

    def trains(model, optimizer, schedule, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(TOKENS).square().mean().backward()
            optimizer.step()
            schedule.step()
        return model(TOKENS)

    model, optimizer, schedule = made()
    fake_sparsify_(model, Sparse24(), schedule=schedule)
    trains(model, optimizer, schedule, 4)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), schedule.state_dict(model)])
    file = io.BytesIO()
    torch.save(saved[2], file)
    file.seek(0)
    wanted = trains(model, optimizer, schedule, 4)
    again, optimizer, schedule = made()
    again.load_state_dict(saved[0])  # into the dense model
    fake_sparsify_(again, Sparse24(), schedule=schedule)
    optimizer.load_state_dict(saved[1])
    schedule.load_state_dict(torch.load(file), again)
    assert schedule.done == 4 and torch.equal(trains(again, optimizer, schedule, 4), wanted)


def test_the_state_of_another_schedule_or_model_is_refused_and_changes_nothing():
    model, small = Model(), nn.Sequential(nn.Linear(64, 64))
    schedules = PruneSchedule(), PruneSchedule()
    fake_sparsify_(model, Sparse24(), schedule=schedules[0])
    fake_sparsify_(small, Sparse24(), schedule=schedules[1])
    state, other, y = schedules[0].state_dict(model), schedules[1].state_dict(small), model(TOKENS)
    wide = state | {"kept": {name: kept.repeat(2, 1) for name, kept in state["kept"].items()}}
    for words, given in (
        ("it is of 's-ste', this schedule is 'once'", state | {"kind": "s-ste"}),
        ("other layers than the model's, as 0.* before the model's state is loaded", other),
        ("it is of 4 steps, this schedule of 0", state | {"steps": 4}),
        ("it is of other layers", state | {"layers": ["0"]}),
        ("another shape of mask than the model's for ", wide),
    ):
        with pytest.raises(ValueError, match=words):
            schedules[0].load_state_dict(given | {"done": 7}, model)
        assert schedules[0].done == 0 and torch.equal(model(TOKENS), y)


def test_a_copy_has_the_schedule_that_was_copied_with_it():
    schedule = PruneSchedule("decay", 4)
    fake_sparsify_(model := Model(), Sparse24(), schedule=schedule)
    model, schedule = copy.deepcopy((model, schedule))
    y = model(TOKENS)
    schedule.step()
    assert not torch.equal(model(TOKENS), y)


@pytest.mark.parametrize("gradient", ["straight-through", "sparse"])
def test_a_weight_of_zeros_is_finite_by_s_ste_and_trains(gradient):
    one = layer(PruneSchedule("s-ste", gradient=gradient), torch.zeros(64, 64))
    one(torch.ones(5, 64)).sum().backward()
    assert one.scale == 1 and not one.effective().any() and one.weight.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["once", "gradual", "decay", "s-ste"])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_transforms_of_torch_func_are_those_of_what_is_multiplied(gradient, kind):
    model, x = nn.Sequential(nn.Linear(64, 64, dtype=torch.float64)), torch.randn(2, 4, 64, dtype=torch.float64)
    plan = PruneSchedule(kind, gradient=gradient, steps=3 * (kind in ("gradual", "decay")))
    fake_sparsify_(model, Sparse24(), schedule=plan)
    held, call = {"0.weight": model[0].weight.detach()}, torch.func.functional_call
    grad, moved = torch.func.grad_and_value(lambda held: call(model, held, (x,)).square().sum())(held)
    model(x).square().sum().backward()
    torch.testing.assert_close(grad["0.weight"], model[0].weight.grad)
    plain = nn.Linear(64, 64, dtype=torch.float64)
    plain.load_state_dict({"weight": model[0].effective(), "bias": model[0].bias})
    torch.testing.assert_close(moved, plain(x).square().sum())
    torch.testing.assert_close(torch.vmap(model)(x), plain(x))
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(model)(x[0, 0]), plain.weight.detach())
    ones = {"0.weight": torch.ones_like(held["0.weight"])}
    _, found = torch.func.jvp(lambda held: call(model, held, (x,)), (held,), (ones,))
    factor = model[0]._value(held["0.weight"])[1] if gradient == "sparse" else ones["0.weight"]
    torch.testing.assert_close(found, x @ factor.t().double())


@pytest.mark.parametrize("kind", ["once", "gradual", "decay", "s-ste"])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_graph_of_it_has_its_gradient_or_is_refused_by_name(gradient, kind):
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(2, 64)
    fake_sparsify_(model, Sparse24(), schedule=PruneSchedule(kind, 3 * (kind in ("gradual", "decay")), gradient))
    graphs = torch.fx.symbolic_trace, lambda model: torch.jit.trace(model, x)
    model(x).square().sum().backward()
    for make in (*graphs, lambda model: torch.export.export(model, (x,)).module()):
        if kind in ("gradual", "decay"):
            with pytest.raises(
                UnsupportedError, match=rf"^0: FakeSparse\(.*{kind}' goes on.* what dense_\(model\) leaves"
            ):
                make(model)
            continue
        graph, other = make(copied := copy.deepcopy(model)), torch.randn(3, 64) if make in graphs else x
        for one in (graph, copied):
            one.zero_grad()
            one(other).square().sum().backward()
            found = dict(one.named_parameters())["0.weight"].grad
            torch.testing.assert_close(one(x), model(x))
            wanted = torch.autograd.grad(model(other).square().sum(), model[0].weight)[0]
            torch.testing.assert_close(found, wanted)
    with pytest.raises(UnsupportedError, match=r"torch.jit.script takes no 0: FakeSparse.* dense_\(model\)"):
        torch.jit.script(model)


def test_an_average_of_weights_that_is_made_before_the_first_pass_has_the_buffers_of_the_model():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    fake_sparsify_(model, Sparse24(), schedule=PruneSchedule("s-ste"))
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    model(torch.randn(5, 64))
    average.update_parameters(model)
    assert all(map(torch.equal, average.module.buffers(), model.buffers())) and len([*model.buffers()]) == 4


def test_the_scale_moves_with_its_layer():
    model = nn.Sequential(nn.Linear(64, 64))
    fake_sparsify_(model, Sparse24(), schedule=PruneSchedule("s-ste"))
    torch.export.export(model, (torch.randn(2, 64),), strict=False)
    assert model.double()[0].scale.dtype == torch.float64 and model.to("meta")[0].scale.is_meta
    assert model.state_dict().keys() == {"0.weight", "0.bias"}
