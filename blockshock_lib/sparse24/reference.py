"""The 2:4 product in plain torch: unpack, then multiply. It runs on any device and is the oracle of the others.

It is no fast path: every call writes the dense weight anew. Its use is that a machine without 2:4 hardware runs, and
checks, the same packed data.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blockshock_lib.sparse24 import packing
from blockshock_lib.sparse24.packed import Packed, check_input
from blockshock_lib.sparse24.pattern import Pattern


def unsupported(device: torch.device, dtype: torch.dtype) -> str:
    """Why this backend cannot run there; "" when it can."""
    return "" if dtype.is_floating_point else f"weights of floating point are needed, not {dtype}"


def too_large(shape: tuple[int, ...]) -> str:
    """No weight is too large: always ""."""
    return ""


def pack(weight: Tensor, mask: Tensor) -> Packed:
    """Pack weight [N, K] by mask, bool [N, K]; see `packing.pack` for the errors."""
    return Packed("reference", tuple(weight.shape), weight.dtype, packing.pack(weight, mask))


def blank(pattern: Pattern, dtype: torch.dtype) -> Packed:
    """The packed form of a mask [N, K], with values that are still to be written."""
    mask = pattern.mask()
    return pack(mask.to(dtype), mask)


def linear(x: Tensor, packed: Packed, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """x [B, K] times the packed weight [N, K] transposed, plus `bias` [N]: [B, N], contiguous; into `out` if given.

    x may be a slice of a wider tensor.

    Raises:
        ValueError: x, `out` or `bias` does not fit by shape, dtype or device.
    """
    check_input(x, packed, out, bias)
    y = F.linear(x, packing.unpack(*packed.data), bias)
    return y if out is None else out.copy_(y)


def tune(x: Tensor, packed: Packed) -> None:
    """Nothing to choose here."""
