"""A pruned linear layer on one device in any pattern of kernels/patterns, for inference: its packed weight is fixed.
Under `torch.compile` its product is one operator, `blockshock::pattern`, which finds it by a number as in autograd.py.
Importing this changes nn.Module's _apply, by which a model is moved.
"""

import contextlib
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.patterns.pattern import Packed
from blockshock_lib.layers import autograd, guards
from blockshock_lib.layers.dense_copy import DenseCopy
from blockshock_lib.layers.parts import trained_of
from blockshock_lib.layers.watch import describe

CHANGED = "call dense_(model), and write there"


class PatternLinear(nn.Module):
    """y = x W^T + b with W [N, K] packed. x gets its gradient, by a dense product; weight and bias get none.

    Its state is dense, as nn.Linear's. UnsupportedError: another dtype or device, and a state that is loaded.
    """

    path, conv1d, frozen = "", None, True

    def __init__(self, packed: Packed, bias: Tensor | None, words: str):
        super().__init__()
        self.packed, self.words = packed, words
        self.out_features, self.in_features = packed.shape
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self.register_forward_pre_hook(guards.called)
        autograd.register(self, _layers)

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        autograd.register(self, _layers)  # or the operator would find the original of a copy

    @property
    def weight(self) -> Tensor:
        """The kept values, in the kernel's order: their dtype and device are the layer's."""
        values = self.packed.tensors["values"]
        if values.dtype == self.packed.dtype:
            return values
        return DenseCopy.of(values.to(self.packed.dtype), "its weight", self, CHANGED)

    @weight.setter
    def weight(self, value: object):
        raise UnsupportedError(
            f"{describe(self)} takes no other weight, as functional_call lends that of a state_dict(): lend "
            f"dict(named_parameters()), or {CHANGED}"
        )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """UnsupportedError for the weight, and for one that is made anew of what is no parameter, as by prune."""
        if name == "weight":
            self.weight = None
        if not isinstance(param, nn.Parameter | None):
            guards._refuse_made_anew(self)
        super().register_parameter(name, param)

    def __prepare_scriptable__(self):
        raise UnsupportedError(f"torch.jit.script takes no {describe(self)}: script its to_linear() in its place")

    def forward(self, input: Tensor) -> Tensor:
        """y [..., N] of `input` [..., K], in the weight's dtype. ValueError: another width or dtype."""
        if isinstance(input, torch.fx.Proxy):
            guards.before_forward(self, input)
        x = input.reshape(-1, input.shape[-1])
        if not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.is_floating_point():
            x = x.to(self.packed.dtype)
        if torch.compiler.is_compiling():
            if torch.compiler._is_exporting_flag:
                raise UnsupportedError("torch.export cannot take a packed layer along: export its to_linear()")
        elif torch._C._are_functorch_transforms_active() or (forward_ad._current_level >= 0 and autograd._dual(x)):
            raise UnsupportedError("torch.func and forward-mode derivatives take no packed layer, but its to_linear()")
        elif not autograd.has_values(x):
            fits = self.in_features, self.packed.dtype, self.packed.tensors["values"].device
            if (given := (x.shape[1], x.dtype, x.device)) != fits:
                way = "for shapes alone call it under FakeTensorMode(allow_non_fake_inputs=True)"
                raise UnsupportedError(f"{describe(self)} takes (features, dtype, device) {fits}, not {given}: {way}")
        y = _Product.apply(x, self.handle, self.out_features)
        return (y if self.bias is None else y + self.bias).reshape(*input.shape[:-1], self.out_features)

    def tune(self, x: Tensor) -> None:
        self.packed.tune(x)

    def to_dense(self) -> Tensor:
        if not autograd.has_values(values := self.packed.tensors["values"]):
            return values.new_empty(self.packed.shape, dtype=self.packed.dtype)
        return self.packed.dense()

    def to_linear(self) -> nn.Linear:
        return linear_of(self.to_dense(), None if self.bias is None else self.bias.clone(), self)

    def hold_bytes(self) -> dict[str, int]:
        return {"weights": self.packed.nbytes}

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        dense, name = self.to_dense(), prefix + "weight"
        dense = dense.t().contiguous() if self.conv1d else dense
        destination[name] = DenseCopy.of(dense, f"{name} of a state dict", self, CHANGED)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        if (name := f"{prefix}weight") in state_dict:
            errors.append(f"{name} is packed for good: call dense_(model), load the state, and sparsify_ it again")
        else:  # as load_sparse_ has it
            missing.append(name)
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.words}"


def linear_of(weight: Tensor, bias: Tensor | None, like: nn.Module | None = None) -> nn.Linear:
    """A layer of this very weight [N, K] and bias, of which is trained what is of `like`: frozen without one."""
    linear, trained = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"), trained_of(like)
    linear.weight = nn.Parameter(weight, trained["weight"])
    linear.bias = None if bias is None else nn.Parameter(bias, trained["bias"])
    return linear


_layers: weakref.WeakValueDictionary[int, PatternLinear] = weakref.WeakValueDictionary()


def _before_moved(own: Callable, model: nn.Module, fn: Callable, recurse: bool = True) -> nn.Module:
    """Refuses for the whole model: nn.Module's own moves the layers before a packed one, and then meets that."""
    for layer in (layer for layer in model.modules() if isinstance(layer, PatternLinear)) if _layers else ():
        moved = fn(probe := layer.packed.tensors["values"].new_empty(0, dtype=layer.packed.dtype))
        if (moved.dtype, moved.device) != (probe.dtype, probe.device):
            raise UnsupportedError(
                f"{layer.path} is packed for {probe.dtype} on {probe.device}: call dense_(model), and move that"
            )
    return own(model, fn, recurse)


nn.Module._apply = guards._around(nn.Module._apply, _before_moved)
# As in autograd.py: shapes follow from the arguments, and a Function joins the operator to a gradient.
_ops = torch.library.Library("blockshock", "FRAGMENT")
_ops.define("pattern(Tensor rows, int handle, int features, bool turned) -> Tensor")


@torch.library.impl(_ops, "pattern", "CompositeExplicitAutograd")
def _pattern(rows, handle, features, turned):
    packed, device = _layers[handle].packed, rows.device.type
    # Autocast would change what is multiplied inside, quantized values for one.
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext():
        if turned:  # a gradient, for x
            return rows @ packed.dense()
        return packed.product(rows.contiguous()) if len(rows) else rows.new_empty(0, features)


@torch.library.register_fake("blockshock::pattern", lib=_ops)
def _(rows, handle, features, turned):
    return rows.new_empty(rows.shape[0], features)


def _made(*given) -> Tensor:
    alone = torch.compiler.is_compiling() or not autograd.has_values(given[0])
    return (torch.ops.blockshock.pattern if alone else _pattern)(*given)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, handle: int, features: int) -> Tensor:
        ctx.handle, ctx.features = handle, x.shape[1]
        # A gradient may be asked for once nothing else holds the layer.
        ctx.layer = None if torch.compiler.is_compiling() else _layers[handle]
        y = _made(x, handle, features, False)
        if torch.compiler.is_compiling() or not y._is_view():
            return y
        return torch.ops.aten._unsafe_view.default(y, y.shape)  # as in autograd.py

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        return _made(dy, ctx.handle, ctx.features, True), None, None
