"""Layers that torch's ColwiseParallel or RowwiseParallel has split over ranks, each rank's part packed 2:4.

These styles take nn.Linear alone: `parallelize_module` comes first, `sparsify_` then. Groups of four lie along the
inputs, which RowwiseParallel cuts between groups, so the parts together are what the whole weight would be.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers.dense_copy import DenseCopy, refusing
from blockshock_lib.layers.linear24 import Linear24
from blockshock_lib.layers.parts import trained_of
from blockshock_lib.layers.pattern_linear import linear_of
from blockshock_lib.layers.sparsify.configs import CALIBRATED, Config, Sparse24
from blockshock_lib.layers.sparsify.report import Row

COLWISE, ROWWISE = (
    {"weight": (Shard(0),), "bias": (Shard(0),)},
    {"weight": (Shard(1),), "bias": (Replicate(),)},
)


class ParallelLinear24(Linear24):
    """Of y = x W^T + b this rank's rows or columns of W, frozen. The style's hooks make x a DTensor and join what comes
    back; `out_features` and `in_features` are the part's, and a state dict holds DTensors, as before.
    """

    def forward(self, input: DTensor) -> DTensor:
        """x [..., K], whole, or sharded along K for a rowwise layer -> y [..., N], sharded along N, or partial sums."""
        y = super().forward(input.to_local(grad_placements=None if self.rowwise else [Partial()]))
        return DTensor.from_local(y, self.mesh, [Partial() if self.rowwise else Shard(-1)], run_check=False)

    def local(self, x: Tensor) -> Tensor:
        x = x.wait() if isinstance(x, AsyncCollectiveTensor) else x
        adds = not self.rowwise or self.mesh.get_local_rank() == 0  # the bias, once
        return (store := self.store).backend.linear(x, store.packed, None, self._parameters["bias"] if adds else None)

    multiply = local

    def spread(self, name: str, part: Tensor) -> DTensor:
        """The "weight" or "bias" of which this rank holds a part."""
        placements, shape, stride = self.places[name]
        return DTensor.from_local(part, self.mesh, placements, shape=shape, stride=stride, run_check=False)

    def to_linear(self) -> nn.Linear:
        """As torch's style left it, with zeros where it was pruned. No collective."""
        linear = nn.Linear(*self.places["weight"][1][::-1], bias=self.bias is not None, device="meta")
        for name, _ in linear.named_parameters():
            part = self.to_dense() if name == "weight" else self.bias.detach().clone()
            linear.register_parameter(name, nn.Parameter(self.spread(name, part), trained_of(self)[name]))
        return hooked(linear, self)

    def graphed(self, shapes: int = 8):
        raise UnsupportedError("the hooks of torch's style join what it gives: capture the whole model")

    @torch.inference_mode(False)
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.places:
            held = destination[prefix + name]
            copy = isinstance(held, DenseCopy)
            spread = self.spread(name, held.plain() if copy else held.detach())
            destination[prefix + name] = refusing(spread, held.said) if copy else spread

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        for name, (placements, shape, _) in self.places.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == shape:  # whole
                value = distribute_tensor(value.detach(), self.mesh, placements, src_data_rank=None)
            if isinstance(value, DTensor):
                state_dict = state_dict | {prefix + name: local(value.redistribute(self.mesh, placements))}
        super()._load_from_state_dict(state_dict, prefix, *rest)


def local(tensor: Tensor) -> Tensor:
    """Of a DTensor what this rank holds; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def split(module: nn.Module) -> bool:
    return isinstance(module._parameters.get("weight"), DTensor)


def part_of(module: nn.Module, config: Config) -> nn.Linear:
    """This rank's part of a layer whose weight is a DTensor; UnsupportedError where it cannot be packed."""
    own = {name: getattr(p, "placements", None) for name, p in module.named_parameters(recurse=False)}
    if all(not own.items() <= style.items() for style in (COLWISE, ROWWISE)) or len(hooks_of(module)) != 2:
        raise UnsupportedError("its weight is a DTensor, and not by torch's ColwiseParallel or RowwiseParallel alone")
    if not isinstance(config, Sparse24) or not config.frozen or config.dtype:
        wanted = "Sparse24 for inference (frozen=True) in the weight's own dtype alone"
        raise UnsupportedError(f"it is split over ranks, where {wanted} is packed")
    if config.method in CALIBRATED:
        raise UnsupportedError(f"it is split over ranks: prune by {config.method} before parallelize_module")
    return linear_of(local(module.weight).detach(), local(module.bias))


def hooks_of(module: nn.Module) -> list[Callable]:
    """The hooks that torch's style gave a layer: one before its forward, and one after it."""
    every = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [hook for hook in every if getattr(hook, "__module__", "") == "torch.distributed.tensor._api"]


def hooked(new: nn.Module, old: nn.Module) -> nn.Module:
    before, after = hooks_of(old)
    new.register_forward_pre_hook(before)
    new.register_forward_hook(after)
    return new


def parallel(new: Linear24, old: nn.Module) -> nn.Module:
    """A layer that holds the packed part of `old`, as what can stand in its place."""
    own, weight = dict(old.named_parameters(recurse=False)), old.weight
    new.__class__, new.mesh, new.rowwise = ParallelLinear24, weight.device_mesh, weight.placements == ROWWISE["weight"]
    new.places = {name: (p.placements, p.shape, p.stride()) for name, p in own.items()}
    return hooked(new, old)


def agreed(rows: list[Row], model: nn.Module) -> list[Row]:
    """The rows with what any rank that shares the model refuses, so that all leave the same layers. Collectives."""
    meshes = dict.fromkeys(module.weight.device_mesh for module in model.modules() if split(module))
    for mesh in (mesh for mesh in meshes if mesh.ndim == 1):
        every = Group.of(mesh.get_group()).gather_objects({row.name: row.refused for row in rows})
        for rank, said in enumerate(every):
            if odd := said.keys() ^ every[0].keys():
                raise UnsupportedError(f"rank {rank} takes other layers than rank 0, as {min(odd)}: give one filter")
        first = [next(filter(None, (said[row.name] for said in every)), "") for row in rows]
        rows = [replace(row, refused=why) for row, why in zip(rows, first, strict=True)]
    return rows
