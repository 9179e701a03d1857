"""Numerical faults to plant in correct code, of the forward and of training; the gate must catch every one of them.

None is a caricature: each is a mistake that this project, or one it learned from, has made or could make.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from blockshock_lib.comm import Pending
from blockshock_lib.kernels.sparse24 import backends, packing
from blockshock_lib.layers import block_shock, parts
from blockshock_lib.layers.block_shock import BlockShockLinear
from blockshock_lib.layers.dense import ColumnParallelLinear, PermutedDenseLinear, RowParallelLinear
from blockshock_lib.layers.sharded import ShardedLinear
from blockshock_lib.layers.weight_stores import Master, PackedValues
from blockshock_lib.studies.linear import training
from blockshock_lib.studies.linear.training import Trainer

Plant = Callable[[Any], None]  # takes pytest's monkeypatch and breaks one thing


def swap(owner: object, name: str, new: Callable) -> Plant:
    """new(the right one) in its place."""
    return lambda patch: patch.setattr(owner, name, new(getattr(owner, name)))


def result(owner: object, name: str, change: Callable) -> Plant:
    return swap(owner, name, lambda right: lambda *args, **how: change(right(*args, **how)))


def given(owner: type, name: str, change: Callable) -> Plant:
    """The method's first argument goes through `change`."""
    return swap(owner, name, lambda right: lambda self, first, *more: right(self, change(first), *more))


def reduced(change: Callable) -> Plant:
    return swap(ShardedLinear, "reduce", lambda _: lambda self, y, out=None: change(self.group, y, self.bias))


def backend(name: str, new: Callable) -> Plant:
    table, right = backends.BACKENDS, getattr(packing, name)
    changed = dataclasses.replace(table["reference"], **{name: new(right)})
    return lambda patch: patch.setitem(table, "reference", changed)


def product(change: Callable) -> Plant:
    return backend("linear", lambda right: lambda *how: change(right(*how)))


def put(y, at, value):
    y[at] = value
    return y


def in_reverse(group, shard):
    return torch.cat(group.all_gather(shard).chunk(group.world_size)[::-1]).t()


def term_of_rank_1_on_rank_0(right):
    def part(cls, rank, *sizes):
        found = right(rank, *sizes)
        return parts.Part(1, found.rows, found.cols) if rank == 0 else found

    return classmethod(part)


def sharded(owner: type, spoil: Callable) -> Plant:
    """`spoil`(layer, part) after the right shard was made."""
    both = lambda right: lambda self, w, keep, part: (right(self, w, keep, part), spoil(self, part))  # noqa: E731
    return swap(owner, "shard", both)


def of_the_other_class(classes):
    rows, columns = zip(*classes, strict=True)
    return list(zip(rows, columns[::-1], strict=True))


def with_a_byte_swapped(packed):
    metadata = packed.data[1]  # the two groups of one byte in each row change places
    metadata[:, 0] = (metadata[:, 0] >> 4) | (metadata[:, 0] << 4)
    return packed


def keeps_its_own_half(layer, partial, by=None):
    grad, theirs = partial
    return put(grad, layer._half(1 - layer.term), theirs)


def with_the_other_dw(right):
    def backward(self, *args, **how):
        dx, dw, *more = right(self, *args, **how)
        return dx, self.group.exchange(dw, self.group.rank ^ 1), *more

    return backward


def after_each_step(hook: Callable) -> Plant:
    def hooked(optimizer):
        optimizer.register_step_post_hook(hook)
        return optimizer

    return result(training, "make_optimizer", hooked)


def state(name: str, change: Callable) -> Plant:
    def hook(optimizer, *_):
        for parameter, held in optimizer.state.items():
            packed = parameter.ndim == 2 and parameter.shape[1] * 2 == parameter.shape[0]  # of a square weight
            if packed and name in held:
                held[name].copy_(change(held[name]))

    return after_each_step(hook)


def drift(optimizer, *_):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.add_(0.02 * group["lr"])


# No fault: an optimizer that moves entries without a gradient too, by its rate, for methods and truth alike.
MOVES_EVERY_ENTRY = after_each_step(drift)


class Fault(NamedTuple):
    plant: Plant
    method: str = "block_shock"  # that it breaks
    case: dict = {}  # that shows it  # noqa: RUF012
    tensor: str = ""  # that the check names
    beside: Plant = lambda patch: None  # what must hold for it to show; alone, it must not


