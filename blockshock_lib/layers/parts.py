"""Which part of a weight a rank holds, the part itself, alone or as a layer, and of which modules one may be made."""

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import autograd
from blockshock_lib.layers.watch import describe


@dataclass(frozen=True)
class Part:
    """Of a weight W [N, K], what one rank multiplies: mask term (None = all entries), output rows, input columns."""

    term: int | None
    rows: slice
    cols: slice


def equal_shard(features: int, index: int, count: int) -> slice:
    """The `index`-th of `count` equal runs of features. ValueError when they do not divide."""
    if features % count:
        raise ValueError(f"{features} features do not split into {count} equal shards")
    step = features // count
    return slice(index * step, (index + 1) * step)


def part_of(weight: Tensor, keep: Tensor | None, part: Part) -> Tensor:
    """A contiguous copy of one part of W [N, K], with +0.0 where the part's term does not hold the entry."""
    w = weight[part.rows, part.cols]
    if part.term is None:
        return w.clone(memory_format=torch.contiguous_format)
    return torch.where(term_mask(keep, part), w, w.new_zeros(()))


def laid_as(like: Tensor, tensor: Tensor) -> Tensor:
    """`tensor`, sharded as the DTensor `like` is; itself where that is none. No communication: all ranks hold it."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def whole(tensor: Tensor | None) -> Tensor | None:
    """A DTensor gathered: a collective of its mesh. Any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def term_mask(keep: Tensor, part: Part) -> Tensor:
    """bool [rows, cols]: where this part's term holds the entry, of which `keep` [N, K] says whether term 0 does."""
    kept = keep[part.rows, part.cols]
    return kept if part.term == 0 else ~kept


def refuse_size(layer: nn.Module, held: torch.Size, given: torch.Size) -> None:
    raise UnsupportedError(
        f"{describe(layer)} holds its part of the weight as {list(held)} and takes none of {list(given)}, as another "
        "module's or a state dict's is: load_dense() copies its part of a whole weight, and functional_call takes "
        "dict(named_parameters())"
    )


def require_plain(linear: nn.Module, name: str = "") -> None:
    """UnsupportedError where a module is no nn.Linear with a weight [N, K] of its own in values; `name` is its path."""
    if reason := _unlike(linear):
        raise UnsupportedError(f"{name or 'this module'} ({type(linear).__name__}) cannot be converted: {reason}")


def refuse_lost(linear: nn.Linear) -> None:
    """UnsupportedError for what a layer made of a copy would lose: hooks, more than weight and bias, and a tie."""
    where = f"this {type(linear).__name__}({linear.extra_repr()}): "
    made = "weight" not in linear._parameters  # by these hooks, as weight_norm does
    making = linear._forward_pre_hooks, linear._state_dict_hooks, linear._load_state_dict_pre_hooks
    refuse_hooks(linear, where, [hook for held in making for hook in held.values()] if made else ())
    if not made:
        refuse_more(linear, where)
    # Dead modules that wait in a cycle hold it too, until they are collected.
    if any(_others_hold(linear, name) for name in linear._parameters):
        gc.collect()
    if name := next((name for name in linear._parameters if _others_hold(linear, name)), ""):
        raise UnsupportedError(
            f"another module holds the {name} of this {linear}, and the tie would be lost: give it one of its own "
            f"first, as in linear.{name} = nn.Parameter(linear.{name}.detach().clone())"
        )


def refuse_hooks(module: nn.Module, where: str = "", known: Iterable[Callable] | None = ()) -> None:
    """UnsupportedError for hooks of a module but the `known`, where None is all, and for hooks of its parameters."""
    hooks = {name: held for name, held in vars(module).items() if name.endswith("_hooks") and isinstance(held, dict)}
    odd = {} if known is None else {name: set(held.values()).difference(known) for name, held in hooks.items()}
    what = [f"it has hooks ({name})" for name, found in odd.items() if found]
    for name, held in module._parameters.items():
        if held is not None and (held._backward_hooks or held._post_accumulate_grad_hooks):
            what.append(f"its {name} has hooks")
    if what:
        how = "which a new layer would lose: take them off first, and give them to it"
        raise UnsupportedError(f"{where}{what[0]}, {how}")


def refuse_more(module: nn.Module, where: str = "", own: Iterable[str] = ("weight", "bias")) -> None:
    """UnsupportedError for another parameter, buffer or module of a layer than its `own`."""
    if more := (module._parameters | module._buffers | module._modules).keys() - set(own):
        how = f"{min(more)} would be lost: keep it elsewhere"
        raise UnsupportedError(f"{where}it holds more than weight and bias, and {how}")


wrapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # every DistributedDataParallel


def refuse_wrapped(linear: nn.Module, options: Mapping[str, Any]) -> None:
    """UnsupportedError where DistributedDataParallel averages the module's gradients, and it is to be trained on: no
    weight of a new layer would be known there.
    """
    own = set() if options.get("frozen") else {id(parameter) for parameter in linear.parameters()}
    if own and any(own & set(map(id, wrapper.parameters())) for wrapper in wrapped):
        raise UnsupportedError(
            "DistributedDataParallel holds this layer already and would leave the one made of it out: convert the "
            "model first and wrap it then, or convert a copy.deepcopy of the module"
        )


_left: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}  # by id, what conversions have replaced, and where
_conversions = 0


def leave(module: nn.Module, path: str) -> None:
    """Notes that another module has taken the place of this one, or of what it was."""
    global _conversions
    _conversions += 1
    own = module.parameters(recurse=False)  # the frozen too, which a dense layer made of this one may train again
    _left.update((id(parameter), (weakref.ref(parameter), path or type(module).__name__)) for parameter in own)


