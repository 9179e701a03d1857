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


ALIGNMENT = 16
"""Bytes at whose multiples the kernels expect x, out and bias to begin; one that does not may break the context."""


def check_input(x: Tensor, packed: Packed, out: Tensor | None = None, bias: Tensor | None = None) -> None:
    """Raise ValueError where x [B, K], out [B, N] or bias [N] does not fit: the raw ops would read past its end, and
    the kernels cannot write an `out` off a 16-byte boundary.
    """
    rows, (n, k) = x.shape[0] if x.dim() == 2 else 0, packed.shape
    if rows < 1 or x.shape[1] != k:
        raise ValueError(f"the input must be [B, {k}], not {list(x.shape)}")
    device = packed.data[0].device
    if x.dtype != packed.dtype or x.device != device:
        raise ValueError(f"the input must be {packed.dtype} on {device} as the weight is, not {x.dtype} on {x.device}")
    if out is not None:
        _check_given("out", out, (rows, n), x)
        if not aligned(out):
            raise ValueError(f"out must begin at a multiple of {ALIGNMENT} bytes")
    if bias is not None:
        _check_given("the bias", bias, (n,), x)


def _check_given(name: str, given: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    if given.shape != shape or given.dtype != x.dtype or given.device != x.device or not given.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {x.dtype} {list(shape)} on {x.device}, "
            f"not {given.dtype} {list(given.shape)} on {given.device}"
        )


def aligned(x: Tensor) -> bool:
    """Whether x begins where the kernels expect it."""
    return not x.data_ptr() % ALIGNMENT


def lying_flat(x: Tensor) -> Tensor:
    """x, or a copy where it is not contiguous or not `aligned`."""
    x = x.contiguous()
    return x if aligned(x) else x.clone()


def require_support(reason: str, backend: str) -> None:
    """Raise UnsupportedError with the reason, unless it is empty."""
    if reason:
        raise UnsupportedError(f"2:4 product {backend!r} cannot run: {reason}")
