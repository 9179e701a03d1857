"""What a rank holds of its 2:4 term W(g) [N, k]: its packed forms, and the parameter in one of three layouts."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import compress, stock
from blockshock_lib.kernels.sparse24.backends import Backend
from blockshock_lib.kernels.sparse24.packing import Packed
from blockshock_lib.kernels.sparse24.pattern import Pattern
from blockshock_lib.layers import autograd
from blockshock_lib.layers.watch import describe

F = nn.functional
TAKING = {F.linear, F.embedding, F.embedding_bag, F.multi_head_attention_forward, F.bilinear, torch.einsum}  # a weight
TAKING |= {Tensor.t, Tensor.T.__get__, Tensor.mT.__get__, torch.t, torch.mm, Tensor.mm, torch.matmul, Tensor.matmul}
TAKING |= {Tensor.__matmul__, Tensor.__rmatmul__}


class WatchedParameter(nn.Parameter):
    """A weight that is not W, but packed, a part or a masked master: what would multiply by it as by W refuses it.
    It counts the looks at its `data`, through which it may be written while its version stays. `lent`: its data was set
    to a tensor that somebody else may write at any time, as a flat buffer of many weights.
    """

    looks, lent = 0, False

    @property
    def data(self) -> Tensor:
        self.looks += 1
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, data: Tensor) -> None:
        same_kind = (data.dtype, data.device) == (self.dtype, self.device)  # else it is what Module.to made
        self.lent = self.lent or (same_kind and data.data_ptr() != self.data_ptr())
        Tensor.data.__set__(self, data)

    def __reduce_ex__(self, protocol: int) -> tuple:
        return type(self), (self.detach(), self.requires_grad)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in TAKING:
            given = {id(one) for one in (*args, *(kwargs or {}).values())}
            layer = next((one for one in autograd.layers() if id(one.weight) in given), None)
            name = getattr(func.__self__, "__name__", "") if func.__name__ == "__get__" else func.__name__
            raise UnsupportedError(
                f"{name} of the weight of {describe(layer) if layer else 'a layer'}, packed, a part or a master: "
                "call the layer, or multiply by its to_dense(), which every rank calls"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_foreach_supported_types += [WatchedParameter]  # or a model with one would be stepped slowly


class PackedValues:
    """W(g) packed; its values [N, k/2] are the parameter (T3, and frozen T2). `packed_t`, W(g)^T, is None until dX
    first asks for it, `kept_pattern` of a frozen layer until it is read off the packed form.
    """

    recompresses = False  # the parameter is dense, and packed anew after each step
    apart = False  # the values are a copy of the parameter, made for each pass, as somebody else may write that

    def __init__(self, backend: Backend, dense: Tensor, keep: Tensor, frozen: bool = False):
        self.backend, self.packed_t = backend, None
        pattern = Pattern.of(keep)
        self.kept_pattern = None if frozen else pattern
        self.transposable = pattern.transposable  # also once the pattern is read off
        self.packed = backend.pack(dense, keep)

    @property
    def pattern(self) -> Pattern:
        if self.kept_pattern is None:
            # Never by way of the weight's own values: what interrupts this, or runs beside it, must not meet ones.
            self.kept_pattern = Pattern.of(self.backend.unpacked(self.packed.ones()) != 0)
        return self.kept_pattern

    def transposed(self, weight: Tensor) -> Packed:
        if self.packed_t is None and self.backend.name == "torch":
            # By value, as a stock user does. Its metadata are no mask: a kept zero may have been given another place.
            self.packed_t = stock.compress(self.backend.unpacked(self.packed).t().contiguous())
        elif self.packed_t is None:
            packed_t = self.backend.blank(self.pattern.t(), self.packed.dtype)
            self.pattern.transpose_values(self.packed.values, out=packed_t.values)
            self.packed_t = packed_t  # once it is whole
        return self.packed_t

    def dense(self, weight: Tensor) -> Tensor:
        """W(g) [N, k] of the parameter that is in use."""
        return self.pattern.scatter(self.packed.values)

    def to_dense(self, tensor: Tensor) -> Tensor:  # of the parameter's layout, as [N, k]
        return self.pattern.scatter(tensor)

    def layout(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """A dense [N, k], or its kept entries [N, k/2], in the parameter's layout."""
        return tensor if tensor.shape == self.packed.values.shape else self.pattern.gather(tensor)

    def moved(self, weight: Tensor) -> bool:
        """Whether the weight is no longer what was packed: a copy of the layer, another dtype or device."""
        return weight.data_ptr() != self.packed.values.data_ptr()

    def holds_kind_of(self, weight: Tensor) -> bool:
        packed = self.packed
        return packed is not None and (weight.dtype, weight.device) == (packed.dtype, packed.values.device)

    def follow(self, weight: Tensor) -> None:
        """Packs a weight that lies elsewhere, and leaves it as it is."""
        self.packed.values.copy_(weight)
        self.refresh(weight)

    def steps(self) -> dict[str, Callable[[Tensor], None]]:
        """What to call with the weight after an optimizer changed it, in order."""
        return {"refresh": self.refresh} if self.transposable else {}

    def refresh(self, weight: Tensor) -> None:
        if self.packed_t is not None:
            self.pattern.transpose_values(self.packed.values, out=self.packed_t.values)

    def nbytes(self, weight: Tensor) -> dict[str, int]:
        parts = {"weights": self.packed, "copies": self.packed_t, "pattern": self.kept_pattern}
        held = {name: part.nbytes if part else 0 for name, part in parts.items()}
        copied = self.recompresses or self.apart  # else the packed values are the parameter itself
        return held | {"weights": weight.nbytes, "copies": held["weights"] + held["copies"]} if copied else held

    def __getstate__(self) -> dict:
        """A copy packs anew what its parameter and its pattern give."""
        return self.__dict__ | {"packed_t": None, "apart": False} | ({"packed": None} if self.recompresses else {})


