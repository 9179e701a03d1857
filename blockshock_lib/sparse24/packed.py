"""A packed weight, whichever backend packed it, and the checks that all backends share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockshock_lib.errors import UnsupportedError


@dataclass(frozen=True)
class Packed:
    """One term of a weight in the form that its backend multiplies.

    Attributes:
        backend: the name in `product.BACKENDS` that packed it and can multiply it.
        shape: (N, K) = (out_features, in_features) of the dense weight.
        dtype: of the weight, the input and the output.
        data: the tensors whose storage holds the packed weight; the first begins with its values.
        extra: what else the backend keeps (a wrapper, tuned choices); never a second copy of the weight.
    """

    backend: str
    shape: tuple[int, int]
    dtype: torch.dtype
    data: tuple[Tensor, ...]
    extra: object = field(default=None, repr=False)

    @property
    def values(self) -> Tensor:
        """The kept weights [N, K/2], row by row: a view, so that writing into it changes the product.

        Equal to `weight[mask]`, and in its order, whichever backend packed it; but see stock.py for kept zeros.
        """
        rows, columns = self.shape
        return self.data[0].view(-1)[: rows * columns // 2].view(rows, columns // 2)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages behind `data`, each once. A wrapper's own `nbytes` would give the dense size."""
        storages = (tensor.untyped_storage() for tensor in self.data)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def check_input(x: Tensor, packed: Packed) -> None:
    """Raise ValueError where x [B, K] does not fit: the raw ops would read past its end instead of failing."""
    if x.dim() != 2 or x.shape[0] < 1 or x.shape[1] != packed.shape[1]:
        raise ValueError(f"the input must be [B, {packed.shape[1]}], not {list(x.shape)}")
    if x.dtype != packed.dtype or x.device != packed.data[0].device:
        raise ValueError(
            f"the input must be {packed.dtype} on {packed.data[0].device} as the weight is, not {x.dtype} on {x.device}"
        )


def require_support(reason: str, backend: str) -> None:
    """Raise UnsupportedError with the reason, unless it is empty."""
    if reason:
        raise UnsupportedError(f"2:4 product {backend!r} cannot run: {reason}")
