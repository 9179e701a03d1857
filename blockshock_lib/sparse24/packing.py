"""The simplest packed 2:4 format, and so the oracle of the fast ones.

A weight [N, K] of which a mask keeps two of every four along K becomes
- values [N, K/2], in the weight's dtype: the kept weights in their order, equal to `weight[mask]`;
- metadata uint8 [N, K/8]: four bits a group, `first index | second index << 2`, the even group in a byte's low half.

That is 16 + 2 of every 32 bits of a dense bf16 weight: 9/16. The order of the index bits is the hardware's (PTX ISA,
"Sparse matrix storage", mma.sp for 16-bit types); cuSPARSELt's own order of whole metadata words is its secret.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.sparse24.masks import first_bad_group

MULTIPLE = 64
"""Both dimensions of a weight must be multiples of this: enough for every 16-bit kernel, and even for all of them."""

_CHUNK = 1 << 24  # weights handled at once: the int64 indices of a chunk stay below 64 MB


def check_weight(weight: Tensor, mask: Tensor) -> None:
    """Refuse what no backend can pack.

    Raises:
        ValueError: not 2-D, not floating point, a mask of another dtype, shape or device, or a mask that is not 2:4.
        UnsupportedError: a dimension is not a positive multiple of 64.
    """
    if weight.dim() != 2:
        raise ValueError(f"a weight has two dimensions [out_features, in_features], not {weight.dim()}")
    if not weight.is_floating_point():
        raise ValueError(f"a weight of floating point is needed, not {weight.dtype}")
    if mask.dtype != torch.bool or mask.shape != weight.shape or mask.device != weight.device:
        raise ValueError(
            f"the mask must be bool {tuple(weight.shape)} on {weight.device}, "
            f"not {mask.dtype} {tuple(mask.shape)} on {mask.device}"
        )
    if any(size < MULTIPLE or size % MULTIPLE for size in weight.shape):
        raise UnsupportedError(
            f"a packed weight needs dimensions that are multiples of {MULTIPLE}, not "
            f"{weight.shape[0]}x{weight.shape[1]}"
        )
    if (bad := first_bad_group(mask)) is not None:
        row, column, kept = bad
        raise ValueError(f"the mask is not 2:4: row {row}, columns {column} to {column + 3} keep {kept} of 4")


def pack(weight: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Pack the kept half of a weight. Nothing of `weight` is shared: later changes to it do not reach the result.

    Args:
        weight: [N, K], any floating dtype, both multiples of 64.
        mask: bool [N, K], True keeps; exactly two of every four along K.

    Returns:
        values [N, K/2] of the weight's dtype, metadata uint8 [N, K/8]; both contiguous.

    Raises:
        ValueError, UnsupportedError: see `check_weight`.
    """
    check_weight(weight, mask)
    rows, columns = weight.shape
    values = torch.empty(rows, columns // 2, dtype=weight.dtype, device=weight.device)
    metadata = torch.empty(rows, columns // 8, dtype=torch.uint8, device=weight.device)
    for part in _parts(rows, columns):
        bits = nibbles(mask[part])
        index = torch.stack((bits & 3, bits >> 2), -1)
        groups = weight.detach()[part].reshape(-1, columns // 4, 4)
        values[part] = groups.gather(2, index.long()).view(-1, columns // 2)
        metadata[part] = bits[:, 0::2] | bits[:, 1::2] << 4
    return values, metadata


def nibbles(mask: Tensor) -> Tensor:
    """The four bits of metadata of each group of a 2:4 mask, bool [N, K]: uint8 [N, K/4]."""
    m0, m1, m2, m3 = (m.to(torch.uint8) for m in mask.reshape(mask.shape[0], -1, 4).unbind(-1))
    # Of two kept places the first is 0, 1 or 2 and the second 1, 2 or 3: count the empty places before each.
    first = (1 - m0) * (2 - m1)
    second = 3 - m3.logical_not().to(torch.uint8) * (1 + (1 - m2))
    return first | second << 2


def unpack(values: Tensor, metadata: Tensor) -> Tensor:
    """The dense weight [N, K] of packed values [N, K/2] and metadata uint8 [N, K/8], with +0.0 in the holes.

    Reads no value back to the host, so it can be captured in a CUDA graph.

    Raises:
        ValueError: the two do not belong together by dtype, shape or device.
    """
    rows, half = values.shape if values.dim() == 2 else (0, 0)
    if metadata.dtype != torch.uint8 or metadata.shape != (rows, half // 4) or metadata.device != values.device:
        raise ValueError(
            f"values {tuple(values.shape)} on {values.device} need uint8 metadata [N, K/8] beside them, "
            f"not {metadata.dtype} {tuple(metadata.shape)} on {metadata.device}"
        )
    dense = torch.zeros(rows, 2 * half, dtype=values.dtype, device=values.device)
    for part in _parts(rows, 2 * half):
        byte = metadata[part]
        index = torch.stack((byte & 3, byte >> 2 & 3, byte >> 4 & 3, byte >> 6), -1)
        groups = dense[part].view(-1, half // 2, 4)
        groups.scatter_(2, index.view(-1, half // 2, 2).long(), values[part].reshape(-1, half // 2, 2))
    return dense


def _parts(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _CHUNK // columns)
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))
