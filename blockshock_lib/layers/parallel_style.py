"""Block-Shock as a style of torch.distributed.tensor.parallel, beside torch's own in one plan."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.layers import BlockShockLinear, autograd


class BlockShockParallel(ParallelStyle):
    """Turns an nn.Linear into a BlockShockLinear that the ranks of a 1-D mesh share.

    `parallelize_module(model, mesh, {"blocks.*.up": BlockShockParallel()})`. Input and output of the layer are whole on
    every rank; a DTensor that comes in is gathered first. Options are BlockShockLinear's, `mask` also the name of one;
    one that is 2:4 along the outputs too ("checkerboard", "transposable_random") also has a 2:4 backward.
    """

    def __init__(self, mask: Mask | str = "checkerboard", *, product="auto", update="packed", dw="auto", dx="auto"):
        super().__init__()
        self.mask = Mask.named(mask) if isinstance(mask, str) else mask
        self.options = {"product": product, "update": update, "dw": dw, "dx": dx}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Changes `module` itself, which parallelize_module keeps; UnsupportedError leaves it as it was."""
        if reason := _unsupported(module, device_mesh):
            raise UnsupportedError(reason)
        weight, bias = (self._equal(p, device_mesh) for p in (module.weight, module.bias))
        group, frozen = Group.of(device_mesh.get_group()), not module.weight.requires_grad
        layer = BlockShockLinear(weight, bias, mask=self.mask, group=group, frozen=frozen, **self.options)
        if bias is not None:
            layer.bias.requires_grad_(module.bias.requires_grad)
        layer.register_forward_pre_hook(_whole)
        vars(module).update(vars(layer.train(module.training)))
        module.__class__ = BlockShockLinear
        module.handle = autograd.handle_of(module)
        return module

    def _equal(self, parameter: nn.Parameter | None, mesh: DeviceMesh) -> torch.Tensor | None:
        """The parameter on the mesh's device with the values of the source rank, as torch's styles do it."""
        if parameter is None:
            return None
        tensor, group = parameter.detach().to(mesh.device_type, copy=True), mesh.get_group()
        if self.src_data_rank is not None:
            dist.broadcast(tensor, src=dist.get_global_rank(group, self.src_data_rank), group=group)
        return tensor


def _unsupported(module: nn.Module, mesh: DeviceMesh) -> str:
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


def _whole(_: nn.Module, inputs: tuple) -> tuple:
    """The input on every rank: a DTensor is gathered, and its gradient sharded again on the way back."""
    x, *more = inputs
    if isinstance(x, DTensor):
        x = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()
    return (x, *more)
