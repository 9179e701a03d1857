"""Context parallelism as a style of torch.distributed.tensor.parallel, beside torch's own in one plan."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers.attention.parallel import ContextParallelAttention
from blockshock_lib.layers.attention.sparse import SparseAttention


class ContextParallel(ParallelStyle):
    """Turns a SparseAttention into a ContextParallelAttention over the ranks of a 1-D mesh.

    `parallelize_module(model, mesh, {"blocks.*.attention": ContextParallel(length=65536)})`. What reaches the module is
    then each rank's share of the positions, `module.placement.positions(rank)`, which the rest of the model works on.
    UnsupportedError for another module or mesh.
    """

    def __init__(self, length: int, strategy: str = "pull", placement: str = "zigzag"):
        super().__init__()
        self.length, self.strategy, self.placement = length, strategy, placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not SparseAttention:
            raise UnsupportedError(f"ContextParallel shares a SparseAttention, not a {type(module).__name__}")
        if device_mesh.ndim != 1:
            raise UnsupportedError(f"ContextParallel takes a mesh of one dimension, not {device_mesh.ndim}: slice it")
        group, options = (
            Group.of(device_mesh.get_group()),
            (self.strategy, self.placement, module.backend, module.scale),
        )
        made = ContextParallelAttention(
            *(module.pattern, self.length, group, *options), block=module.block, device=device_mesh.device_type
        )
        vars(module).update({name: value for name, value in vars(made).items() if "_hook" not in name})
        module.__class__ = ContextParallelAttention
        return module
