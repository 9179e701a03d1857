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


def unsupported(device: torch.device, dtype: torch.dtype) -> str:
    """Why this backend cannot run there; "" when it can."""
    return "" if dtype.is_floating_point else f"weights of floating point are needed, not {dtype}"


def too_large(shape: tuple[int, ...]) -> str:
    """No weight is too large: always ""."""
    return ""


def pack(weight: Tensor, mask: Tensor) -> Packed:
    """Pack weight [N, K] by mask, bool [N, K]; see `packing.pack` for the errors."""
    return Packed("reference", tuple(weight.shape), weight.dtype, packing.pack(weight, mask))


def blank(mask: Tensor, dtype: torch.dtype) -> Packed:
    """The packed form of a 2:4 mask, bool [N, K], with values that are still to be written."""
    return pack(mask.to(dtype), mask)


def linear(x: Tensor, packed: Packed) -> Tensor:
    """x [B, K] times the packed weight [N, K] transposed: [B, N], contiguous. x may be a slice of a wider tensor.

    Raises:
        ValueError: x does not fit the weight by shape, dtype or device.
    """
    check_input(x, packed)
    return F.linear(x, packing.unpack(*packed.data))


def tune(x: Tensor, packed: Packed) -> None:
    """Nothing to choose here."""
