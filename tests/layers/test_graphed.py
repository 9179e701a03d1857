"""Captured layers give what the plain ones give, also after a change of weights; with a stand-in for CUDA graphs."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blockshock_lib.comm import Group, local
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import packing
from blockshock_lib.layers import BlockShockLinear, DenseLinear, Graphed, Linear24, graphed
from blockshock_lib.layers.graphed import Capture
from tests.layers.ranks import K, N, built, problem
from tests.layers.ranks import draw as drawn
from tests.training import said_by


class Memory:
    """Like a CUDA graph: from the memory that the layer had when it was captured, and into memory always the same."""

    made: list["Memory"] = []  # noqa: RUF012

    def __init__(self, compute, x):
        layer = compute.__self__
        self.weight, self.cols, self.group = layer.weight.detach(), layer.cols, layer.group
        self.bias = 0 if layer.bias is None else layer.bias.detach()
        self.packed = [t.detach() for t in layer.packed.data] if isinstance(layer, BlockShockLinear) else None
        self.x, self.y, self.replays, self.released = torch.full_like(x, torch.nan), None, 0, False
        Memory.made.append(self)

    def __call__(self, x):
        assert not self.released
        self.replays += 1
        self.x.view(x.shape).copy_(x)
        weight = packing.unpack(*self.packed) if self.packed else self.weight
        y = self.group.all_reduce(F.linear(self.x[:, self.cols], weight)) + self.bias
        self.y = y if self.y is None else self.y.copy_(y)
        return self.y.clone()

    def release(self):
        self.released = True

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot pickle a CUDA graph")


@pytest.fixture(autouse=True)
def captures(monkeypatch):
    """Lets layers on a CPU capture `Memory`."""
    Memory.made = []
    monkeypatch.setattr(graphed, "Capture", Memory)
    monkeypatch.setattr(graphed, "capturable", lambda x: True)


def test_a_capture_keeps_the_layer_no_longer_than_its_graph_does(monkeypatch):
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    layer = nn.Linear(K, N)
    kept, gone = Capture(layer.forward, torch.ones(1, K)), weakref.ref(layer)
    del layer
    assert gone() is None and kept.graph is not None


def layer_of(kind):
    linear = nn.Linear(K, N)
    if kind == "dense":
        return DenseLinear.from_linear(linear)
    return Linear24.from_linear(linear, mask="magnitude", update=kind)


def draw(rows, seed=1):
    return drawn(rows, K, seed=seed)


def assert_same(fast, x):
    torch.testing.assert_close(fast(x), fast.layer(x))


@pytest.fixture(params=["dense", "packed", "recompress"])
def fast(request):
    with layer_of(request.param).graphed() as made, torch.no_grad():
        yield made


def test_a_shape_is_captured_once_then_replayed_after_its_groups_last_stream_and_overwrites_no_earlier_output(
    fast, monkeypatch
):
    waits, group = [], type(fast.layer.group)
    monkeypatch.setattr(group, "wait_for_last_stream", lambda self, device: waits.append(Memory.made[0].replays))
    for seed, y in enumerate([fast(draw(4, seed)) for seed in range(3)]):
        torch.testing.assert_close(y, fast.layer(draw(4, seed)))
    assert waits == [0, 1] and [one.replays for one in Memory.made] == [2]  # what runs uncaptured waits by itself
    assert fast(draw(4).view(2, 2, K)).shape == (2, 2, N)  # as many rows, so the same graph
    assert len(Memory.made) == 1 and Memory.made[0].replays == 3


def test_an_x_with_other_strides_is_read_rightly(fast):
    wide = draw(8).repeat(1, 2)
    fast(draw(4))
    for x in (wide[:4, K:], draw(4).t().contiguous().t(), draw(1).expand(4, K), wide[:, :K].unflatten(0, (2, 4))[:, 1]):
        assert_same(fast, x)


def test_values_that_change_in_place_are_seen_without_a_new_capture(fast):
    for optimizer in (torch.optim.SGD(fast.layer.parameters(), lr=0.5), torch.optim.AdamW(fast.parameters(), lr=0.5)):
        before = fast(draw(4))
        with torch.enable_grad():
            fast.layer(draw(4)).square().mean().backward()
        optimizer.step()
        assert not torch.allclose(fast(draw(4)), before)
        assert_same(fast, draw(4))
    before = fast(draw(4))
    fast.layer.load_state_dict({name: 2 * t for name, t in fast.layer.state_dict().items()})
    torch.testing.assert_close(fast(draw(4)), 2 * before)
    assert len(Memory.made) == 1


CHANGES = {
    "data": lambda layer: setattr(layer.weight, "data", 3 * layer.weight.data),
    "weight": lambda layer: setattr(layer, "weight", nn.Parameter(3 * layer.weight.detach())),
    "bias": lambda layer: setattr(layer, "bias", nn.Parameter(layer.bias.detach() + 1)),
    "no bias": lambda layer: setattr(layer, "bias", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_storage_is_captured_anew(fast, change):
    before, _ = (fast(draw(rows)) for rows in (4, 2))
    CHANGES[change](fast.layer)
    assert not torch.allclose(fast(draw(4)), before)
    for rows in (4, 2, 4):
        assert_same(fast, draw(rows))
    old, new = Memory.made[:2], Memory.made[2:]
    assert len(new) == 2 and all(one.released for one in old) and not any(one.released for one in new)


def test_another_dtype_is_captured_anew_and_an_x_that_does_not_fit_gets_the_layers_error(fast):
    fast(draw(4))
    fast.double()
    assert_same(fast, draw(4).double())
    for x in (draw(4), draw(4)[:, :64].double(), draw(4)[0, :3].double()):
        assert said_by(fast, x, kind=Exception) == said_by(fast.layer, x, kind=Exception)
    assert [one.x.dtype for one in Memory.made] == [torch.float32, torch.float64]
    fast.to("meta")
    with contextlib.suppress(Exception):
        fast(draw(4).double())  # on another device; what the layer says, or computes
    assert len(Memory.made) == 2


def test_the_shape_unused_for_longest_goes_and_no_shape_at_all_is_refused():
    with layer_of("dense").graphed(shapes=2) as fast, torch.no_grad():
        for rows in (1, 2, 1, 3, 1):
            assert_same(fast, draw(rows))
        seen = [(len(one.x), one.replays, one.released) for one in Memory.made]
        assert seen == [(1, 2, False), (2, 0, True), (3, 0, False)]
    assert "shapes=0" in said_by(Graphed, fast.layer, 0, kind=ValueError)


def test_a_weight_that_was_packed_anew_is_captured_anew():
    with layer_of("recompress").graphed() as fast, torch.no_grad():
        before, layer = fast(draw(4)), fast.layer
        dense = 3 * layer.weight.detach()
        layer.store.packed = layer.backend.pack(dense, layer.pattern.mask())  # as a stock product does after each step
        torch.testing.assert_close(fast(draw(4)) - layer.bias, 3 * (before - layer.bias))


def test_a_weight_that_was_lent_is_used_for_that_call_alone(fast):
    own, bias = fast(draw(4)), fast.layer.bias
    lent = torch.func.functional_call(fast, {"layer.weight": 2 * fast.layer.weight.detach()}, (draw(4),))
    torch.testing.assert_close(lent - bias, 2 * (own - bias))
    torch.testing.assert_close(fast(draw(4)), own)


def plain(fast, x):
    """y of a call of which nothing was captured."""
    torch.testing.assert_close(y := fast(x), fast.layer(x))
    assert not Memory.made
    return y


def test_where_a_gradient_is_wanted_the_layer_runs(fast):
    with torch.enable_grad():
        assert plain(fast, draw(4)).requires_grad
        fast.layer.weight.requires_grad_(False)
        assert plain(fast, draw(4)).requires_grad  # for its bias
        fast.layer.bias.requires_grad_(False)
        assert plain(fast, draw(4).requires_grad_()).requires_grad
        fast(draw(4))
    assert len(Memory.made) == 1  # nothing is trained, so nothing is lost by a replay


def test_under_autocast_and_a_compiler_for_an_empty_batch_and_on_a_cpu_the_layer_runs(fast, monkeypatch):
    with torch.autocast("cpu", torch.bfloat16):
        plain(fast, draw(4))
    assert plain(fast, draw(0)).shape == (0, N)
    plain(torch.compile(fast, fullgraph=True, backend="eager"), draw(4))
    monkeypatch.undo()
    assert not graphed.capturable(draw(4))
    plain(fast, draw(4))


def test_a_copy_captures_graphs_of_its_own_and_each_frees_its_own_at_close_or_when_let_go(fast):
    fast(draw(4))
    fast.eval().__class__ = mine = type("Mine", (Graphed,), {})
    fast.register_forward_hook(lambda *_: None)
    twin = copy.deepcopy(fast)
    assert type(twin) is mine and not twin.training and twin._forward_hooks == fast._forward_hooks
    twin.layer.bias += 1
    torch.testing.assert_close(twin(draw(4)), fast(draw(4)) + 1)
    fast.close()
    assert [one.released for one in Memory.made] == [True, False]
    assert_same(twin, draw(4))
    assert_same(fast, draw(4))  # captured anew
    del twin
    gc.collect()
    assert [one.released for one in Memory.made] == [True, True, False]


@pytest.mark.parametrize("name", ["row_parallel", "block_shock", "block_shock_recompress"])
def test_ranks_that_capture_apart_reduce_the_same_calls(name):
    """Captured, replayed, trained on and, on rank 1 alone, captured anew."""
    w, bias, _, _ = problem(torch.float32)

    def rank(group):
        layer = built(name, "random", w, bias, group)
        with layer.graphed() as fast:
            for step in range(6):
                if step == 3:
                    layer(torch.ones(2, K)).square().mean().backward()
                    torch.optim.SGD(layer.parameters(), lr=0.1).step()
                if step == 5 and group.rank == 1:
                    layer.weight.data = layer.weight.data.clone()
                with torch.no_grad():
                    assert_same(fast, draw(6, step).view(2, 3, K))
        assert [one.replays for one in Memory.made if one.group is group] == ([4, 0] if group.rank else [5])

    local.run(2, rank)


def test_another_process_group_is_captured_anew_and_one_that_is_gone_is_an_error(fast):
    fast(draw(4))
    handle = nn.Module()
    fast.layer.group = Group(0, 1, weakref.ref(handle))
    assert_same(fast, draw(4))
    assert len(Memory.made) == 2
    del handle
    with pytest.raises(UnsupportedError, match="has been destroyed"):
        fast(draw(4))