class Master(PackedValues):
    """The parameter is a dense masked [N, k], masked and packed anew after each step (T1)."""

    recompresses = True
    place = 0  # where the parameter lay when it was masked last

    def dense(self, weight: Tensor) -> Tensor:
        return weight if _own(weight) else self.layout(weight)

    def to_dense(self, tensor: Tensor) -> Tensor:
        return self.layout(tensor)  # FSDP2's shards are masked nowhere else

    def layout(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        whole = tensor.shape == self.pattern.shape
        return self.pattern.masked(tensor, out=out) if whole else self.pattern.scatter(tensor)

    def moved(self, weight: Tensor) -> bool:
        return not self.holds_kind_of(weight)

    def follow(self, weight: Tensor) -> None:
        self.compress(weight)

    def steps(self) -> dict[str, Callable[[Tensor], None]]:
        return {"remask": self.remask, "compress": self.compress}

    def remask(self, weight: Tensor) -> None:
        """Zeros in the holes of the parameter. What has just been set as its data, with values there, is another's,
        who may still read it: the parameter then becomes a masked copy.
        """
        if not _own(weight):
            return
        if getattr(weight, "lent", False) and weight.data_ptr() != self.place:
            masked = self.layout(weight.detach())
            if not torch.equal(masked, weight):
                Tensor.data.__set__(weight, masked)
        else:
            self.layout(weight.detach(), out=weight.detach())
        self.place = weight.data_ptr()

    def compress(self, weight: Tensor) -> None:
        """The metadata of a known mask never change: only values are moved."""
        if self.packed_t is None:
            self.pattern.gather(weight, out=self.packed.values)
        else:
            compress.values_of_both(weight, self.pattern, self.packed.values, self.packed_t.values)


class StockMaster(Master):
    """The same as with PyTorch's own 2:4 op: a bool mask, and a compression by value after each step."""

    def __init__(self, backend: Backend, dense: Tensor, keep: Tensor, frozen: bool = False):
        super().__init__(backend, dense, keep)
        self.mask = keep

    def layout(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        if tensor.shape != self.mask.shape:
            return self.pattern.scatter(tensor)
        return torch.where(self.mask, tensor, tensor.new_zeros(()), out=out)

    def compress(self, weight: Tensor) -> None:
        weight = self.dense(weight)
        turned, self.packed, self.packed_t = self.packed_t is not None, None, None  # freed before the new are made
        self.packed = stock.compress(weight.detach())
        if turned:
            self.transposed(weight)

    def transposed(self, weight: Tensor) -> Packed:
        if self.packed_t is None:
            self.packed_t = stock.compress(self.dense(weight).detach().t().contiguous())
        return self.packed_t

    def nbytes(self, weight: Tensor) -> dict[str, int]:
        held = super().nbytes(weight)
        return held | {"pattern": held["pattern"] + self.mask.nbytes}


def _own(weight: Tensor) -> bool:
    """False for a weight that was lent, as by `torch.func.functional_call` or FSDP2: it may be read, never written."""
    return isinstance(weight, WatchedParameter)
