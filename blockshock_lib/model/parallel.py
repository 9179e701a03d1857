"""Block-Shock as a style of torch.distributed.tensor.parallel, beside torch's own in one plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import BlockShockLinear
from blockshock_lib.params import Mask


class BlockShockParallel(ParallelStyle):
    """Turns an nn.Linear into a BlockShockLinear that the ranks of a 1-D mesh share.

    `parallelize_module(model, mesh, {"blocks.*.up": BlockShockParallel()})`. Input and output of the layer are whole on
    every rank; a DTensor that comes in is gathered first.

    Args:
        mask: a Mask or the name of a shipped one; one whose terms are 2:4 along the outputs too ("checkerboard",
            "transposable_random") also has a 2:4 backward.
        product, update, dw, dx: as BlockShockLinear takes them.
    """

    def __init__(
        self,
        mask: Mask | str = "checkerboard",
        *,
        product: str = "auto",
        update: str = "packed",
        dw: str = "auto",
        dx: str = "auto",
    ):
        super().__init__()
        self.mask = Mask.named(mask) if isinstance(mask, str) else mask
        self.options = {"product": product, "update": update, "dw": dw, "dx": dx}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Changes `module` itself, for parallelize_module does not put what is returned in its place.

        Raises: UnsupportedError for what cannot become a BlockShockLinear; the module is then as it was.
        """
        if reason := _unsupported(module, device_mesh):
            raise UnsupportedError(reason)
        group = device_mesh.get_group()
        weight, bias = (self._equal(p, device_mesh, group) for p in (module.weight, module.bias))
        before, training = dict(vars(module)), module.training
        bias_trains = bias is not None and module.bias.requires_grad
        try:
            module.__class__ = BlockShockLinear
            module.__init__(
                weight,
                bias,
                mask=self.mask,
                group=Group.of(group),
                frozen=not before["_parameters"]["weight"].requires_grad,
                **self.options,
            )
        except BaseException:
            module.__class__ = nn.Linear
            vars(module).clear()
            vars(module).update(before)
            raise
        if module.bias is not None:
            module.bias.requires_grad_(bias_trains)
        module.register_forward_pre_hook(_whole)
        return module.train(training)

    def _equal(self, parameter: nn.Parameter | None, mesh: DeviceMesh, group: Any) -> torch.Tensor | None:
        """The parameter on the mesh's device with the values of the source rank, as torch's styles do it."""
        if parameter is None:
            return None
        tensor = parameter.detach().to(mesh.device_type, copy=True)
        if self.src_data_rank is not None:
            dist.broadcast(tensor, src=dist.get_global_rank(group, self.src_data_rank), group=group)
        return tensor


def _unsupported(module: nn.Module, mesh: DeviceMesh) -> str:
    """Why `module` cannot become a BlockShockLinear on `mesh`; "" when it can."""
    if type(module) is not nn.Linear:
        return f"BlockShockParallel takes an nn.Linear, not a {type(module).__name__}"
    if mesh.ndim != 1:
        return f"BlockShockParallel takes a mesh of one dimension, not {mesh.ndim}: slice it, as in mesh['tp']"
    if isinstance(module.weight, DTensor):
        return "this nn.Linear is sharded already: give each module one style"
    if module.weight.is_meta:
        return "this nn.Linear has no weights yet (meta device): its mask splits real ones"
    if any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks")):
        return "this nn.Linear has hooks, which the change would lose: register them afterwards"
    return ""


def _whole(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The input on every rank: a DTensor is gathered, and its gradient sharded again on the way back."""
    x, *more = inputs
    if isinstance(x, DTensor):
        x = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()
    return (x, *more)
