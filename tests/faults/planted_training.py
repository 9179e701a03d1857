"""Faults of training to plant in correct code; each takes pytest's monkeypatch and breaks one thing.

The engine's check must refuse every one of them and name the tensor that shows it.
"""

import torch

from blockshock_lib.comm import Pending
from blockshock_lib.layers import block_shock
from blockshock_lib.layers.block_shock import BlockShockLinear
from blockshock_lib.layers.dense import RowParallelLinear
from blockshock_lib.layers.sharded import ShardedLinear
from blockshock_lib.layers.weight_stores import Master, PackedValues
from blockshock_lib.studies.linear import training
from blockshock_lib.studies.linear.training import Trainer


def transposed_copy_is_stale(patch):
    patch.setattr(PackedValues, "refresh", lambda self, weight: None)


def compress_is_skipped(patch):
    patch.setattr(Master, "compress", lambda self, weight: None)


def mask_is_not_applied_again(patch):
    patch.setattr(Master, "remask", lambda self, weight: None)


def parameter_is_a_copy_of_what_is_multiplied(patch):
    right = BlockShockLinear._parameter
    patch.setattr(BlockShockLinear, "_parameter", lambda self, values: right(self, values.clone()))


def optimizer_state_in_the_wrong_order(patch):
    _after_each_step(patch, _change_state("exp_avg", lambda state: state.roll(1, 0)))


def optimizer_state_of_all_entries_for_the_kept_ones(patch):
    # The second moment of W^T's packed order under the values of W's.
    _after_each_step(patch, _change_state("exp_avg_sq", lambda state: state.t().reshape(state.shape)))


def dx_all_reduce_is_missing(patch):
    patch.setattr(ShardedLinear, "start_dgrad", lambda self, partial: Pending(partial))


def dx_shards_joined_in_reverse(patch):
    def start(layer, partial):
        return Pending(torch.cat(layer.group.all_gather(partial).chunk(layer.group.world_size)[::-1]).t())

    patch.setattr(RowParallelLinear, "start_dgrad", start)


def _scale_dx(patch, factor):
    right = RowParallelLinear.local_dgrad
    patch.setattr(RowParallelLinear, "local_dgrad", lambda self, dy: right(self, dy) * factor)


def dx_is_scaled(patch):
    _scale_dx(patch, 1.5)


def dx_holds_nan(patch):
    _scale_dx(patch, float("nan"))


def _backward(patch, change):
    right = ShardedLinear.backward
    patch.setattr(ShardedLinear, "backward", lambda self, *args, **how: change(self, *right(self, *args, **how)))


def bias_gradient_is_counted_twice(patch):
    _backward(patch, lambda layer, dx, dw, db: (dx, dw, db * 2))


def dx_of_the_timed_backward_is_scaled(patch):
    _backward(patch, lambda layer, dx, dw, db: (dx * 1.5, dw, db))


def dw_of_the_other_term(patch):
    _backward(patch, lambda layer, dx, dw, db: (dx, layer.group.exchange(dw, layer.group.rank ^ 1), db))


def dw_exchange_keeps_its_own_half(patch):
    def finish(layer, partial, by=None):
        grad, theirs = partial
        grad[layer._half(1 - layer.term)] = theirs
        return grad

    patch.setattr(BlockShockLinear, "finish_wgrad", finish)


def steps_the_wrong_way(patch):
    right = Trainer.assign
    patch.setattr(Trainer, "assign", lambda self, dw, db: right(self, -dw, db))


def dw_of_the_other_class(patch):
    right = block_shock.packed_wgrad

    def swapped(dy, x, classes):
        rows, columns = zip(*classes, strict=True)
        return right(dy, x, list(zip(rows, columns[::-1], strict=True)))

    patch.setattr(block_shock, "packed_wgrad", swapped)


