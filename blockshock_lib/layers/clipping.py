"""clip_grad_norm_ for a model of which some layers are shared by several ranks, ours and torch's own side by side."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from blockshock_lib.comm import Group
from blockshock_lib.layers import autograd, watch
from blockshock_lib.layers.parts import refuse_unsummed

get_total_norm = getattr(get_total_norm, "__wrapped__", get_total_norm)  # which layers.guards keeps from users


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type=2.0, error_if_nonfinite: bool = False) -> Tensor:
    """What torch.nn.utils.clip_grad_norm_ does with the dense model, alike on every rank. Every rank calls it. Ranks
    that share a layer put the norms of their parts together; DTensors do the same over their mesh; any other gradient
    is equal on all ranks and counts once.

    Returns the norm before clipping, a float64 scalar. ValueError for a norm_type that is not over 0; RuntimeError, on
    every rank and before a gradient has changed, for a NaN or infinite norm if `error_if_nonfinite`; UnsupportedError
    where a GPT's gradients await its sum_gradients().
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is the module, by which shared layers are found, not its parameters: {type(model)}")
    refuse_unsummed(model.parameters())
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type must be over 0 or inf, not {norm_type}")
    shared: set[nn.Parameter] = set()
    groups: dict[Group, list[nn.Module]] = {}  # in the order of the modules, as the collectives are on every rank
    ours = set(map(id, autograd.layers()))
    for layer in model.modules():
        if id(layer) in ours and hasattr(layer, "split"):
            groups.setdefault(layer.group, []).append(layer)
            shared.update(layer.parameters(recurse=False))
    norms = [_group_norm(group, layers, p) for group, layers in groups.items()]
    norms += _norms([parameter for parameter in model.parameters() if parameter not in shared], p)
    total = get_total_norm(norms, p, error_if_nonfinite)
    for alike in _by_mesh(model.parameters()).values():
        clip_grads_with_norm_(alike, max_norm, total)
    return total


def _group_norm(group: Group, layers: list[nn.Module], p: float) -> Tensor:
    # Rank 0 counts what is whole, as biases: it works in every method, where others may stand by. Norms are gathered,
    # not the sums of their powers: those overflow sooner, and a reduction by MAX may lose a NaN.
    if group.connected:
        watch.count(layers[0], "clip_grad_norm_", ())
    named = [(layer, *one) for layer in layers for one in layer.named_parameters(recurse=False)]
    mine = [parameter for layer, name, parameter in named if name in layer.split or group.rank == 0]
    norms = _norms(dict.fromkeys(mine), p)  # a tied weight counts once
    held = layers[0].like if layers[0].weight is None else layers[0].weight
    norm = get_total_norm(norms, p).to(held.device, torch.float64)  # none: 0 on the CPU
    return torch.linalg.vector_norm(group.all_gather(norm.view(1)), p)


def _norms(parameters: Iterable[nn.Parameter], p: float) -> list[Tensor]:
    """Of the gradients, float64: of each plain tensor, and of the DTensors of each mesh together."""
    found = []
    for mesh, alike in _by_mesh(parameters).items():
        if mesh is None:  # in float32 at least: a norm in 16 bits is off by up to 0.4%
            kinds = [torch.promote_types(q.grad.dtype, torch.float32) for q in alike]
            found += [torch.linalg.vector_norm(q.grad, p, dtype=kind) for q, kind in zip(alike, kinds, strict=True)]
        else:
            norm = get_total_norm([q.grad for q in alike], p)
            found.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return [norm.double() for norm in found]


def _by_mesh(parameters: Iterable[nn.Parameter]) -> dict[object, list[nn.Parameter]]:
    """Those with a gradient, by its mesh, None for a plain tensor: no operation takes a list of both."""
    found: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            found.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    return found
