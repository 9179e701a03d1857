"""One autograd node for all methods: forward by a layer's own pieces, backward by its own pieces.

Eagerly it is an `autograd.Function`. Under `torch.compile` the same two bodies run behind the operator
`blockshock::linear`, which the compiler takes as one opaque step: a layer is found by its handle, a number.
"""

import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.optim.optimizer import register_optimizer_step_post_hook

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.once import once
from blockshock_lib.layers.watch import describe

_layers: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_handles = itertools.count(1)
faking = functools.partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE)
_tracing = functools.partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.PROXY)
optimizer_steps = 0  # of any optimizer in this process: a fused one changes a weight without raising its version


def _count_step(*_: object) -> None:
    global optimizer_steps
    optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


def state(w: Tensor) -> tuple:
    """Place, version, steps and looks at its data: what changes when a weight may have changed."""
    with torch._C.DisableTorchFunctionSubclass():  # each look at a WatchedParameter would go through Python
        version, steps = 0 if w.is_inference() else w._version, optimizer_steps if w.requires_grad else 0
        return w.data_ptr(), version, steps, getattr(w, "looks", 0)


def register(layer: nn.Module, among: weakref.WeakValueDictionary[int, nn.Module] = _layers) -> None:
    layer.handle = next(_handles)
    among[layer.handle] = layer


def layers() -> list[nn.Module]:
    return list(_layers.values())


def has_values(tensor: Tensor) -> bool:
    """False on the meta device and under torch's FakeTensorMode, where there are shapes alone."""
    return not (tensor.is_meta or faking() or isinstance(tensor, FakeTensor))


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """y [..., N] of x [..., K] in the weight's dtype, to which autocast casts x; ValueError: x has another."""
    weight, bias = (held := layer._parameters)["weight"], held["bias"]  # nn.Module's __getattr__ takes 0.4 us each time
    if x.dtype != (dtype := weight.dtype):
        if x.is_meta or not (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
            raise ValueError(f"x is {x.dtype}, the layer {dtype}: convert one of them, or use torch.autocast")
        x = x.to(dtype)
    if alone := torch.compiler.is_compiling():  # the operator by itself, which knows shapes without values
        if torch.compiler._is_exporting_flag:  # is_exporting() is True in whatever PyTorch 2.11 compiles
            raise UnsupportedError(
                "torch.export cannot take a packed layer along: export with its to_linear() in its place"
            )
    elif torch.jit.is_tracing() or (faking() and _tracing()):
        raise UnsupportedError("torch.jit, torch.onnx, make_fx trace no packed layer: trace its to_linear() instead")
    elif torch._C._are_functorch_transforms_active():
        raise UnsupportedError("torch.func transforms no packed layer: give it a batch, or transform its to_linear()")
    elif forward_ad._current_level >= 0 and any(map(_dual, (x, weight, bias))):
        raise UnsupportedError("a packed layer takes no forward-mode derivative: take that of its to_linear()")
    elif (alone := not has_values(x)) and x.is_meta != weight.is_meta:
        way = "for shapes alone call copy.deepcopy(layer).to('meta')"
        raise UnsupportedError(f"x is on {x.device}, and {describe(layer)} on {weight.device}: {way}")
    if alone:
        layout = (layer.out_features, layer.transposed_y, layer.transposed_dgrad)
        return _Compiled.apply(x, weight, bias, layer.handle, *layout)
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or getattr(bias, "requires_grad", 0))
    return _apply(layer, x, weight, bias) if wanted else _forward(layer, x)


def _dual(tensor: Tensor | None) -> bool:
    return tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None


def _forward(layer: nn.Module, x: Tensor) -> Tensor:
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(kind := x.device.type):
        with torch.autocast(kind, enabled=False):  # it would cast a dense product and not a packed one
            return _forward(layer, x)
    if x.numel() == 0:  # 2:4 kernels take no empty batch; it is as empty on every rank, so all of them skip alike
        return _empty(x, x.shape[:-1], layer.out_features, layer.transposed_y)
    if layer.collective:
        layer.before_pass("forward", x)
    # A CUDA graph replays no look at a version: what it captures refreshes every time.
    layer.prepare(always=x.is_cuda and torch.cuda.is_current_stream_capturing())
    if x.dim() == 2:
        return layer.multiply(x)
    return layer.multiply(x.reshape(-1, layer.in_features)).reshape(*x.shape[:-1], layer.out_features)