def _refuse_left(optimizer: Optimizer, *_: object) -> None:
    if vars(optimizer).get("_looked", 0) == _conversions:
        return
    for parameter in (one for group in optimizer.param_groups for one in group["params"]):
        known, path = _left.get(id(parameter), (None, ""))
        if known and known() is parameter and not _module_holds(parameter):
            raise UnsupportedError(
                f"this {type(optimizer).__name__} holds the parameters that {path} had before it was converted, and "
                "would not train it: make the optimizer after the conversion"
            )
    optimizer._looked = _conversions


register_optimizer_step_pre_hook(_refuse_left)


def reshaped(tensors: Iterable[Tensor]) -> list[nn.Module]:
    """The layers of which one of these is the trained weight, and not as [N, K]: packed, or permuted."""
    trained = {id(one) for one in tensors if one.requires_grad}
    layers = (layer for layer in autograd.layers() if id(layer.weight) in trained)
    return [layer for layer in layers if layer.weight.shape != (layer.out_features, layer.in_features)]


def train_as(layer: nn.Module, linear: nn.Linear) -> None:
    """What is not trained of `linear` is not of the layer made of it, nor of a dense layer made of that."""
    layer.trained = trained_of(linear)
    for name, parameter in layer.named_parameters(recurse=False):
        parameter.requires_grad_(parameter.requires_grad and layer.trained[name])


def trained_of(layer: nn.Module | None) -> dict[str, bool]:
    """Whether a layer's "weight" and "bias" are trained; of one for inference, or standing by, as they were before."""
    if getattr(layer, "frozen", False) or not getattr(layer, "active", True):
        return vars(layer).get("trained", {"weight": True, "bias": True})
    return {name: getattr(getattr(layer, name, None), "requires_grad", False) for name in ("weight", "bias")}


def _others_hold(linear: nn.Linear, name: str) -> bool:
    held = linear._parameters[name]  # by its module, this and what asks
    return held is not None and sys.getrefcount(held) > 3 and _module_holds(held, linear._parameters)


def _module_holds(parameter: nn.Parameter, but: dict | None = None) -> bool:
    held = [one for one in gc.get_referrers(parameter) if type(one) is dict and one is not but]
    of = lambda one: one.get("_parameters") if type(one) is dict else getattr(one, "_parameters", None)  # noqa: E731
    return any(of(holder) is one for holder in (gc.get_referrers(*held) if held else ()) for one in held)


def _unlike(linear: nn.Module) -> str:
    kind = type(linear)
    if kind.__name__ == "Conv1D":
        return "it holds its weight as [K, N]: make an nn.Linear of weight.t() first, as docs/own_model.md shows"
    if hasattr(linear, "to_linear"):
        return "it is packed or sharded already: convert what its to_linear() gives"
    if not isinstance(linear, nn.Linear) or kind.forward is not nn.Linear.forward or "forward" in vars(linear):
        return "only an nn.Linear with nn.Linear's own forward can be: name those alone, as in 'mlp.[02]'"
    if isinstance(linear, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads this weight without calling the layer: leave it dense"
    if isinstance(linear, ReadLinear):
        return "its model reads this weight without calling the layer: leave it dense"
    if autograd.faking():
        return "torch's FakeTensorMode is on: convert it before, and call it there with allow_non_fake_inputs=True"
    if type(linear.weight) not in (Tensor, nn.Parameter):
        return f"its weight is a {type(linear.weight).__name__}: it must be a whole, plain tensor"
    return ""


class ReadLinear(nn.Linear):
    """The model may multiply by the weight itself, without a call: no other kind of layer can stand in its place."""

    def register_forward_hook(self, *_, **__):
        raise UnsupportedError(
            "the model may multiply by this weight without a call: hook its sublayer, which it calls"
        )

    register_forward_pre_hook = register_full_backward_hook = register_full_backward_pre_hook = register_forward_hook


class Share(ReadLinear):
    """A rank's part of an nn.Linear, known to what guards and clips shared layers; the model joins the parts."""

    collective, mask, path = "all-reduce", None, ""
    group: Group
    split: tuple[str, ...]

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        autograd.register(self)  # a copy is another layer


def cut(whole: nn.Linear, group: Group, dim: int) -> Share:
    """This rank's rows (dim 0) of W and the bias, or its columns (dim 1) of W and the whole bias."""
    weight = whole.weight.chunk(group.world_size, dim)[group.rank].detach()
    bias = (whole.bias if dim else whole.bias.chunk(group.world_size)[group.rank]).detach()
    linear = Share(weight.shape[1], weight.shape[0], device="meta")
    linear.group, linear.split = group, ("weight",) if dim else ("weight", "bias")
    autograd.register(linear)
    for name, part in (("weight", weight), ("bias", bias)):
        trained = getattr(whole, name).requires_grad
        setattr(linear, name, nn.Parameter(part.clone(memory_format=torch.contiguous_format), trained))
    return linear


unsummed: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose gradients are parts since their last backward


def refuse_unsummed(parameters: Iterable[nn.Parameter]) -> None:
    held = set(map(id, parameters))
    if any(id(parameter) in held for model in unsummed for parameter in model.parameters()):
        raise UnsupportedError(
            "each rank has its own part of the gradients of embeddings, norms and biases: call the GPT's "
            "sum_gradients() after the backward, or its ranks would drift apart"
        )
