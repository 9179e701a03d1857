"""The 2:4 product as PyTorch offers it: `to_sparse_semi_structured` and `F.linear`.

This is what a user of the public interface gets, its host time included (it plans every call anew). Two things are
added because results would be wrong or unusable without them:
- x is made contiguous first. The op hands cuSPARSELt the address and the shape of x, not its strides, so a column slice
  of a wider tensor is multiplied as if its rows lay end to end: wrong values, no error. It also promises the library
  that x begins at a multiple of 16 bytes.
- y is made contiguous last. Up to torch 2.11 the op returns a transposed view, which a collective refuses.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

from blockshock_lib.sparse24 import packing
from blockshock_lib.sparse24.cslt import too_large, unsupported
from blockshock_lib.sparse24.packed import Packed, check_input, lying_flat, require_support
from blockshock_lib.sparse24.pattern import Pattern

__all__ = ["blank", "compress", "linear", "pack", "too_large", "tune", "unsupported"]


def pack(weight: Tensor, mask: Tensor) -> Packed:
    """Compress weight [N, K], bf16 or fp16 on a GPU, by mask, bool [N, K], as a user of the public interface would.

    That compresses by value: where a kept weight is zero, another place of its group may be noted as kept. The product
    is right all the same; `Packed.values` need then not be `weight[mask]`.

    Raises:
        ValueError: see `packing.check_weight`.
        UnsupportedError: this device, dtype or shape cannot be packed.
    """
    require_support(unsupported(weight.device, weight.dtype) or too_large(weight.shape), "torch")
    packing.check_weight(weight, mask)
    # torch.where, as weight * mask leaves -0.0 in the holes.
    return compress(torch.where(mask, weight.detach(), weight.new_zeros(())))


def blank(pattern: Pattern, dtype: torch.dtype) -> Packed:
    """The packed form of a mask [N, K], with values that are still to be written; it holds no kept zero.

    Raises:
        UnsupportedError: see `compress`.
    """
    require_support(too_large(pattern.shape), "torch")  # before the mask is written as weights
    return compress(pattern.mask().to(dtype))


def compress(kept: Tensor) -> Packed:
    """Compress a weight [N, K] that is masked already, unchecked: what training by the public interface repeats each
    step. Reads no value back to the host.

    Raises:
        UnsupportedError: more weights than the library multiplies rightly, see `cslt.MOST_WEIGHTS`.
    """
    require_support(too_large(kept.shape), "torch")
    forced = SparseSemiStructuredTensor._FORCE_CUTLASS
    try:
        # PyTorch's CUTLASS kernels run on compute capability 8.x only.
        SparseSemiStructuredTensor._FORCE_CUTLASS = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PyTorch API of SparseSemiStructuredTensor is in prototype")
            wrapper = to_sparse_semi_structured(kept.detach().contiguous())
    finally:
        SparseSemiStructuredTensor._FORCE_CUTLASS = forced
    return Packed("torch", tuple(kept.shape), kept.dtype, (wrapper.packed,), wrapper)


def linear(x: Tensor, packed: Packed, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """x [B, K] times the packed weight [N, K] transposed, plus `bias` [N]: [B, N], contiguous; copied into `out`.

    x may be a slice of a wider tensor, or begin anywhere; it is then copied first.

    Raises:
        ValueError: x, `out` or `bias` does not fit by shape, dtype or device.
    """
    check_input(x, packed, out, bias)
    y = F.linear(lying_flat(x), packed.extra).contiguous()
    if bias is not None:
        y.add_(bias)
    return y if out is None else out.copy_(y)


def tune(x: Tensor, packed: Packed) -> None:
    """The public interface of `F.linear` leaves no algorithm to choose: as a stock user would have it."""
