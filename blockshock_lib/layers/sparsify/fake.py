"""Layers that train as if they were sparse: each pass multiplies what a schedule leaves of a dense parameter.

| schedule | what a pass multiplies, W of which `keep` stays | source |
|---|---|---|
| once | keep W, by one mask: prune, then retrain | Han et al. 2015, arXiv:1506.02626 |
| gradual | W without the smallest 1 - (1 - t)^3 of what `keep` drops | Zhu and Gupta 2017, arXiv:1710.01878 |
| decay | keep W + (1 - t) (1 - keep) W | Kao et al. 2022, arXiv:2209.07617 |
| s-ste | c sign(W) max(0, abs(W) - the second smallest of its four), c = <W, S> / <S, S> when made | arXiv:2409.09099 |

t goes from 0 to 1 over the schedule's steps; `keep` is taken anew in each pass, but for "once". A state that is loaded
brings a new `keep` and c, and the schedule's own state those that were.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from blockshock_lib.errors import UnsupportedError, allowed
from blockshock_lib.layers import guards
from blockshock_lib.layers.parts import whole
from blockshock_lib.layers.watch import describe

KINDS = ("once", "gradual", "decay", "s-ste")
GRADIENTS = ("straight-through", "sparse")


@dataclass
class PruneSchedule:
    """How far training has come; call `step()` after each step of the optimizer.

    Args:
        kind: a row of the table above.
        steps: of "gradual" and "decay", until the weight is wholly sparse.
        gradient: "straight-through": the parameter gets the gradient of what was multiplied, also where that is zero;
            "sparse": the true one, which is zero there.

    ValueError for another word, or steps that the kind does not take.
    """

    kind: str = "once"
    steps: int = 0
    gradient: str = "straight-through"
    done: int = 0

    def __post_init__(self):
        for what, given, known in (("schedule", self.kind, KINDS), ("gradient", self.gradient, GRADIENTS)):
            if given not in known:
                raise ValueError(f"{what} {given!r}: {allowed(given, known)}")
        if (self.kind in ("gradual", "decay")) != (self.steps > 0):
            raise ValueError(f"{self.kind!r} takes {'no steps' if self.steps else 'steps, at least 1'}")

    def step(self) -> None:
        self.done += 1

    @property
    def share(self) -> float:
        """t, from 0 to 1."""
        return min(1.0, self.done / self.steps) if self.steps else 1.0

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """What a resumed training needs beside the states of model and optimizer: steps done, masks and scales."""
        held = {"layers": [*self._held(model, "path")]} | {what: self._held(model, what) for what in ("kept", "scale")}
        return {"kind": self.kind, "steps": self.steps, "done": self.done} | held

    def load_state_dict(self, state: Mapping[str, Any], model: nn.Module) -> None:
        """Call it last: a state that the model loads brings new masks. ValueError: of another kind, steps, layers or
        shapes.
        """
        layers, kept = self._held(model, "path"), self._held(model, "kept")
        if state["kind"] != self.kind:
            raise ValueError(f"it is of {state['kind']!r}, this schedule is {self.kind!r}")
        if state.get("steps", self.steps) != self.steps:
            raise ValueError(f"it is of {state['steps']} steps, this schedule of {self.steps}")
        odd = (state["kept"].keys() ^ kept.keys()) | (state["scale"].keys() - layers.keys())
        if odd := odd | (layers.keys() ^ state.get("layers", layers)):
            how = "call fake_sparsify_ with the same config and filter, and before the model's state is loaded"
            raise ValueError(f"it is of other layers than the model's, as {min(odd)}: {how}")
        if odd := [name for name, value in state["kept"].items() if value.shape != kept[name].shape]:
            raise ValueError(f"it has another shape of mask than the model's for {odd[0]}")
        for what in ("kept", "scale"):
            for name, value in state[what].items():
                layer = model.get_submodule(name)
                setattr(layer, what, value.to(layer.weight.device))
        self.done = state["done"]

    def _held(self, model: nn.Module, what: str) -> dict[str, Any]:
        own = {name: one for name, one in model.named_modules() if getattr(one, "schedule", None) is self}
        return {name: value for name, one in own.items() if (value := getattr(one, what)) is not None}


class FakeSparse(nn.Linear):
    """What fake_sparsify_ makes of a layer in place: its parameters, names and hooks stay."""

    words, path = "trained as if it were sparse", ""

    def effective(self) -> Tensor:
        """What a pass multiplies, [N, K], with its gradient."""
        weight = self.weight.t() if self.conv1d else self.weight
        if self.kept is None and isinstance(weight, DTensor):
            raise UnsupportedError("a layer that trains as if sparse is split over ranks: its schedule is to be 'once'")
        if torch.compiler._is_exporting_flag or isinstance(weight, torch.fx.Proxy) or torch.jit.is_tracing():
            self._refuse_graph()
            value, factor = self._value(weight.detach())
            passed = weight - weight.detach()  # zeros with its gradient, where a graph keeps no Function
            return value + (passed * factor if self.schedule.gradient == "sparse" else passed)
        made = _Compiled if torch.compiler.is_compiling() else _Effective
        return made.apply(weight, *self._value(weight.detach()), self.schedule.gradient == "sparse")

    def _value(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(what is multiplied, its derivative by each weight)."""
        if self.schedule.kind == "s-ste":
            soft = soft_threshold(weight)
            return soft * self.scale, (soft != 0) * self.scale
        keep, share = self.config.keep(weight.abs()) if self.kept is None else self.kept, self.schedule.share
        factor = keep.to(weight.dtype)
        if self.schedule.kind == "decay":
            factor = torch.where(keep, 1.0, 1 - share).to(weight.dtype)
        elif self.schedule.kind == "gradual" and share < 1:
            dropped = weight.abs().masked_fill(keep, torch.inf)
            gone = round((1 - (1 - share) ** 3) * (keep.numel() - int(keep.sum())))
            least = dropped.flatten().kthvalue(gone).values if gone else -1
            factor = (dropped > least).to(weight.dtype)
        return weight * factor, factor

    def _refuse_graph(self) -> None:
        if self.schedule.steps:
            way = f"its schedule {self.schedule.kind!r} goes on, and a graph would not: take what dense_(model) leaves"
            raise UnsupportedError(f"{describe(self)} trains as if sparse, and {way}")

    def __prepare_scriptable__(self):
        raise UnsupportedError(f"torch.jit.script takes no {describe(self)}: script what dense_(model) leaves")

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.effective(), self.bias)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        if f"{prefix}weight" not in state_dict:
            return
        weight = (self.weight.t() if self.conv1d else self.weight).detach().contiguous()
        try:
            self.scale = whole(scale_of(weight)) if self.schedule.kind == "s-ste" else None
            if self.kept is not None:
                self.kept = self.config.kept(weight)
        except ValueError as error:
            errors.append(f"{prefix}weight: {error}")


