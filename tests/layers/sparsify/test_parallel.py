"""What torch's tensor parallelism split over ranks is packed part by part, and is the whole pruned model."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from blockshock_lib import BlockSparse, PruneSchedule, Sparse24, dense_, fake_sparsify_, save_sparse, sparsify_
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers.sparsify.parallel import ParallelLinear24
from tests.layers.ranks import draw, in_process

SPLIT = ["up", "down", "after"]
STYLES = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(output_layouts=Shard(0)),  # each rank gets half of the rows of the sum
    "after": ColwiseParallel(input_layouts=Shard(0)),
    "odd": RowwiseParallel(),  # 96 inputs each
}


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.after, self.odd, self.whole = nn.Linear(64, 128, bias=False), nn.Linear(192, 64), nn.Linear(64, 64)
        self.double()

    def forward(self, x):
        return self.after(self.down(torch.relu(self.up(self.whole(x)))))


def parallel():
    return parallelize_module(MLP(), init_device_mesh("cpu", (2,)), STYLES)


def computed(model, rank):
    """This rank's half of y, and dX."""
    x, dy = draw(4, 64, dtype=torch.float64).requires_grad_(), draw(4, 128, dtype=torch.float64)
    y = model(x)
    (y * (dy if y.shape[1] == 128 else dy.chunk(2, 1)[rank])).sum().backward()
    return y if y.shape[1] == 64 else y.chunk(2, 1)[rank], x.grad


def whole(model):
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()}


def like(model, dense, rank):
    torch.testing.assert_close(computed(model, rank), computed(dense, rank))
    found = whole(model)
    assert all(torch.equal(found[name], value) for name, value in dense.state_dict().items())


def is_the_pruned_model(group):
    dense, model = MLP(), parallel()
    one = sparsify_(dense, Sparse24(), lambda name, _: name != "odd")
    report = sparsify_(model, Sparse24())
    dense_(dense)
    assert report.converted == one.converted == [*SPLIT, "whole"]
    assert "multiples of 64, not 64x96" in report.refused["odd"]
    rows = {row.name: row for row in report.rows}
    assert [rows[name].shape for name in SPLIT] == [(128, 64), (64, 128), (64, 64)]
    for row in one.rows[:3]:
        bias = 8 * 64 * (row.name == "down")  # which both ranks hold
        assert (2 * rows[row.name].before - bias, 2 * rows[row.name].after - bias) == (row.before, row.after)
    like(model, dense, group.rank)
    assert all(p.grad is None for p in model.parameters())
    held = model.state_dict()
    split = held["up.weight"]
    sent = lambda _: dist.broadcast(held["whole.weight"], 0)  # noqa: E731
    for write in (split.mul_, split.detach().mul_, split.t().mul_, split.to_local().mul_, sent):
        with pytest.raises(UnsupportedError, match=r"(up|whole).weight of a state dict is a copy of what \1: "):
            write(2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value * (1 if "odd" in name else 2) for name, value in state.items()})
    torch.testing.assert_close(whole(model)["down.weight"], 2 * dense.down.weight.detach())
    model.load_state_dict(state)
    assert dense_(model).converted == one.converted
    assert all(isinstance(model.get_submodule(name).weight, DTensor) for name in SPLIT)
    like(model, dense, group.rank)
    sparsify_(model, Sparse24("given"), lambda name, _: name != "odd")
    assert isinstance(model.down, ParallelLinear24)
    like(model, dense, group.rank)


def refuses(group):
    """By name, and on both ranks what one of them cannot take; (reasons, whether the model is as it was)."""
    model, found = parallel(), []
    before = dict(model.named_modules())
    with torch.no_grad():
        model.up.weight.to_local()[3, 4] = torch.nan if group.rank else 0
    sharded = MLP()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    for call in (
        lambda: sparsify_(model, Sparse24(), "up"),
        lambda: sparsify_(model, Sparse24(frozen=False), "down"),
        lambda: sparsify_(model, Sparse24(dtype="int8"), "down"),
        lambda: sparsify_(model, Sparse24("wanda"), "down", [torch.zeros(4, 64)]),
        lambda: sparsify_(model, BlockSparse(sparsity=0.5), "down"),
        lambda: fake_sparsify_(model, Sparse24(), "down"),
        lambda: sparsify_(sharded, Sparse24()),
        lambda: save_sparse("nowhere.safetensors", model),
        lambda: sparsify_(model, Sparse24(), "down") and save_sparse("nowhere.safetensors", model.down),
    ):
        with pytest.raises(UnsupportedError) as error:
            call()
        found.append(str(error.value))
    return found, [name for name, module in model.named_modules() if before[name] is not module]


def test_the_packed_parts_of_a_model_that_torch_split_are_the_pruned_model(pair):
    pair.call(in_process, is_the_pruned_model, seconds=300)


def test_what_cannot_be_packed_in_parts_is_refused_by_name_on_every_rank(pair):
    one, other = pair.call(in_process, refuses, seconds=300)
    assert one == other and one[1] == ["down"]
    for reason, words in zip(
        one[0],
        (
            "up: its weight holds values that are not finite",
            "Sparse24 for inference",
            "in the weight's own dtype alone is packed",
            "prune by wanda before parallelize_module",
            "Sparse24 for inference",
            "its weight is a DTensor: it must be a whole, plain tensor",
            "it has hooks",
            "up is split over ranks: torch.distributed.checkpoint",
            "is split over ranks: torch.distributed.checkpoint",
        ),
        strict=True,
    ):
        assert words in reason


def loads_whole_states(group):
    """What set_model_state_dict does with a whole state, which all ranks or rank 0 alone have."""
    dense, found = MLP(), []
    sparsify_(dense, Sparse24(), lambda name, _: name != "odd")
    y = computed(dense, group.rank)
    wanted = {name: value.clone() for name, value in dense.state_dict().items()}
    for options in ({}, {"broadcast_from_rank0": True}):
        model = parallel()
        sparsify_(model, Sparse24())
        model.load_state_dict({n: v * (1 if "odd" in n else 3) for n, v in model.state_dict().items()})
        given = dict(wanted) if group.rank == 0 or not options else {}
        set_model_state_dict(model, given, options=StateDictOptions(full_state_dict=True, **options))
        torch.testing.assert_close(computed(model, group.rank), y)
        found.append({name: torch.equal(value, wanted[name]) for name, value in whole(model).items()})
    return found


def differ(group):
    model = parallel()
    with pytest.raises(UnsupportedError) as error:
        sparsify_(model, Sparse24(), "up" if group.rank else "*")
    assert type(model.up) is nn.Linear
    fake = MLP()
    fake_sparsify_(fake, Sparse24(), "up", PruneSchedule("decay", 4))
    fake = parallelize_module(fake, init_device_mesh("cpu", (2,)), STYLES)
    with pytest.raises(UnsupportedError) as late:
        fake(draw(4, 64, dtype=torch.float64))
    return [str(error.value), str(late.value)]


def test_a_whole_state_is_loaded_part_by_part(pair):
    for found in pair.call(in_process, loads_whole_states, seconds=300):
        assert all(all(one.values()) for one in found)


def test_other_layers_on_another_rank_and_a_split_after_a_schedule_are_refused_by_name(pair):
    for filters, late in pair.call(in_process, differ, seconds=300):
        assert filters == "rank 1 takes other layers than rank 0, as after: give one filter"
        assert late == "a layer that trains as if sparse is split over ranks: its schedule is to be 'once'"