def dw_is_averaged_over_the_batch(patch):
    right = BlockShockLinear.local_wgrad
    patch.setattr(BlockShockLinear, "local_wgrad", lambda self, dy, x, by=None: right(self, dy / dy.shape[0], x, by))


def dx_ignores_the_scale_of_dy(patch):
    right = BlockShockLinear.local_dgrad
    patch.setattr(BlockShockLinear, "local_dgrad", lambda self, dy: right(self, dy / dy.float().std().to(dy.dtype)))


def one_gradient_is_nan(patch):
    right = BlockShockLinear.finish_wgrad

    def broken(self, partial, by=None):
        values = right(self, partial, by)
        values[-1, -1] = float("nan")
        return values

    patch.setattr(BlockShockLinear, "finish_wgrad", broken)


def _change_state(name, change):
    def hook(optimizer, *_):
        for parameter, state in optimizer.state.items():
            packed = parameter.ndim == 2 and parameter.shape[1] * 2 == parameter.shape[0]  # of a square weight
            if packed and name in state:
                state[name].copy_(change(state[name]))

    return hook


def moves_every_entry(patch):
    """No fault: an optimizer that moves entries without a gradient too, by its rate, for methods and truth alike."""

    def drift(optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(0.02 * group["lr"])

    _after_each_step(patch, drift)


def _after_each_step(patch, hook):
    right = training.make_optimizer

    def make(*args, **kwargs):
        optimizer = right(*args, **kwargs)
        optimizer.register_step_post_hook(hook)
        return optimizer

    patch.setattr(training, "make_optimizer", make)


# fault -> the method that it breaks, the case that shows it, and the tensor that the check must name
FAULTS = {
    transposed_copy_is_stale: ("block_shock", dict(optimizer="sgd"), "dx after 3 steps"),
    compress_is_skipped: ("block_shock_recompress", dict(optimizer="adamw"), "y after 3 steps"),
    mask_is_not_applied_again: ("block_shock_recompress", dict(optimizer="sgd", mask="random"), "weight"),
    parameter_is_a_copy_of_what_is_multiplied: ("block_shock", dict(optimizer="adamw"), "y after 3 steps"),
    optimizer_state_in_the_wrong_order: ("block_shock", dict(optimizer="adamw"), "weight"),
    optimizer_state_of_all_entries_for_the_kept_ones: ("block_shock", dict(optimizer="adamw"), "weight"),
    dx_all_reduce_is_missing: ("block_shock", dict(optimizer="sgd"), "dx"),
    dx_shards_joined_in_reverse: ("row_parallel", dict(optimizer="sgd"), "dx"),
    dx_is_scaled: ("row_parallel", dict(optimizer="sgd"), "dx"),
    dx_holds_nan: ("row_parallel", dict(optimizer="sgd"), "dx holds NaN"),
    dx_of_the_timed_backward_is_scaled: ("row_parallel", dict(optimizer="sgd"), "dx"),
    dw_of_the_other_term: ("block_shock", dict(optimizer="sgd"), "dw"),
    steps_the_wrong_way: ("row_parallel", dict(optimizer="sgd"), "weight"),
    bias_gradient_is_counted_twice: ("block_shock", dict(optimizer="sgd"), "db"),
    dw_exchange_keeps_its_own_half: ("block_shock", dict(optimizer="sgd", mask="random", dw="exchange"), "dw"),
    dw_of_the_other_class: ("block_shock", dict(optimizer="sgd"), "dw"),
    dw_is_averaged_over_the_batch: ("block_shock", dict(optimizer="sgd", mask="random"), "dw"),
    dx_ignores_the_scale_of_dy: ("block_shock", dict(optimizer="sgd", mask="transposable_random"), "dx"),
    one_gradient_is_nan: ("block_shock", dict(optimizer="adamw"), "dw"),
}
# What must hold beside the fault for it to show; alone, it must not.
ALONGSIDE = {mask_is_not_applied_again: moves_every_entry}
