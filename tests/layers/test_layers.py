"""Each method's layer: its product and gradients, also compiled, under autocast or without a row, and how it trains."""

import copy
from itertools import product
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blockshock_lib.comm import Group, local
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.patterns import dense as products
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.layers import BlockShockLinear, DenseLinear, PermutedDenseLinear, ShardedLinear
from blockshock_lib.studies.linear.folded import orders
from blockshock_lib.studies.linear.methods import METHODS
from tests.cases import MASKS
from tests.layers.ranks import CASES, RUNNABLE, B, K, N, Threads, built, draw, in_process, problem
from tests.processes import call

CPU, BF16, F64 = torch.device("cpu"), torch.bfloat16, torch.float64
cases = pytest.mark.parametrize(("name", "mask", "changes"), CASES, ids=str)
FEW = [case for case in CASES if case[0] == "column_parallel" or case[:2] == ("block_shock", "checkerboard")]
WORLDS = [
    (name, mask, world)
    for name in [*RUNNABLE, "folded_dense"]
    for mask in (MASKS if METHODS[name].split == "terms" else MASKS[:1])
    for world in (2, 4, 8)
    if Mask.named(mask).periodic or not METHODS[name].periodic_only
]


def inputs():
    """W, b, x, dy in float64, in which rounding cannot hide a missing or doubled term."""
    return tuple(draw(*shape, dtype=F64) for shape in ((128, 256), (128,), (12, 256), (12, 128)))


def shared(name, mask, world):
    """The ranks' layers of the weight and bias of `inputs`."""
    w, bias, *_ = inputs()
    bias = bias[orders(Mask.named(mask), *w.shape)[0]] if METHODS[name].folded else bias
    return Threads(lambda group: built(name, mask, w, bias, group), world)


def assert_dense(model, name, mask):
    """y and all gradients are a dense layer's, in the order in which the method is given x and leaves y."""
    w, bias, x, dy = inputs()
    rows, cols = orders(Mask.named(mask), *w.shape) if METHODS[name].folded else [slice(None)] * 2
    y, dx = model.passes(x[:, cols], dy[:, rows])
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(y, (x @ w.T + bias)[:, rows], **close)
    torch.testing.assert_close(dx, (dy @ w)[:, cols], **close)
    torch.testing.assert_close(model.dense(lambda layer: layer.weight.grad), dy.T @ x, **close)
    torch.testing.assert_close(model.layers[0].bias.grad, dy.sum(0)[rows], **close)


@pytest.mark.parametrize(("name", "mask", "world"), WORLDS)
def test_product_and_gradients_are_those_of_a_dense_layer(name, mask, world):
    model = shared(name, mask, world)
    for by, form in product(model.layers[0].wgrad_strategies(), model.layers[0].forms or ["classes"]):
        for layer in model.layers:
            layer.dw, layer.form = by, form
            layer.zero_grad()
        assert_dense(model, name, mask)
        assert all(weight.grad.shape == weight.shape for weight in model.weights)
    if model.layers[0].uses_mask:  # holes of the mask get no gradient
        for layer in model.layers:
            held = layer.part_dense(layer.from_dense(torch.ones(128, 256, dtype=F64)))
            assert not layer.part_dense(layer.weight.grad)[held == 0].any()


