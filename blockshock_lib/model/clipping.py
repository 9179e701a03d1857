"""clip_grad_norm_ for a model of which some layers are shared by several ranks, ours and torch's own side by side."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from blockshock_lib.comm import Group
from blockshock_lib.layers import ShardedLinear


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """What torch.nn.utils.clip_grad_norm_ does with the dense model: one norm of all gradients, and all of them scaled
    in place by min(1, max_norm / (norm + 1e-6)), alike on every rank. Every rank calls it.

    Each entry of a layer's dW lies on one rank of its group, so those ranks put their norms together: one number each.
    DTensors do the same over their mesh; any other gradient is equal on all ranks and counts once.

    Args:
        model: whose modules may include this library's layers, in one group of ranks or several.
        max_norm: the largest norm that stays as it is.
        norm_type: p of the p-norm, over 0; inf for the largest entry.
        error_if_nonfinite: raise, on every rank, where the norm is NaN or infinite; no gradient has changed then.

    Returns: the norm before clipping, a float64 scalar.
    Raises: ValueError for another norm_type; RuntimeError as error_if_nonfinite says.
    """
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type must be over 0 or inf, not {norm_type}")
    layers = [module for module in model.modules() if isinstance(module, ShardedLinear)]
    shared = {parameter for layer in layers for parameter in layer.parameters(recurse=False)}
    norms = [_group_norm(group, members, p) for group, members in _by_group(layers).items()]
    norms += _norms([parameter for parameter in model.parameters() if parameter not in shared], p)
    total = get_total_norm(norms, p, error_if_nonfinite)
    for alike in _by_mesh(model.parameters()).values():
        clip_grads_with_norm_(alike, max_norm, total)
    return total


def _by_group(layers: list[ShardedLinear]) -> dict[Group, list[ShardedLinear]]:
    """In the order of the model's modules, which is the same on every rank: so is the order of the collectives."""
    found: dict[Group, list[ShardedLinear]] = {}
    for layer in layers:
        found.setdefault(layer.group, []).append(layer)
    return found


def _group_norm(group: Group, layers: list[ShardedLinear], p: float) -> Tensor:
    """The norm of these layers' gradients over all ranks of their group.

    Rank 0 counts the biases: it works in every method, where others may stand by and have none. Norms are gathered, not
    the sums of their powers: those overflow sooner, and a reduction by MAX may lose a NaN.
    """
    mine = [layer.weight for layer in layers] + [layer.bias for layer in layers if group.rank == 0]
    norm = torch.zeros(1, dtype=torch.float64, device=layers[0].like.device)
    if norms := _norms(dict.fromkeys(q for q in mine if q is not None), p):  # a tied weight counts once
        norm[0] = get_total_norm(norms, p)
    return torch.linalg.vector_norm(group.all_gather(norm), p)


def _norms(parameters: Iterable[nn.Parameter], p: float) -> list[Tensor]:
    """Norms of the gradients, float64: of each plain tensor, and of the DTensors of each mesh together."""
    found = []
    for mesh, alike in _by_mesh(parameters).items():
        if mesh is None:  # in float32 at least: a norm in 16 bits is off by up to 0.4%
            found += [torch.linalg.vector_norm(q.grad, p, dtype=_wide(q.grad.dtype)) for q in alike]
        else:
            norm = get_total_norm([q.grad for q in alike], p)
            found.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return [norm.double() for norm in found]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> dict[object, list[nn.Parameter]]:
    """Those with a gradient, by its mesh; None stands for a plain tensor. No operation takes a list of both."""
    found: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            found.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(parameter)
    return found
