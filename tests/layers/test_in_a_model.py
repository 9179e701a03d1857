"""A layer in one process in all that torch does with modules: right as the dense layer is, or refused by name."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from blockshock_lib.comm import Group, local
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import BlockShockLinear, Linear24, RowParallelLinear
from blockshock_lib.ranks import call
from tests.layers.ranks import CASES, B, K, N, built, draw, in_process

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


def step(model, optimizer, run=None, seed=0):
    optimizer.zero_grad()
    x = draw(B, K, seed=seed)
    (run or model)(x).square().mean().backward()
    optimizer.step()


def trained(models, run=lambda model: model):
    """Three steps of each by `run`, which may call the model as it likes."""
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for seed in range(3):
            step(model, optimizer, run(model), seed)


# Made of what


class Conv1D(nn.Module):
    """As in transformers: the weight is [K, N]."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(K, K))


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("Linear24.* packed or sharded already.*to_linear", lambda: pruned()[0]),
        ("RowParallelLinear.* packed or sharded", lambda: RowParallelLinear(draw(N, N), group=Group())),
        (r"Conv1D.* \[K, N\].*weight.t\(\)", Conv1D),
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


@pytest.mark.parametrize(("name", "mask", "changes"), CASES, ids=str)
def test_a_sharded_layer_gives_a_plain_one_on_every_rank(name, mask, changes):
    w, bias, x = draw(N, K), draw(N), draw(B, K)

    def rank(group):
        plain = built(name, mask, w, bias, group, **changes).to_linear()
        assert type(plain) is nn.Linear and torch.equal(plain.weight, w) and torch.equal(plain.bias, bias)
        return plain(x)

    torch.testing.assert_close(local.run(2, rank)[1], x @ w.t() + bias)


def test_a_rank_that_stands_by_gives_the_plain_layer_too():
    w = draw(N, K)
    plain = local.run(2, lambda group: built("dense", "checkerboard", w, None, group).to_linear().weight)
    assert torch.equal(plain[0], w) and torch.equal(plain[1], w)


# Called how