def test_what_a_layer_cannot_do_is_refused_with_a_reason():
    w, x = draw(64, 64), draw(1, 64)
    with pytest.raises(UnsupportedError, match=r"even number of ranks, not 1: start them with torchrun .* Linear24"):
        BlockShockLinear(w, mask=Mask.named("checkerboard"), group=Group())
    with pytest.raises(ValueError, match="x has 32 features, the layer 64"):
        DenseLinear(w)(x[:, :32])
    with torch.no_grad(), pytest.raises(ValueError, match=r"nested tensor.*enable_nested_tensor=False"):
        DenseLinear(w)(torch.nested.nested_tensor([x, x], layout=torch.jagged))
    with pytest.raises(ValueError, match="give mask="):
        BlockShockLinear(w, group=Group(0, 2))
    d = PermutedDenseLinear(w, mask=Mask.named("checkerboard"), group=Group(0, 2))
    with pytest.raises(ValueError, match="form 'bathced' is not allowed; allowed: classes, batched, transposed"):
        d.form = "bathced"
    with pytest.raises(UnsupportedError, match="rank 1 stands by"):
        DenseLinear(w, group=Group(1, 2))(x)
    with pytest.raises(NotImplementedError, match="Mine must say which part"):
        type("Mine", (ShardedLinear,), {})(w, group=Group(0, 2))
    reason = PermutedDenseLinear.unsupported(Mask.named("random"), CPU, BF16)
    assert "not periodic" in reason and "random" in reason
    assert BlockShockLinear.unsupported(Mask.named("checkerboard"), CPU, BF16, product="torch")


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("dense", "block_shock_torch")])
def test_each_dense_product_is_made_in_the_way_that_a_search_found_for_its_shape(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda name=None: "default")
    monkeypatch.setattr(products, "fastest", lambda x, weight: products.Way("cublaslt", 1))
    taken, right = [], products.multiplied
    monkeypatch.setattr(products, "multiplied", lambda way, *args: taken.append(way) or right(way, *args))
    _, _, x, dy = inputs()
    model = shared(name, "checkerboard", 2)
    for layer in model.layers:
        layer.tune(x)
        layer.tune_dgrad(dy)
        layer.tune_wgrad(dy, x)
    for by in model.layers[0].wgrad_strategies():
        for layer in model.layers:
            layer.dw, layer.weight.grad, layer.bias.grad, taken[:] = by, None, None, []
        assert_dense(model, name, "checkerboard")
        assert taken and None not in taken


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("asked", [True, False, None])
@pytest.mark.parametrize("name", ["row_parallel", "block_shock"])
def test_dx_is_waited_for_after_dw_or_before_it_as_asked_or_as_the_layer_says(name, asked, overlap, monkeypatch):
    layer, pieces = built(name, "checkerboard", draw(128, 64), None, Group(0, 2), overlap=overlap), mock.MagicMock()
    for piece in ("start_dgrad", "local_wgrad", "finish_wgrad"):
        monkeypatch.setattr(layer, piece, getattr(pieces, piece))
    layer.backward(torch.ones(8, 128), torch.ones(8, 64), overlap=asked)
    beside = overlap if asked is None else asked
    order, arrives = [call[0] for call in pieces.mock_calls], "start_dgrad().wait"
    assert order.index(arrives) == (3 if beside else 1) and order[0] == "start_dgrad"


class Block(nn.Module):
    """As in a GPT: a norm in float32, then two sharded layers in a dtype of their own."""

    def __init__(self, group, name, mask, dtype=torch.float32, **changes):
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.up = built(name, mask, draw(N, K, dtype=dtype) * K**-0.5, torch.ones(N, dtype=dtype), group, **changes)
        self.down = built(name, mask, draw(K, N, dtype=dtype) * N**-0.5, None, group, **changes)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def passes(model, run, x):
    """y of `run`, and the gradients of x and of the model."""
    model.zero_grad()
    y = run(x := x.clone().requires_grad_())
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters())]


def compiled(model, backend):
    return torch.compile(model, fullgraph=True, backend=backend) if backend else model


def trains_compiled(group, cases, backend):
    """Three steps of a compiled block give the values and gradients of the same block eagerly."""
    for name, mask, changes in cases:
        eager = Block(group, name, mask, **changes)
        model = copy.deepcopy(eager)
        assert model.up.handle != eager.up.handle  # by which the compiled operator finds it, also without the original
        fast = compiled(model, backend)
        for step in range(3):
            x, found = draw(2, B, K, seed=step), []
            for one, run in ((eager, eager), (model, fast)):
                found.append(passes(one, run, x))
                torch.optim.SGD(one.parameters(), lr=1e-4).step()
            for a, b in zip(*found, strict=True):
                assert torch.allclose(a, b, rtol=1e-5, atol=1e-4) and a.abs().max() > 1e-2, (name, mask, changes, step)
        torch._dynamo.reset()


def under_autocast(group, cases, backend=""):
    """Under autocast a model gives what its layers give on x cast by hand, bit for bit, or nearly where a compiler
    fused what stands between the layers.
    """
    for name, mask, changes in cases:
        for dtype in (BF16, torch.float32):
            model, x, close = Block(group, name, mask, dtype, **changes), draw(2, 4, K), 2e-2 if backend else 0
            with torch.autocast("cpu", dtype=BF16):
                found = passes(model, compiled(model, backend), x)
            wanted = passes(model, lambda x, m=model: x + m.down(F.gelu(m.up(m.norm(x).to(m.up.weight.dtype)))), x)
            for a, b in zip(found, wanted, strict=True):
                assert a.dtype == b.dtype and (size := b.abs().max().item()) > 0
                assert torch.allclose(a.float(), b.float(), rtol=close, atol=close * size), (name, mask, changes, dtype)
            torch._dynamo.reset()


def takes_empty_batches(group, cases, backend=""):
    """Batches without a row give what nn.Linear gives, and the layer computes as before afterwards."""
    for name, mask, changes in cases:
        w, bias, _, _ = problem()
        model, linear = built(name, mask, w, bias, group, **changes), nn.Linear(K, N, dtype=F64)
        run = compiled(model, backend)
        linear.load_state_dict({"weight": w, "bias": bias})
        for shape in ((0, K), (2, 0, K), (3, K)):
            found, wanted = (passes(*one, torch.ones(shape, dtype=F64)) for one in ((model, run), (linear, linear)))
            found[2] = model.to_dense(found[2])
            for a, b in zip(found, wanted, strict=True):
                assert a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            assert run(torch.ones(0, K, dtype=F64)).shape == (0, N)
        torch._dynamo.reset()


