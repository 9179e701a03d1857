"""Block-Shock as a style of torch.distributed.tensor.parallel, beside torch's own in one plan."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.layers import BlockShockLinear, autograd
from blockshock_lib.layers.guards import called, model_around, refuse_unequal
from blockshock_lib.layers.parts import leave, refuse_hooks, refuse_more, refuse_wrapped, require_plain, trained_of


class BlockShockParallel(ParallelStyle):
    """Turns an nn.Linear into a BlockShockLinear that the ranks of a 1-D mesh share.

    `parallelize_module(model, mesh, {"blocks.*.up": BlockShockParallel()})`. Input and output of the layer are whole on
    every rank; a DTensor that comes in is gathered first. Options are BlockShockLinear's, `mask` also the name of one;
    one that is 2:4 along the outputs too ("checkerboard", "transposable_random") also has a 2:4 backward. Hooks stay;
    one of the weight or bias is refused, as is what the module holds beside these two. A weight on the meta device
    becomes NaN on the mesh's, until load_state_dict brings its values.
    """

    def __init__(self, mask: Mask | str = "checkerboard", *, product="auto", update="packed", dw="auto"):
        super().__init__()
        self.mask = Mask.named(mask) if isinstance(mask, str) else mask
        self.options = {"product": product, "update": update, "dw": dw}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Changes `module` itself, which parallelize_module keeps; UnsupportedError leaves it as it was."""
        model, name = model_around(module)
        require_plain(module, name)
        try:
            refuse_wrapped(module, {})
            layer = self._convert(module, device_mesh, model, name)
        except (UnsupportedError, ValueError) as error:
            raise type(error)(f"{name}: {error}" if name else str(error)) from error
        layer.path = name
        return layer

    def _convert(self, module: nn.Linear, device_mesh: DeviceMesh, model: nn.Module, name: str) -> nn.Module:
        if reason := self._unsupported(module, device_mesh, model):
            raise UnsupportedError(reason)
        weight, bias = (self._equal(p, device_mesh) for p in (module.weight, module.bias))
        group, frozen = Group.of(device_mesh.get_group()), not module.weight.requires_grad
        given = {"weight": weight, "bias": bias, "mask": self.mask, "frozen": frozen}
        refuse_unequal(group, "BlockShockParallel", **given, **self.options)
        layer = BlockShockLinear(weight, bias, mask=self.mask, group=group, frozen=frozen, **self.options)
        layer.trained = trained_of(module)
        if bias is not None:
            layer.bias.requires_grad_(layer.trained["bias"])
        leave(module, name)
        vars(module).update({k: v for k, v in vars(layer.train(module.training)).items() if "_hook" not in k})
        module.__class__ = BlockShockLinear
        module.register_forward_pre_hook(called)
        autograd.register(module)
        return module

    def _equal(self, parameter: nn.Parameter | None, mesh: DeviceMesh) -> torch.Tensor | None:
        """The parameter on the mesh's device with the values of the source rank, as torch's styles do it."""
        if parameter is None:
            return None
        if parameter.is_meta:
            return torch.full(parameter.shape, torch.nan, dtype=parameter.dtype, device=mesh.device_type)
        tensor, group = parameter.detach().to(mesh.device_type, copy=True), mesh.get_group()
        if self.src_data_rank is not None:
            dist.broadcast(tensor, src=dist.get_global_rank(group, self.src_data_rank), group=group)
        return tensor

    def _unsupported(self, module: nn.Linear, mesh: DeviceMesh, model: nn.Module) -> str:
        if mesh.ndim != 1:
            return f"BlockShockParallel takes a mesh of one dimension, not {mesh.ndim}: slice it, as in mesh['tp']"
        if not isinstance(module.weight, nn.Parameter):
            return "a hook makes its weight anew, as weight_norm does: take that off first"
        refuse_hooks(module, known=None)
        refuse_more(module)
        if module.weight.is_meta and self.mask.family == "magnitude":
            return "a magnitude mask needs weights, and these are on the meta device: load them first"
        own = {id(parameter) for parameter in module.parameters()}
        for other, tied in model.named_modules():
            if tied is not module and any(id(parameter) in own for parameter in tied.parameters(recurse=False)):
                return f"it shares a parameter with {other}: give it one of its own, as the tie would be lost"
        return ""
