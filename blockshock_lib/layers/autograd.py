"""One autograd node for all methods: forward by a layer's own pieces, backward by its own pieces.

Eagerly it is an `autograd.Function`. Under `torch.compile` the same two bodies run behind the operator
`blockshock::linear`, which the compiler takes as one opaque step: a layer is found by its handle, a number.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from blockshock_lib.layers.emulated import Emulated
    from blockshock_lib.layers.sharded import ShardedLinear

_layers: weakref.WeakValueDictionary[int, ShardedLinear] = weakref.WeakValueDictionary()
_handles = itertools.count(1)
_steps = 0


def handle_of(layer: ShardedLinear) -> int:
    """A new number by which the compiled operator finds `layer`; it does not keep the layer alive."""
    handle = next(_handles)
    _layers[handle] = layer
    return handle


def optimizer_steps() -> int:
    """Steps of any optimizer in this process so far: a fused one changes a weight without raising its version."""
    return _steps


def _count_step(*_: object) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count_step)


def linear(layer: ShardedLinear | Emulated, x: Tensor) -> Tensor:
    """y [..., N] of x [..., K], differentiable wrt x, the layer's weights and its bias; all in the weights' dtype.

    Under autocast x may have any floating dtype, and its gradient comes back in that: packed values, unlike x, cannot
    be cast for each call.

    Raises:
        ValueError: x has another dtype than the weights, outside autocast.
    """
    dtype = layer.weights[0].dtype
    if x.dtype != dtype:
        if not (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
            raise ValueError(f"x is {x.dtype}, the layer {dtype}: convert one of them, or use torch.autocast")
        x = x.to(dtype)
    if torch.compiler.is_compiling():
        layout = (layer.out_features, layer.transposed_y, layer.transposed_dx)
        return torch.ops.blockshock.linear(x, layer.weight, layer.bias, layer.handle, *layout)
    inputs = (x, layer.bias, *layer.weights)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return _Linear.apply(layer, *inputs)
    return _forward(layer, x)


def _without_autocast(body: Callable) -> Callable:
    """`body(layer, tensor, ...)` as it runs outside autocast, which would cast a dense product and not a packed one."""

    @functools.wraps(body)
    def run(layer, tensor, *args):
        if not torch.is_autocast_enabled(tensor.device.type):
            return body(layer, tensor, *args)
        with torch.autocast(tensor.device.type, enabled=False):
            return body(layer, tensor, *args)

    return run


@_without_autocast
def _forward(layer: ShardedLinear | Emulated, x: Tensor) -> Tensor:
    if x.numel() == 0:  # 2:4 kernels take no empty batch; it is as empty on every rank, so all of them skip alike
        return _empty(x, x.shape[:-1], layer.out_features, layer.owners[0].transposed_y)
    # A CUDA graph replays no look at a version: what it captures refreshes every time.
    layer.prepare(always=x.is_cuda and torch.cuda.is_current_stream_capturing())
    y = layer.multiply(x.reshape(-1, layer.in_features))
    return y.reshape(*x.shape[:-1], layer.out_features)


@_without_autocast
def _backward(layer: ShardedLinear | Emulated, dy: Tensor, x: Tensor | None, need: tuple[bool, bool, bool]) -> tuple:
    lead = dy.shape[:-1]
    if dy.numel() == 0:
        return _backward_of_nothing(layer, dy, need)
    dy = dy.reshape(-1, layer.out_features)
    if 1 not in dy.stride():  # an expanded gradient, as a plain sum gives: no product reads it
        dy = dy.contiguous()
    x = None if x is None else x.reshape(-1, layer.in_features)
    layer.prepare()
    dx, dw, db = layer.backward(dy, x, need)
    return None if dx is None else dx.reshape(*lead, layer.in_features), dw, db


def _backward_of_nothing(layer: ShardedLinear | Emulated, dy: Tensor, need: tuple[bool, bool, bool]) -> tuple:
    """(dX, dW, db) of an empty batch: nothing, and zeros."""
    zeros = [torch.zeros_like(w, memory_format=torch.contiguous_format) for w in layer.weights] if need[1] else [None]
    return (
        _empty(dy, dy.shape[:-1], layer.in_features, layer.owners[0].transposed_dx) if need[0] else None,
        zeros if len(zeros) > 1 else zeros[0],
        dy.new_zeros(layer.out_features) if need[2] else None,
    )


@contextlib.contextmanager
def _holding(layer: ShardedLinear | Emulated, weights: list[Tensor], bias: Tensor | None = None) -> Iterator[None]:
    """The layer computes with these tensors, also where `functional_call` had lent it others than its own."""
    own = [(owner, "weight", owner.weight) for owner in layer.owners]
    given = list(weights)
    if bias is not None:
        own.append((layer, "bias", layer.bias))
        given.append(bias)
    lent = [(*held, new) for held, new in zip(own, given, strict=True) if held[2].data_ptr() != new.data_ptr()]
    try:
        for owner, name, _, new in lent:
            owner._parameters[name] = new
        yield
    finally:
        for owner, name, old, _ in lent:
            owner._parameters[name] = old


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x, bias, *weights):
        y = _forward(layer, x)
        ctx.layer = layer
        ctx.save_for_backward(x if any(ctx.needs_input_grad[3:]) else None, *weights)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, *weights = ctx.saved_tensors
        _, need_x, need_bias, *need_weights = ctx.needs_input_grad
        with _holding(ctx.layer, weights):
            dx, dw, db = _backward(ctx.layer, dy, x, (need_x, any(need_weights), need_bias))
        dws = dw if isinstance(dw, list) else [dw] * len(weights)  # several weights have a list, unless it is None
        return None, dx, db, *dws


# The schemas are written out: reading them off annotations differs between versions of PyTorch. Shapes and strides of
# the results follow from the arguments alone, never from the layer behind the handle: the compiler keeps its graphs on
# disk, and in a later process the same number is another layer.
@torch.library.custom_op(
    "blockshock::linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, int handle, int out_features, bool transposed_y, "
    "bool transposed_dx) -> Tensor",
)
def _linear_op(x, weight, bias, handle, out_features, transposed_y, transposed_dx):
    layer = _layers[handle]
    with torch.no_grad(), _holding(layer, [weight], bias):
        return _forward(layer, x)


@_linear_op.register_fake
def _(x, weight, bias, handle, out_features, transposed_y, transposed_dx):
    return _empty(x, x.shape[:-1], out_features, transposed_y)


@torch.library.custom_op(
    "blockshock::linear_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor weight, int handle, bool[] need, bool transposed_dx) -> Tensor[]",
)
def _linear_backward_op(dy, x, weight, handle, need, transposed_dx):
    layer = _layers[handle]
    with torch.no_grad(), _holding(layer, [weight]):
        return [grad for grad in _backward(layer, dy, x, tuple(need)) if grad is not None]


@_linear_backward_op.register_fake
def _(dy, x, weight, handle, need, transposed_dx):
    grads = (
        _empty(dy, dy.shape[:-1], x.shape[-1], transposed_dx) if need[0] else None,
        torch.empty_like(weight, memory_format=torch.contiguous_format) if need[1] else None,
        dy.new_empty(dy.shape[-1]) if need[2] else None,
    )
    return [grad for grad in grads if grad is not None]


def _empty(like: Tensor, lead: tuple[int, ...], features: int, transposed: bool) -> Tensor:
    """What a body returns, by shape and strides alone; some methods return the transposed view of [features, B]."""
    rows = 1
    for size in lead:
        rows = rows * size
    empty = like.new_empty(features, rows).t() if transposed else like.new_empty(rows, features)
    return empty.reshape(*lead, features)


def _save(ctx, inputs, output):
    x, weight, _, ctx.handle, _, _, ctx.transposed_dx = inputs
    ctx.save_for_backward(x, weight)


def _compiled_backward(ctx, dy):
    x, weight = ctx.saved_tensors
    need = list(ctx.needs_input_grad[:3])
    grads = iter(torch.ops.blockshock.linear_backward(dy, x, weight, ctx.handle, need, ctx.transposed_dx))
    return *(next(grads) if wanted else None for wanted in need), None, None, None, None


_linear_op.register_autograd(_compiled_backward, setup_context=_save)
