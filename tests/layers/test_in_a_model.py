"""A layer in one process in all that torch does with modules: right as the dense layer is, or refused by name."""

import copy
import io

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from blockshock_lib.comm import Group, local
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import BlockShockLinear, Linear24, RowParallelLinear
from tests.layers.ranks import CASES, B, K, N, built, draw

UPDATES = ({"update": "packed"}, {"update": "recompress"}, {"frozen": True})
updates = pytest.mark.parametrize("options", UPDATES, ids=str)


def pruned(dtype=torch.float32, seed=0, **options):
    """A Linear24, and the dense layer that it is, whose gradient keeps to the mask."""
    torch.manual_seed(seed)
    layer = Linear24.from_linear(nn.Linear(K, N, dtype=dtype), mask="transposable_random", **options)
    plain = layer.to_linear()
    keep = layer.pattern.mask()
    plain.weight.register_hook(lambda grad: grad * keep)
    return layer, plain


def same(layer, plain, x=None):
    """y, dX, weight and bias are the dense layer's."""
    x = draw(B, K, dtype=plain.weight.dtype) if x is None else x
    found = []
    for one in (layer, plain):
        mine = x.clone().requires_grad_()
        y = one(mine)
        found.append((y, torch.autograd.grad(y.square().sum(), mine)[0]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(layer.state_dict(), plain.state_dict())


# Made of what


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("Linear24.* packed or sharded already.*to_linear", lambda: pruned()[0]),
        ("RowParallelLinear.* packed or sharded", lambda: RowParallelLinear(draw(N, N), group=Group())),
        ("MultiheadAttention reads", lambda: nn.MultiheadAttention(K, 2).out_proj),
        ("own forward", lambda: Scaled(K, K)),
        ("only an nn.Linear", lambda: nn.Bilinear(K, K, K)),
        ("UninitializedParameter", lambda: nn.LazyLinear(N)),
        ("meta device", lambda: nn.Linear(K, K, device="meta")),
    ],
)
@pytest.mark.parametrize("kind", [Linear24, BlockShockLinear, RowParallelLinear])
def test_a_layer_is_made_of_a_plain_linear_alone_and_what_else_is_given_is_named(kind, words, make):
    with pytest.raises(UnsupportedError, match=words):
        kind.from_linear(make(), mask="random")


@updates
def test_a_weight_that_is_tied_later_is_refused_and_not_pruned(options):
    (layer, _), embedding = pruned(**options), nn.Embedding(N, K)
    before = embedding.weight.detach().clone()
    with pytest.raises(UnsupportedError, match=r"cannot be tied.*load_dense"):
        layer.weight = embedding.weight
    layer(draw(B, K))
    assert torch.equal(embedding.weight, before)
    layer.weight = nn.Parameter(2 * layer.weight.detach())
    torch.testing.assert_close(layer(draw(B, K)), layer.to_linear()(draw(B, K)))


def test_a_fake_weight_is_refused():
    with FakeTensorMode():
        linear = nn.Linear(K, N)
        with pytest.raises(UnsupportedError, match="FakeTensor"):
            Linear24.from_linear(linear, mask="random")


@pytest.mark.parametrize(("name", "mask", "changes"), [("dense", "checkerboard", {}), *CASES], ids=str)
def test_a_sharded_layer_gives_a_plain_one_on_every_rank_also_on_one_that_stands_by(name, mask, changes):
    w, bias = draw(N, K), draw(N)

    def rank(group):
        plain = built(name, mask, w, bias, group, **changes).to_linear()
        assert type(plain) is nn.Linear and torch.equal(plain.weight, w) and torch.equal(plain.bias, bias)

    local.run(2, rank)


# Kept how


@updates
def test_a_pruned_layer_is_saved_and_copied_whole_and_each_trains_on_its_own(options):
    layer, plain = pruned(**options)
    torch.save(layer, file := io.BytesIO())
    file.seek(0)
    for again in (torch.load(file, weights_only=False), copy.deepcopy(layer)):
        assert again.handle != layer.handle
        same(again, plain)
        with torch.no_grad():
            again.weight.add_(1)
        same(layer, plain)


@updates
def test_a_write_through_data_is_seen_and_nested_tensors_are_refused(options):
    layer, plain = pruned(**options)
    same(layer, plain)
    for one in (layer, plain):
        one.weight.data.mul_(2)
        one(draw(B, K))
        one.weight.data.mul_(2)
    same(layer, plain)
    with torch.no_grad(), pytest.raises(ValueError, match=r"nested tensor.*enable_nested_tensor=False"):
        layer(torch.nested.nested_tensor([draw(2, K), draw(3, K)], layout=torch.jagged))


@updates
def test_torch_may_swap_its_parameters(options):
    layer, plain = pruned(**options)
    same(layer, plain)
    swapping = torch.__future__.set_swap_module_params_on_conversion
    swapping(True)
    try:
        layer.double(), plain.double()
    finally:
        swapping(False)
    same(layer, plain)
    other = nn.Parameter(layer.weight.detach() * 3, requires_grad=layer.weight.requires_grad)
    torch.utils.swap_tensors(layer.weight, other)
    with torch.no_grad():
        plain.weight.mul_(3)
    same(layer, plain)


@updates
def test_hooks_run_before_a_state_is_loaded_and_an_assigned_state_brings_its_dtype(options):
    layer, plain = pruned(**options)
    for module in (layer, plain):
        module.register_load_state_dict_pre_hook(
            lambda module, state, *_: (
                state.update(weight=state.pop("old.weight") * 2) if "old.weight" in state else None
            )
        )
    old = {"old.weight": plain.weight.detach(), "bias": plain.bias.detach()}
    for module in (layer, plain):
        module.load_state_dict(dict(old))
    same(layer, plain)
    state = {name: value.detach().double() for name, value in plain.state_dict().items()}
    for module in (layer, plain):
        module.load_state_dict(state, assign=True)
        assert module.weight.dtype == module.bias.dtype == torch.float64
    assert layer.weight.requires_grad != options.get("frozen", False)
    layer.load_state_dict(state)
    torch.testing.assert_close(layer(draw(B, K, dtype=torch.float64)), plain(draw(B, K, dtype=torch.float64)))
