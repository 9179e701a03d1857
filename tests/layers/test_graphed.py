"""Captured layers give what the plain ones give, also after their weights changed; on a CPU with a stand-in for CUDA
graphs that computes from the memory it was captured with.
"""

import copy
import gc

import pytest
import torch
from torch import nn

from blockshock_lib import launch
from blockshock_lib.layers import DenseLinear, Graphed, Linear24, graphed
from tests.layers import graph_tasks
from tests.layers.graph_tasks import Memory

N, K = 64, 128
KINDS = ("dense", "packed", "recompress")


@pytest.fixture(autouse=True)
def captures(monkeypatch):
    graph_tasks.on_this_machine(monkeypatch)


def layer_of(kind, seed=0, **options):
    torch.manual_seed(seed)
    linear = nn.Linear(K, N)
    if kind == "dense":
        return DenseLinear.from_linear(linear, **options)
    return Linear24.from_linear(linear, mask="magnitude", update=kind, **options)


def draw(rows, seed=1):
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))


def assert_same(fast, x):
    torch.testing.assert_close(fast(x), fast.layer(x))


@pytest.fixture(params=KINDS)
def fast(request):
    with layer_of(request.param).graphed() as made, torch.no_grad():
        yield made


def test_a_shape_is_captured_once_and_then_replayed(fast):
    for seed in range(3):
        assert_same(fast, draw(4, seed))
    assert [one.replays for one in Memory.made] == [2]
    assert fast(draw(4).view(2, 2, K)).shape == (2, 2, N)  # as many rows, so the same graph
    assert len(Memory.made) == 1 and Memory.made[0].replays == 3


def test_an_output_is_not_overwritten_by_the_next_call(fast):
    fast(draw(4, 0))
    first = fast(draw(4, 1))
    kept = first.clone()
    fast(draw(4, 2))
    assert torch.equal(first, kept)


def test_a_call_multiplies_once_also_when_it_captures(fast, monkeypatch):
    calls, own = [], type(fast.layer).multiply
    monkeypatch.setattr(type(fast.layer), "multiply", lambda self, x: calls.append(1) or own(self, x))
    fast(draw(4))
    assert calls == [1]


def test_a_replay_waits_for_its_turn_in_the_groups_workspace(fast, monkeypatch):
    turns = []
    monkeypatch.setattr(type(fast.layer.group), "take_turn", lambda self, device: turns.append(Memory.made[0].replays))
    for seed in range(3):
        fast(draw(4, seed))
    assert turns == [0, 1]  # before each replay; what runs uncaptured does so by itself


def test_an_x_with_other_strides_is_read_rightly(fast):
    wide = draw(8).repeat(1, 2)
    fast(draw(4))
    for x in (wide[:4, K:], draw(4).t().contiguous().t(), draw(1).expand(4, K), wide[:, :K].unflatten(0, (2, 4))[:, 1]):
        assert_same(fast, x)


def test_an_optimizers_step_is_seen_without_a_new_capture(fast):
    assert_same(fast, draw(4))
    for optimizer in (torch.optim.SGD(fast.layer.parameters(), lr=0.5), torch.optim.AdamW(fast.parameters(), lr=0.5)):
        before = fast(draw(4))
        with torch.enable_grad():
            fast.layer(draw(4)).square().mean().backward()
        optimizer.step()
        assert not torch.allclose(fast(draw(4)), before)
        assert_same(fast, draw(4))
    assert len(Memory.made) == 1


def test_loaded_values_are_seen_without_a_new_capture(fast):
    before = fast(draw(4))
    fast.layer.load_state_dict({name: 2 * t for name, t in fast.layer.state_dict().items()})
    torch.testing.assert_close(fast(draw(4)), 2 * before)
    assert len(Memory.made) == 1


def replace_data(layer):
    layer.weight.data = 3 * layer.weight.data


def replace_weight(layer):
    layer.weight = nn.Parameter(3 * layer.weight.detach())


def replace_bias(layer):
    layer.bias = nn.Parameter(layer.bias.detach() + 1)


def drop_bias(layer):
    layer.bias = None


@pytest.mark.parametrize("change", [replace_data, replace_weight, replace_bias, drop_bias])
def test_other_storage_is_captured_anew(fast, change):
    for rows in (4, 2):
        fast(draw(rows))
    before = fast(draw(4))
    change(fast.layer)
    assert not torch.allclose(fast(draw(4)), before)
    for rows in (4, 2, 4):
        assert_same(fast, draw(rows))
    old, new = Memory.made[:2], Memory.made[2:]
    assert len(new) == 2 and all(one.released for one in old) and not any(one.released for one in new)