def _backward(layer: nn.Module, dy: Tensor, x: Tensor | None, need: tuple[bool, bool, bool]) -> tuple:
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(kind := dy.device.type):
        with torch.autocast(kind, enabled=False):
            return _backward(layer, dy, x, need)
    lead = dy.shape[:-1]
    if dy.numel() == 0:
        dx = _empty(dy, lead, layer.in_features, layer.transposed_dgrad) if need[0] else None
        dw = torch.zeros_like(layer.weight, memory_format=torch.contiguous_format) if need[1] else None
        return dx, dw, dy.new_zeros(layer.out_features) if need[2] else None
    layer.before_pass("backward", dy)
    dy = dy.reshape(-1, layer.out_features)
    dy = dy if 1 in dy.stride() else dy.contiguous()  # an expanded gradient, as a plain sum gives: no product reads it
    x = None if x is None else x.reshape(-1, layer.in_features)
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
    own = layer._parameters
    lent = {name: t for name, t in tensors.items() if t is not None and t.data_ptr() != own[name].data_ptr()}
    try:
        layer.__dict__["_parameters"] = own | lent
        yield
    finally:
        layer.__dict__["_parameters"] = own


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer, x, weight, bias):
        ctx.layer = layer
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, weight)
        y = _forward(layer, x)  # a view made in here could not be written in place, as nn.ReLU(inplace=True) does
        return torch.ops.aten._unsafe_view.default(y, y.shape) if y._is_view() else y

    @staticmethod
    @once
    def backward(ctx, dy):
        if torch._C._functorch.is_batchedtensor(dy):
            raise UnsupportedError("vmap cannot map over a packed layer's gradient: map over that of its to_linear()")
        x, weight = ctx.saved_tensors
        with _holding(ctx.layer, weight=weight):
            return None, *_backward(ctx.layer, dy, x, ctx.needs_input_grad[1:])


_apply = super(torch.autograd.Function, _Linear).apply  # Function's own asks after torch.func, which was refused

# The operators have no gradient of their own, an autograd.Function joins them: the dispatcher runs no Python but the
# layer's. The schemas are written out: reading them off annotations differs between versions of PyTorch. The results'
# shapes and strides follow from the arguments: the compiler keeps graphs on disk, where a handle may be another's.
_ops = torch.library.Library("blockshock", "DEF")
_ops.define("linear(Tensor x, Tensor weight, Tensor? bias, int handle, int features, bool transposed) -> Tensor")
_ops.define("linear_backward(Tensor dy, Tensor x, Tensor weight, int handle, bool[] need, bool transposed) -> Tensor[]")


@torch.library.impl(_ops, "linear", "CompositeExplicitAutograd")
def _linear_op(x, weight, bias, handle, features, transposed):
    layer = _layers[handle]
    if (held := layer._parameters)["weight"] is weight and held["bias"] is bias:
        return _forward(layer, x)
    with _holding(layer, weight=weight, bias=bias):
        return _forward(layer, x)


@torch.library.register_fake("blockshock::linear", lib=_ops)
def _(x, weight, bias, handle, features, transposed):
    return _empty(x, x.shape[:-1], features, transposed)


@torch.library.impl(_ops, "linear_backward", "CompositeExplicitAutograd")
def _linear_backward_op(dy, x, weight, handle, need, transposed):
    layer = _layers[handle]
    if dy.requires_grad:  # by the compiler's backends that keep a gradient's graph
        raise UnsupportedError(f"{type(layer).__name__} has no gradient of its gradient: use its to_linear()")
    with _holding(layer, weight=weight):
        return [grad for grad in _backward(layer, dy, x, tuple(need)) if grad is not None]


@torch.library.register_fake("blockshock::linear_backward", lib=_ops)
def _(dy, x, weight, handle, need, transposed):
    grads = [_empty(dy, dy.shape[:-1], x.shape[-1], transposed)] if need[0] else []
    grads += [torch.empty_like(weight, memory_format=torch.contiguous_format)] if need[1] else []
    return [*grads, dy.new_empty(dy.shape[-1])] if need[2] else grads


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, handle, features, transposed_y, transposed_dgrad):
        ctx.save_for_backward(x, weight)
        ctx.handle, ctx.transposed = handle, transposed_dgrad
        return torch.ops.blockshock.linear(x, weight, bias, handle, features, transposed_y)

    @staticmethod
    def backward(ctx, dy):
        need = list(ctx.needs_input_grad[:3])
        grads = iter(torch.ops.blockshock.linear_backward(dy, *ctx.saved_tensors, ctx.handle, need, ctx.transposed))
        return *(next(grads) if wanted else None for wanted in need), None, None, None, None
