"""One autograd node for all methods: forward by a layer's own pieces, backward by its own pieces.

Eagerly it is an `autograd.Function`. Under `torch.compile` the same two bodies run behind the operator
`blockshock::linear`, which the compiler takes as one opaque step: a layer is found by its handle, a number.
"""

import contextlib
import itertools
import math
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import register_optimizer_step_post_hook

from blockshock_lib.errors import UnsupportedError

_layers: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_handles = itertools.count(1)
optimizer_steps = 0  # of any optimizer in this process: a fused one changes a weight without raising its version


def _count_step(*_: object) -> None:
    global optimizer_steps
    optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


def register(layer: nn.Module) -> None:
    layer.handle = next(_handles)
    _layers[layer.handle] = layer


def layers() -> list[nn.Module]:
    """All that live in this process."""
    return list(_layers.values())


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """y [..., N] of x [..., K] in the weight's dtype, to which autocast casts x; ValueError: x has another."""
    dtype = layer.weight.dtype
    if x.dtype != dtype:
        if not (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
            raise ValueError(f"x is {x.dtype}, the layer {dtype}: convert one of them, or use torch.autocast")
        x = x.to(dtype)
    inputs = (x, layer.weight, layer.bias)
    if torch.compiler.is_exporting():
        raise UnsupportedError(
            "torch.export cannot take a packed layer along: export with its to_linear() in its place"
        )
    if torch.compiler.is_compiling():
        layout = (layer.out_features, layer.transposed_y, layer.transposed_dgrad)
        return torch.ops.blockshock.linear(*inputs, layer.handle, *layout)
    if torch._C._functorch.get_interpreter_stack():
        raise UnsupportedError("torch.func transforms no packed layer: give it a batch, or transform its to_linear()")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return _Linear.apply(layer, *inputs)
    return _forward(layer, x)


def _without_autocast(tensor: Tensor) -> contextlib.AbstractContextManager:
    kind = tensor.device.type  # autocast would cast a dense product and not a packed one
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def _forward(layer: nn.Module, x: Tensor) -> Tensor:
    if x.numel() == 0:  # 2:4 kernels take no empty batch; it is as empty on every rank, so all of them skip alike
        return _empty(x, x.shape[:-1], layer.out_features, layer.transposed_y)
    layer.before_pass("forward", x)
    with _without_autocast(x):
        # A CUDA graph replays no look at a version: what it captures refreshes every time.
        layer.prepare(always=x.is_cuda and torch.cuda.is_current_stream_capturing())
        y = layer.multiply(x.reshape(-1, layer.in_features))
    return y.reshape(*x.shape[:-1], layer.out_features)


def _backward(layer: nn.Module, dy: Tensor, x: Tensor | None, need: tuple[bool, bool, bool]) -> tuple:
    lead = dy.shape[:-1]
    if dy.numel() == 0:
        dx = _empty(dy, lead, layer.in_features, layer.transposed_dgrad) if need[0] else None
        dw = torch.zeros_like(layer.weight, memory_format=torch.contiguous_format) if need[1] else None
        return dx, dw, dy.new_zeros(layer.out_features) if need[2] else None
    layer.before_pass("backward", dy)
    dy = dy.reshape(-1, layer.out_features)
    dy = dy if 1 in dy.stride() else dy.contiguous()  # an expanded gradient, as a plain sum gives: no product reads it
    x = None if x is None else x.reshape(-1, layer.in_features)
    with _without_autocast(dy):
        layer.prepare()
        dx, dw, db = layer.backward(dy, x, need)
    return None if dx is None else dx.reshape(*lead, layer.in_features), dw, db


def _empty(like: Tensor, lead: tuple[int, ...], features: int, transposed: bool) -> Tensor:
    rows = math.prod(lead)
    empty = like.new_empty(features, rows).t() if transposed else like.new_empty(rows, features)
    return empty.reshape(*lead, features)


@contextlib.contextmanager
def _holding(layer: nn.Module, **tensors: Tensor | None) -> Iterator[None]:
    """The layer computes with this weight and bias, also where `functional_call` had lent it others than its own."""
    own = {name: getattr(layer, name) for name, given in tensors.items() if given is not None}
    lent = [name for name, held in own.items() if held.data_ptr() != tensors[name].data_ptr()]
    try:
        for name in lent:
            layer._parameters[name] = tensors[name]
        yield
    finally:
        for name in lent:
            layer._parameters[name] = own[name]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x, weight, bias):
        ctx.layer = layer
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, weight)
        return _forward(layer, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if torch._C._functorch.is_batchedtensor(dy):
            raise UnsupportedError("vmap cannot map over a packed layer's gradient: map over that of its to_linear()")
        x, weight = ctx.saved_tensors
        with _holding(ctx.layer, weight=weight):
            return None, *_backward(ctx.layer, dy, x, ctx.needs_input_grad[1:])


# The schemas are written out: reading them off annotations differs between versions of PyTorch. The results' shapes and
# strides follow from the arguments alone: the compiler keeps graphs on disk, where a handle may be another layer's.
@torch.library.custom_op(
    "blockshock::linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, int handle, int out_features, bool transposed_y, "
    "bool transposed_dgrad) -> Tensor",
)
def _linear_op(x, weight, bias, handle, out_features, transposed_y, transposed_dgrad):
    layer = _layers[handle]
    with torch.no_grad(), _holding(layer, weight=weight, bias=bias):
        return _forward(layer, x)


@_linear_op.register_fake
def _(x, weight, bias, handle, out_features, transposed_y, transposed_dgrad):
    return _empty(x, x.shape[:-1], out_features, transposed_y)


@torch.library.custom_op(
    "blockshock::linear_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor weight, int handle, bool[] need, bool transposed_dgrad) -> Tensor[]",
)
def _linear_backward_op(dy, x, weight, handle, need, transposed_dgrad):
    layer = _layers[handle]
    with torch.no_grad(), _holding(layer, weight=weight):
        return [grad for grad in _backward(layer, dy, x, tuple(need)) if grad is not None]


@_linear_backward_op.register_fake
def _(dy, x, weight, handle, need, transposed_dgrad):
    grads = [_empty(dy, dy.shape[:-1], x.shape[-1], transposed_dgrad)] if need[0] else []
    grads += [torch.empty_like(weight, memory_format=torch.contiguous_format)] if need[1] else []
    return [*grads, dy.new_empty(dy.shape[-1])] if need[2] else grads


def _save(ctx, inputs, output):
    x, weight, _, ctx.handle, _, _, ctx.transposed_dgrad = inputs
    ctx.save_for_backward(x, weight)


def _compiled_backward(ctx, dy):
    x, weight = ctx.saved_tensors
    need = list(ctx.needs_input_grad[:3])
    grads = iter(torch.ops.blockshock.linear_backward(dy, x, weight, ctx.handle, need, ctx.transposed_dgrad))
    return *(next(grads) if wanted else None for wanted in need), None, None, None, None


_linear_op.register_autograd(_compiled_backward, setup_context=_save)