def encoder(kind, padded, make):
    """An encoder's y in eval mode, its linears converted or not."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 2, K, batch_first=True)
    wanted = nn.TransformerEncoder(copy.deepcopy(model), 1, enable_nested_tensor=False) if padded else model
    wanted = wanted.eval()
    pad = torch.arange(6).expand(3, 6) > 3 if padded else None
    x = draw(3, 6, 64)
    with torch.no_grad():
        truth = wanted(x, src_key_padding_mask=pad)
        for name in ("linear1", "linear2"):
            setattr(model, name, make(getattr(model, name)))
        fast = nn.TransformerEncoder(model, 1, enable_nested_tensor=False) if padded else model
        return fast.eval()(x, src_key_padding_mask=pad), truth


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "mask", "changes"), CASES, ids=str)
def test_an_encoder_in_eval_mode_calls_the_layer_and_never_reads_its_weight(name, mask, changes, padded):
    def rank(group):
        def make(linear):
            return built(name, mask, linear.weight.detach(), linear.bias.detach(), group, **changes)

        y, truth = encoder(name, padded, make)
        torch.testing.assert_close(y[:, :4], truth[:, :4])

    local.run(2, rank)


@updates
def test_an_encoder_in_eval_mode_calls_a_pruned_layer_and_refuses_its_own_nested_tensors(options):
    y, _ = encoder("", False, lambda linear: Linear24.from_linear(linear, mask="random", **options))
    truth, _ = encoder("", False, lambda linear: Linear24.from_linear(linear, mask="random").to_linear())
    torch.testing.assert_close(y, truth)
    with torch.no_grad(), pytest.raises(ValueError, match=r"nested tensor.*enable_nested_tensor=False"):
        pruned(**options)[0](torch.nested.nested_tensor([draw(2, K), draw(3, K)], layout=torch.jagged))


@updates
def test_used_twice_checkpointed_and_with_accumulated_gradients_it_trains_as_the_dense_layer(options):
    def run(model):
        def called(x):
            y = checkpoint(model, x, use_reentrant=False) + checkpoint(model, 2 * x, use_reentrant=True) + model(x + 1)
            y.square().mean().backward(retain_graph=True)  # one gradient more
            return y

        return called

    models = pruned(**options)
    trained(models[1:] if options.get("frozen") else models, run)
    if options.get("frozen"):
        run(models[0])(draw(B, K).requires_grad_())
        models = pruned(**options)
    same(*models)


@pytest.mark.parametrize("options", UPDATES[:2], ids=str)
def test_averaged_weights_swapped_in_by_their_data_and_back_are_those_of_the_dense_layer(options):
    models, averages = pruned(**options), []
    for model in models:
        optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1), [p.detach().clone() for p in model.parameters()]
        for seed in range(2):
            step(model, optimizer, seed=seed)
            for average, p in zip(kept, model.parameters(), strict=True):
                average.lerp_(p.detach(), 0.5)
        own = [p.data for p in model.parameters()]
        for p, average in zip(model.parameters(), kept, strict=True):
            p.data = average
        averages.append((model(draw(B, K)), copy.deepcopy(model)))
        for p, data in zip(model.parameters(), own, strict=True):
            p.data = data
        step(model, optimizer, seed=3)
    torch.testing.assert_close(averages[0][0], averages[1][0])
    averages[1][1].weight._backward_hooks = None
    same(averages[0][1], averages[1][1])
    same(*models)
    average = torch.optim.swa_utils.AveragedModel(models[0], avg_fn=lambda old, new, n: new)
    trained(models)
    average.update_parameters(models[0])
    same(average.module, models[1])


@updates
def test_functional_call_and_torch_func_give_what_the_dense_layer_gives_or_are_refused(options):
    (layer, plain), x = pruned(torch.float64, **options), draw(3, B, K, dtype=torch.float64)
    other = {"weight": layer.weight.detach() * 2, "bias": layer.bias.detach() + 1}
    wanted = {"weight": plain.weight.detach() * 2, "bias": plain.bias.detach() + 1}
    torch.testing.assert_close(functional_call(layer, other, (x,)), functional_call(plain, wanted, (x,)))

    torch.testing.assert_close(vmap(layer, in_dims=1, out_dims=1)(x), plain(x))
    with torch.no_grad():
        torch.testing.assert_close(vmap(vmap(layer))(x), plain(x))
    mine, plains = x.clone().requires_grad_(), x.clone().requires_grad_()
    vmap(layer)(mine).square().sum().backward()
    y = layer(mine)
    vmap(plain)(plains).square().sum().backward()
    torch.testing.assert_close(mine.grad, plains.grad)
    for refused in (
        lambda: grad(lambda x: layer(x).sum())(x),
        lambda: grad(lambda x: vmap(layer)(x).sum())(x),
        lambda: vmap(grad(lambda x: layer(x).sum()))(x),
        lambda: jvp(layer, (x,), (x,)),
        lambda: grad(lambda weights: functional_call(layer, weights, (x,)).sum())(other),
        lambda: vmap(lambda dy: torch.autograd.grad(y, mine, dy)[0])(torch.ones(2, *y.shape, dtype=y.dtype)),
        lambda: vmap(lambda w: functional_call(layer, {"weight": w}, (x,)))(
            layer.weight.expand(2, *layer.weight.shape)
        ),
    ):
        with pytest.raises(UnsupportedError, match=r"(vmap cannot map over|torch.func).*to_linear"):
            refused()
    same(layer, plain)


# Kept how


def through(how, layer):
    if how == "pickle":
        return pickle.loads(pickle.dumps(layer))
    if how == "copy":
        return copy.deepcopy(layer)
    torch.save(layer, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", ["pickle", "save", "copy"])
@updates
def test_a_pruned_layer_is_pickled_saved_and_copied_whole_before_and_after_training(options, how):
    layer, plain = pruned(**options)
    for train in (not options.get("frozen"), False):
        again = through(how, layer)
        assert again.handle != layer.handle and again.exported_handle != layer.exported_handle
        same(again, plain)
        if train:
            before = layer.to_dense()
            trained((again, layer, plain))
            assert not torch.equal(layer.to_dense(), before)
            same(again, plain)


def cannot_be_pickled(group):
    layer = built("block_shock", "random", draw(N, K), None, group)
    assert torch.equal(copy.deepcopy(layer)(draw(B, K)), layer(draw(B, K)))
    try:
        pickle.dumps(nn.Sequential(layer))
    except UnsupportedError as error:
        return str(error)


def test_a_layer_that_ranks_share_says_how_it_is_saved(pair):
    for said in pair.call(in_process, cannot_be_pickled, seconds=60):
        assert "state_dict()" in said and "blockshock_lib.checkpoint.save" in said


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


def exports(ctx, path):
    layer, _ = pruned(seed=1)
    x = draw(B, K)
    program = torch.export.export(nn.Sequential(layer), (x,), strict=False)
    torch.testing.assert_close(program.module()(x), layer(x))
    torch.export.save(program, path)


def imports(ctx, path):
    others, x = [pruned(seed=seed)[0] for seed in range(2, 6)], draw(B, K)
    try:
        torch.export.load(path).module()(x)
    except UnsupportedError as error:
        return str(error), len(others)


def test_an_exported_layer_is_right_in_its_process_and_refused_in_another(tmp_path):
    call(exports, tmp_path / "program.pt2", processes=1, logs=tmp_path, seconds=100)
    (said, _), *_ = call(imports, tmp_path / "program.pt2", processes=1, logs=tmp_path, seconds=100)
    assert "lives in another process" in said and "to_linear()" in said
