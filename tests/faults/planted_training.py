"""Faults of training to plant in correct code; each takes pytest's monkeypatch and breaks one thing.

The engine's check must refuse every one of them and name the tensor that shows it.
"""

from __future__ import annotations

from blockshock_lib.engine import optimizers
from blockshock_lib.layers import periodic
from blockshock_lib.layers.block_shock import BlockShockLinear
from blockshock_lib.layers.emulated import Emulated
from blockshock_lib.layers.row_parallel import RowParallelLinear
from blockshock_lib.layers.sharded import ShardedLinear


def transposed_copy_is_stale(patch):
    patch.setattr(BlockShockLinear, "_refresh_transposed", lambda self: None)


def compress_is_skipped(patch):
    patch.setattr(BlockShockLinear, "_compress", lambda self: None)


def mask_is_not_applied_again(patch):
    patch.setattr(BlockShockLinear, "_remask", lambda self: None)


def parameter_is_a_copy_of_what_is_multiplied(patch):
    right = BlockShockLinear._parameter
    patch.setattr(BlockShockLinear, "_parameter", lambda self, values: right(self, values.clone()))


def optimizer_state_in_the_wrong_order(patch):
    def roll(optimizer, *_):
        for parameter, state in optimizer.state.items():
            if packed(parameter) and "exp_avg" in state:
                state["exp_avg"].copy_(state["exp_avg"].roll(1, 0))

    _each_optimizer(patch, lambda optimizer: optimizer.register_step_post_hook(roll))


def optimizer_state_of_all_entries_for_the_kept_ones(patch):
    def transpose(optimizer, *_):
        # The second moment of W^T's packed order under the values of W's.
        for parameter, state in optimizer.state.items():
            if packed(parameter) and "exp_avg_sq" in state:
                state["exp_avg_sq"].copy_(state["exp_avg_sq"].t().reshape(parameter.shape))

    _each_optimizer(patch, lambda optimizer: optimizer.register_step_post_hook(transpose))


def dx_all_reduce_is_missing(patch):
    patch.setattr(ShardedLinear, "combine_dx", lambda self, partials: partials[0])


def dx_shards_joined_in_reverse(patch):
    right = RowParallelLinear.combine_dx
    patch.setattr(RowParallelLinear, "combine_dx", lambda self, partials: right(self, partials[::-1]))


def bias_gradient_is_counted_twice(patch):
    right = ShardedLinear.backward

    def backward(self, *args, **kwargs):
        dx, dw, db = right(self, *args, **kwargs)
        return dx, dw, db * 2

    for layer in (ShardedLinear, Emulated):
        patch.setattr(layer, "backward", backward)


def dw_exchange_keeps_its_own_half(patch):
    def combine(self, partials, by=None):
        for rank, (grad, theirs) in enumerate(partials):
            grad[self._half(1 - rank % 2)] = theirs
        return [grad for grad, _ in partials]

    patch.setattr(BlockShockLinear, "combine_dw", combine)


def dw_of_the_other_class(patch):
    right = periodic.packed_dw

    def swapped(dy, x, classes):
        rows, columns = zip(*classes, strict=True)
        return right(dy, x, list(zip(rows, columns[::-1], strict=True)))

    patch.setattr(periodic, "packed_dw", swapped)


def dw_is_averaged_over_the_batch(patch):
    right = BlockShockLinear.local_dw
    patch.setattr(BlockShockLinear, "local_dw", lambda self, dy, x, by=None: right(self, dy / dy.shape[0], x, by))


def dx_ignores_the_scale_of_dy(patch):
    right = BlockShockLinear.local_dx
    patch.setattr(BlockShockLinear, "local_dx", lambda self, dy: right(self, dy / dy.float().std().to(dy.dtype)))


def one_gradient_is_nan(patch):
    right = BlockShockLinear.in_layout

    def broken(self, values):
        values = right(self, values)
        values[-1, -1] = float("nan")
        return values

    patch.setattr(BlockShockLinear, "in_layout", broken)


def packed(parameter):
    """Whether it holds the packed values of a square weight: half as many columns as rows."""
    return parameter.ndim == 2 and parameter.shape[1] * 2 == parameter.shape[0]


def moves_every_entry(patch):
    """No fault: an optimizer that moves entries without a gradient too, by its rate, for methods and truth alike."""

    def drift(optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(0.02 * group["lr"])

    _each_optimizer(patch, lambda optimizer: optimizer.register_step_post_hook(drift))


def _each_optimizer(patch, change):
    right = optimizers.make

    def make(*args, **kwargs):
        optimizer = right(*args, **kwargs)
        change(optimizer)
        return optimizer

    patch.setattr(optimizers, "make", make)


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
    bias_gradient_is_counted_twice: ("block_shock", dict(optimizer="sgd"), "db"),
    dw_exchange_keeps_its_own_half: ("block_shock", dict(optimizer="sgd", mask="random", dw="exchange"), "dw"),
    dw_of_the_other_class: ("block_shock", dict(optimizer="sgd"), "dw"),
    dw_is_averaged_over_the_batch: ("block_shock", dict(optimizer="sgd", mask="random"), "dw"),
    dx_ignores_the_scale_of_dy: ("block_shock", dict(optimizer="sgd", mask="transposable_random"), "dx"),
    one_gradient_is_nan: ("block_shock", dict(optimizer="adamw"), "dw"),
}
# What must hold beside the fault for it to show; alone, it must not.
ALONGSIDE = {mask_is_not_applied_again: moves_every_entry}