class _Compiled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight, value, factor, sparse):
        return value

    @staticmethod
    def setup_context(ctx, inputs, output):
        factor = inputs[2] if inputs[3] else None
        ctx.save_for_backward(factor)
        ctx.save_for_forward(factor)

    @staticmethod
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return grad if factor is None else grad * factor, None, None, None


class _Effective(_Compiled):
    @staticmethod
    def jvp(ctx, moved, *_):  # torch.compile takes no Function that has one
        return _Compiled.backward(ctx, moved)[0]


def soft_threshold(weight: Tensor) -> Tensor:
    """S [N, K] of W: what each of four neighbours has beyond the second smallest of them, so that two or fewer stay."""
    groups = weight.unflatten(1, (-1, 4))
    size = groups.abs()
    return (groups.sign() * (size - size.sort(-1).values[..., 1:2]).clamp_min(0)).flatten(1)


def scale_of(weight: Tensor) -> Tensor:
    """c of W [N, K], a scalar; 1 of a weight of zeros."""
    soft = soft_threshold(weight)
    square = soft.square().sum()
    return torch.where(square > 0, (weight * soft).sum() / square, 1)


def fake(module: nn.Module, weight: Tensor, config: object, schedule: PruneSchedule, conv1d: type | None) -> None:
    own = {"config": config, "schedule": schedule, "was": type(module), "conv1d": conv1d}
    vars(module).update(own | {"out_features": weight.shape[0], "in_features": weight.shape[1]})
    module.register_buffer("kept", config.kept(weight) if schedule.kind == "once" else None, persistent=False)
    # From the start: buffers that come later are other ones to an AveragedModel that was made before.
    module.register_buffer("scale", scale_of(weight) if schedule.kind == "s-ste" else None, persistent=False)
    module.register_forward_pre_hook(guards.called)
    module.__class__ = FakeSparse


def unfake(module: nn.Module) -> None:
    """Undoes `fake`, also where that was interrupted; the parameter is as it is now."""
    module.__class__ = vars(module).get("was", type(module))
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is guards.called]:
        del hooks[key]
    for name in ("kept", "scale"):
        module._buffers.pop(name, None)
        module._non_persistent_buffers_set.discard(name)
    for name in ("config", "schedule", "was", "conv1d", "path"):
        vars(module).pop(name, None)
