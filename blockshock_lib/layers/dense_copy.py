"""A dense copy of a weight that lies otherwise in its layer, as a state dict has it: it is read, and not written into.

Importing this changes torch's nn.Parameter, which would take no such tensor, and collectives, which would write it: a
layer's weight they may, and raise its version then, by which the layer sees it.
"""

import sys

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers import autograd, guards
from blockshock_lib.layers.watch import describe

WRITING = {"broadcast", "all_reduce", "reduce", "recv", "irecv", "scatter", "reduce_scatter"}


class DenseCopy(Tensor):
    """UnsupportedError for a write into it, or into a view of it, which its layer would not see. All else that is made
    of it is a plain tensor, as is what a file holds; an array of numpy is read-only, and torch's DCP alone reads into
    its detach().
    """

    @staticmethod
    def of(dense: Tensor, name: str, layer: nn.Module, way: str) -> "DenseCopy":
        """The same values; the refusal says that `name` is a copy of what `layer` holds, and the way out."""
        with torch.inference_mode(False):  # where a tensor has no version, which tells of a write
            copy = dense.clone() if dense.is_inference() else dense.detach()
        said = f"{name} is a copy of what {describe(layer)} holds, which no write into it would change: {way}"
        return refusing(copy, said)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if torch.compiler.is_compiling():
                written = args[0] if func.__name__[-1] == "_" != func.__name__[-2] else None  # as in mul_
                if isinstance(written, DenseCopy):
                    raise UnsupportedError(written.said)
                return func(*args, **(kwargs or {}))
            by = sys._getframe(1).f_globals.get("__name__", "") if func is Tensor.detach else ""
            if by.startswith("torch.distributed.checkpoint"):
                return func(*args, **(kwargs or {}))
            copies = [(one, one._version) for one in tree_leaves((args, kwargs)) if isinstance(one, DenseCopy)]
            made = func(*args, **(kwargs or {}))
            if said := [one.said for one, version in copies if one._version != version]:
                raise UnsupportedError(said[0])
            if type(made).__name__ == "ndarray" and not made.flags.owndata:
                made.flags.writeable = False
            return made if isinstance(made, torch.Size) else tree_map_only(Tensor, copies[0][0]._shown_as, made)

    def _shown_as(self, made: Tensor) -> Tensor:
        mine, other = (getattr(one, "_local_tensor", one) for one in (self, made))
        alias = type(made) in (Tensor, DTensor) and torch._C._is_alias_of(other, mine)
        return refusing(made, self.said) if alias else made

    def plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.plain().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: int) -> tuple:
        return self.plain().__reduce_ex__(protocol)


class SpreadCopy(DenseCopy, DTensor):
    """The same of a weight that ranks share as a DTensor."""

    def to_local(self, **how) -> Tensor:
        return self._shown_as(self.plain().to_local(**how))


def refusing(made: Tensor, said: str) -> Tensor:
    if not autograd.has_values(made):  # the class of a fake tensor is what makes it one
        return made
    made.__class__, made.said = SpreadCopy if isinstance(made, DTensor) else DenseCopy, said
    return made


def _plain(own, cls: type, data: Tensor | None = None, *args, **kwargs) -> nn.Parameter:
    return own(cls, data.plain() if isinstance(data, DenseCopy) else data, *args, **kwargs)


def _seen_written(own, given: object, name: str) -> None:
    if sys._getframe(2).f_code.co_name in WRITING and isinstance(given, Tensor):
        if isinstance(given, DenseCopy):
            raise UnsupportedError(given.said)
        with torch._C.DisableTorchFunctionSubclass():
            held = (layer._parameters["weight"] for layer in autograd.layers())
            # A collective raises no version, by which a layer sees that its weight, or an alias of it, was written.
            if any(hasattr(w, "looks") and torch._C._is_alias_of(given, w) for w in held) and not given.is_inference():
                torch.autograd.graph.increment_version(given)
    own(given, name)


nn.Parameter.__new__ = guards._around(nn.Parameter.__new__, _plain)
if own := getattr(distributed_c10d, "_check_single_tensor", None):  # torch's own, which another version may not have
    distributed_c10d._check_single_tensor = guards._around(own, _seen_written)
