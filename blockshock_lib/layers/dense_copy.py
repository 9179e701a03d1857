"""A dense copy of a weight that lies otherwise in its layer, as a state dict has it: it is read, and not written into.

Importing this changes torch's nn.Parameter, which would take no such tensor.
"""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import guards
from blockshock_lib.layers.watch import describe


class DenseCopy(Tensor):
    """UnsupportedError for a write into it, or into a view of it, which its layer would not see. All else that is made
    of it is a plain tensor: its detach(), by which torch's DCP reads into a state dict, and what a file holds.
    """

    @classmethod
    def of(cls, dense: Tensor, name: str, layer: nn.Module, way: str) -> "DenseCopy":
        """The same values; the refusal says that `name` is a copy of what `layer` holds, and the way out."""
        with torch.inference_mode(False):  # where a tensor has no version, which tells of a write
            copy = Tensor._make_subclass(cls, dense.clone() if dense.is_inference() else dense)
        copy.said = f"{name} is a copy of what {describe(layer)} holds, which no write into it would change: {way}"
        return copy

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if torch.compiler.is_compiling() or func is Tensor.detach:
                return func(*args, **(kwargs or {}))
            copies = [(one, one._version) for one in tree_leaves((args, kwargs)) if isinstance(one, cls)]
            made = func(*args, **(kwargs or {}))
            if said := [one.said for one, version in copies if one._version != version]:
                raise UnsupportedError(said[0])
            return tree_map_only(Tensor, copies[0][0]._shown_as, made)

    def _shown_as(self, made: Tensor) -> Tensor:
        if type(made) is Tensor and torch._C._is_alias_of(made, self):
            made = made.as_subclass(type(self))
            made.said = self.said
        return made

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.detach().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: int) -> tuple:
        return self.detach().__reduce_ex__(protocol)


def _plain(own, cls: type, data: Tensor | None = None, *args, **kwargs) -> nn.Parameter:
    return own(cls, data.detach() if isinstance(data, DenseCopy) else data, *args, **kwargs)


nn.Parameter.__new__ = guards._around(nn.Parameter.__new__, _plain)