def test_a_weight_that_was_packed_anew_is_captured_anew():
    with layer_of("recompress").graphed() as fast, torch.no_grad():
        before, b = fast(draw(4)), fast.layer.bias
        keep, dense = fast.layer.pattern.mask(), 3 * fast.layer.weight.detach()
        fast.layer.packed = fast.layer.backend.pack(dense, keep)  # as a stock product does after each step
        torch.testing.assert_close(fast(draw(4)) - b, 3 * (before - b))


def test_another_dtype_is_captured_anew(fast):
    fast(draw(4))
    fast.double()
    for seed in range(2):
        assert_same(fast, draw(4, seed).double())
    assert [one.x.dtype for one in Memory.made] == [torch.float32, torch.float64]


def test_a_weight_that_was_lent_is_used_for_that_call_alone(fast):
    own = fast(draw(4))
    lent = torch.func.functional_call(fast, {"layer.weight": 2 * fast.layer.weight.detach()}, (draw(4),))
    torch.testing.assert_close(lent - (b := fast.layer.bias), 2 * (own - b))
    torch.testing.assert_close(fast(draw(4)), own)


def test_the_shape_unused_for_longest_goes():
    with layer_of("dense").graphed(shapes=2) as fast, torch.no_grad():
        for rows in (1, 2, 1, 3):
            assert_same(fast, draw(rows))
        assert [(len(one.x), one.released) for one in Memory.made] == [(1, False), (2, True), (3, False)]
        assert_same(fast, draw(1))
        assert len(Memory.made) == 3


def test_no_shape_at_all_is_refused():
    with pytest.raises(ValueError, match="shapes=0"):
        Graphed(layer_of("dense"), shapes=0)


def plain(fast, x):
    y = fast(x)
    torch.testing.assert_close(y, fast.layer(x))
    assert not Memory.made
    return y


def test_where_a_gradient_is_wanted_the_layer_runs(fast):
    with torch.enable_grad():
        plain(fast, draw(4)).sum().backward()
        assert fast.layer.weight.grad.abs().sum() > 0
        fast.layer.weight.requires_grad_(False)
        assert plain(fast, draw(4)).requires_grad  # for its bias
        fast.layer.bias.requires_grad_(False)
        assert plain(fast, draw(4).requires_grad_()).requires_grad
        fast(draw(4))
    assert len(Memory.made) == 1  # nothing is trained, so nothing is lost by a replay


def test_under_autocast_the_layer_runs(fast):
    with torch.autocast("cpu", torch.bfloat16):
        plain(fast, draw(4))


def test_an_empty_batch_is_the_layers(fast):
    assert plain(fast, draw(0)).shape == (0, N)


@pytest.mark.parametrize(
    ("x", "said"), [(draw(4).double(), "x is torch.float64"), (draw(4)[:, :64], "64 features"), (draw(4)[0, :3], "3 f")]
)
def test_an_x_that_does_not_fit_gets_the_layers_error(fast, x, said):
    with pytest.raises(ValueError, match=said):
        fast(x)


def test_a_compiled_model_runs_the_layer(fast):
    compiled = torch.compile(fast, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(draw(4)), fast.layer(draw(4)))
    assert not Memory.made


def test_on_a_cpu_nothing_is_captured(monkeypatch, fast):
    monkeypatch.undo()
    assert not graphed.capturable(draw(4))
    plain(fast, draw(4))


def test_graphs_are_freed_by_close_and_by_letting_go(fast):
    fast(draw(4))
    fast.close()
    assert Memory.made[0].released
    assert_same(fast, draw(4))  # captured anew
    other = layer_of("dense").graphed()
    other(draw(4))
    del other
    gc.collect()
    assert [one.released for one in Memory.made] == [True, False, True]


def test_a_copy_captures_graphs_of_its_own(fast):
    fast(draw(4))
    twin = copy.deepcopy(fast)
    with torch.no_grad():
        twin.layer.bias += 1
    torch.testing.assert_close(twin(draw(4)), fast(draw(4)) + 1)
    assert len(Memory.made) == 2
    fast.close()
    assert [one.released for one in Memory.made] == [True, False]
    assert_same(twin, draw(4))
    twin.close()


def test_ranks_that_capture_apart_still_reduce_the_same_calls(tmp_path):
    cases = [("row_parallel", "checkerboard", {}), ("block_shock", "random", {})]
    cases += [("block_shock", "checkerboard", {"update": "recompress"})]
    assert launch.call(graph_tasks.alike, cases, processes=2, logs=tmp_path, seconds=60) == [[], []]


def test_another_process_group_is_captured_anew_and_a_destroyed_one_refused(tmp_path):
    for captures, said in launch.call(graph_tasks.destroyed, processes=2, logs=tmp_path, seconds=60):
        assert captures == 2
        assert said.startswith("UnsupportedError") and "has been destroyed" in said