ROW, NAN = "row_parallel", math.nan
FORWARD = {
    "bias dropped": Fault(reduced(lambda group, y, bias: group.all_reduce(y))),
    "bias added by every rank": Fault(
        reduced(lambda group, y, bias: group.all_reduce(y, bias * group.world_size)), ROW
    ),
    "both ranks hold term 0": Fault(swap(block_shock, "term_mask", lambda _: lambda keep, p: keep[p.rows, p.cols])),
    "terms swapped on one shard": Fault(
        swap(BlockShockLinear, "part", term_of_rank_1_on_rank_0), case=dict(world_size=4, mask="random")
    ),
    "all-reduce missing": Fault(reduced(lambda group, y, bias: y + bias), "masked_dense", dict(mask="magnitude")),
    "all-reduce counted twice": Fault(reduced(lambda group, y, bias: group.all_reduce(y * 2, bias)), ROW),
    "shards gathered in reverse": Fault(
        swap(ColumnParallelLinear, "reduce", lambda _: lambda self, y, out=None: in_reverse(self.group, y)),
        "column_parallel",
    ),
    # One SGD step behind: a relative change of about one percent.
    "packed copy is stale": Fault(
        backend("pack", lambda right: lambda w, m: right((w.float() + 0.01 * w.float().roll(1, 0)).to(w.dtype), m)),
        case=dict(mask="uniform_1010"),
    ),
    "one metadata byte transposed": Fault(
        backend("pack", lambda right: lambda w, m: with_a_byte_swapped(right(w, m))), case=dict(mask="random")
    ),
    "one product is NaN": Fault(product(lambda y: put(y, (-1, -1), NAN))),
    "last row of outputs never written": Fault(product(lambda y: put(y, -1, 0))),
    "one output slightly off": Fault(
        product(lambda y: put(y, (0, 0), y[0, 0] + 0.05 * y.float().square().mean().sqrt()))
    ),
    "input rounded to eight bits": Fault(
        backend("linear", lambda right: lambda x, *how: right(x.to(torch.float8_e4m3fn).to(x.dtype), *how)),
        case=dict(mask="transposable_random"),
    ),
    "wrong input shard": Fault(
        sharded(BlockShockLinear, lambda layer, p: setattr(layer, "cols", slice(0, p.cols.stop - p.cols.start))),
        case=dict(world_size=4),
    ),
    "permuted columns of the other class": Fault(
        sharded(PermutedDenseLinear, lambda layer, _: setattr(layer, "classes", of_the_other_class(layer.classes))),
        "permuted_dense",
    ),
}

SGD, ADAMW, RECOMPRESS = dict(optimizer="sgd"), dict(optimizer="adamw"), "block_shock_recompress"
RANDOM, AFTER = SGD | dict(mask="random"), "after 3 steps"
NOTHING = lambda _: lambda self, weight: None  # noqa: E731
TRAINING = {
    "transposed copy is stale": Fault(swap(PackedValues, "refresh", NOTHING), case=SGD, tensor=f"dx {AFTER}"),
    "compress is skipped": Fault(swap(Master, "compress", NOTHING), RECOMPRESS, ADAMW, f"y {AFTER}"),
    "mask is not applied again": Fault(
        swap(Master, "remask", NOTHING), RECOMPRESS, RANDOM, f"dx {AFTER}", MOVES_EVERY_ENTRY
    ),
    "parameter is a copy of what is multiplied": Fault(
        given(BlockShockLinear, "_parameter", torch.clone), case=ADAMW, tensor=f"y {AFTER}"
    ),
    "optimizer state in the wrong order": Fault(
        state("exp_avg", lambda held: held.roll(1, 0)), case=ADAMW, tensor="weight"
    ),
    # The second moment of W^T's packed order under the values of W's.
    "optimizer state of all entries for the kept ones": Fault(
        state("exp_avg_sq", lambda held: held.t().reshape(held.shape)), case=ADAMW, tensor="weight"
    ),
    "dx all-reduce is missing": Fault(
        swap(ShardedLinear, "start_dgrad", lambda _: lambda self, partial: Pending(partial)), case=SGD, tensor="dx"
    ),
    "dx shards joined in reverse": Fault(
        swap(RowParallelLinear, "start_dgrad", lambda _: lambda self, dx: Pending(in_reverse(self.group, dx))),
        *(ROW, SGD, "dx"),
    ),
    "dx is scaled": Fault(result(RowParallelLinear, "local_dgrad", lambda dx: dx * 1.5), ROW, SGD, "dx"),
    "dx holds NaN": Fault(result(RowParallelLinear, "local_dgrad", lambda dx: dx * NAN), ROW, SGD, "dx holds NaN"),
    "dx of the timed backward is scaled": Fault(
        result(ShardedLinear, "backward", lambda made: (made[0] * 1.5, *made[1:])), ROW, SGD, "dx"
    ),
    "dw of the other term": Fault(swap(ShardedLinear, "backward", with_the_other_dw), case=SGD, tensor="dw"),
    "steps the wrong way": Fault(given(Trainer, "assign", torch.neg), ROW, SGD, "weight"),
    "bias gradient is counted twice": Fault(
        result(ShardedLinear, "backward", lambda made: (*made[:2], made[2] * 2)), case=SGD, tensor="db"
    ),
    "dw exchange keeps its own half": Fault(
        swap(BlockShockLinear, "finish_wgrad", lambda _: keeps_its_own_half),
        case=RANDOM | dict(dw="exchange"),
        tensor="dw",
    ),
    "dw of the other class": Fault(
        swap(block_shock, "packed_wgrad", lambda right: lambda *given: right(*given[:3], of_the_other_class(given[3]))),
        *("block_shock", SGD, "dw"),
    ),
    "dw is averaged over the batch": Fault(
        given(BlockShockLinear, "local_wgrad", lambda dy: dy / len(dy)), case=RANDOM, tensor="dw"
    ),
    "dx ignores the scale of dy": Fault(
        given(BlockShockLinear, "local_dgrad", lambda dy: dy / dy.float().std().to(dy.dtype)),
        case=SGD | dict(mask="transposable_random"),
        tensor="dx",
    ),
    "one gradient is NaN": Fault(
        result(BlockShockLinear, "finish_wgrad", lambda dw: put(dw, (-1, -1), NAN)), case=ADAMW, tensor="dw"
    ),
}