@pytest.mark.parametrize("fn", [under_autocast, takes_empty_batches])
@cases
def test_eagerly_a_layer_takes_autocast_and_empty_batches(fn, name, mask, changes):
    local.run(2, lambda group: fn(group, [(name, mask, changes)]))


@pytest.mark.long
@pytest.mark.parametrize(("fn", "asked"), [(under_autocast, FEW), (takes_empty_batches, FEW), (trains_compiled, CASES)])
def test_between_processes_a_compiled_model_does_as_the_eager_one(fn, asked, pair):
    pair.call(in_process, fn, asked, "aot_eager", seconds=900)


@pytest.mark.long
def test_inductor_trains_as_eager_also_where_a_graph_on_disk_had_another_layer_by_that_handle(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "graphs"))
    for name in ("row_parallel", "block_shock"):  # in fresh processes, so that handles begin anew
        work = (in_process, trains_compiled, [(name, "checkerboard", {})], "inductor")
        call(*work, processes=2, logs=tmp_path, seconds=600)


@pytest.mark.parametrize("name", RUNNABLE)
def test_x_of_another_dtype_is_refused_outside_autocast_and_both_are_named(name):
    layer = built(name, "checkerboard", draw(N, K, dtype=BF16), None, Group(0, 2))
    with pytest.raises(ValueError, match=r"x is torch\.float32, the layer torch\.bfloat16"):
        layer(torch.randn(3, K))
    with torch.autocast("cpu"), pytest.raises(ValueError, match=r"x is torch\.int64"):
        layer(torch.ones(3, K, dtype=torch.int64))


@pytest.mark.parametrize(("name", "mask", "changes"), [("dense", "checkerboard", {}), *CASES], ids=str)
def test_the_dense_view_is_saved_loaded_and_made_a_plain_layer_bit_for_bit_also_by_a_rank_that_stands_by(
    name, mask, changes
):
    w, bias, x, _ = problem(BF16)
    w[0, :4] = torch.tensor([-0.0, 0.0, float("nan"), float("inf")])
    other = draw(N, K, seed=9, dtype=BF16)

    def rank(group):
        layer, fresh = (built(name, mask, weight, bias, group, **changes) for weight in (w, other))
        saved, plain = layer.state_dict(), layer.to_linear()
        assert saved.keys() == {"weight", "bias"} and type(plain) is nn.Linear and torch.equal(plain.bias, bias)
        for whole in (saved["weight"], plain.weight):
            assert torch.equal(whole.view(torch.int16), w.view(torch.int16))
        if layer.active:
            passes(layer, layer, x)  # makes its copies, which follow what is loaded
        layer.load_state_dict({"weight": other, "bias": bias})
        with mock.patch.object(layer, "refresh") as again:
            assert torch.equal(layer.to_dense(), other) and not again.called
        found = [passes(one, one, x) for one in (layer, fresh) if layer.active]
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    local.run(2, rank)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mask", ["checkerboard", "random", "magnitude"])
def test_a_masked_dense_layer_masks_what_is_loaded_written_or_trained_then(mask, frozen):
    w, _, x, dy = problem()

    def rank(group):
        layer, other = built("masked_dense", mask, w, None, group, frozen=frozen), draw(N, K, seed=9, dtype=F64)
        layer.load_state_dict({"weight": other})
        torch.testing.assert_close(layer(x), x @ other.T)
        for write in (lambda weight: weight.fill_(1), lambda weight: weight.data.fill_(1)):
            for look in (
                lambda: torch.testing.assert_close(layer(x), x.sum(1, keepdim=True).expand(-1, N)),
                layer.to_dense,
            ):
                with torch.no_grad():
                    write(layer.weight)
                look()
            assert torch.equal(layer.to_dense(), torch.ones(N, K, dtype=F64))
        layer = copy.deepcopy(layer).requires_grad_()
        layer(x).backward(dy)
        torch.testing.assert_close(layer.to_dense(layer.weight.grad), dy.T @ x)
        full = {"weight": torch.ones_like(layer.weight)}
        with pytest.raises(UnsupportedError, match=r"MaskedDenseLinear.* was lent a weight with more than its mask"):
            torch.func.functional_call(layer, full, x)

    local.run(2, rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_that_does_not_fit_is_refused_also_where_a_rank_stands_by(rank):
    layer = DenseLinear(draw(64, 32), group=Group(rank, 2))
    for words, state in (('Missing.*"weight"', {}), (r"weight could not be .* \[64, 32\]", {"weight": draw(32, 64)})):
        with pytest.raises(RuntimeError, match=words):
            layer.load_state_dict(state)
