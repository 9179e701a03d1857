"""A weight compressed as cuSPARSELt does it, byte for byte, but by a mask and for W and W^T together.

A buffer is [N, 9/16 K] of the weight's dtype, 16 bits: N K/2 values row by row, then the metadata (metadata.py). The
library needs a pass for each orientation, each of about 30 times its bytes' time on an H200, and goes by value: a kept
zero may be given another place. Here the mask decides, and

| function | reads | writes | in bytes a weight |
|---|---|---|---|
| both | the weight | values and metadata of W and of W^T | 2 + 2 9/8 |
| values_of_both | the weight | the values of W and of W^T: each step with a fixed mask | 2 + 2 |
| blank | nothing | the metadata of W | 1/8 |
| magnitude | the weight | values and metadata of the two larger weights of each group | 2 + 9/8 |

and a byte a 4x4 tile where the mask repeats no tile. Each is one Triton kernel on a CUDA device (compress_kernels.py).
The torch version here runs on a CPU and is the oracle. All but `magnitude` read nothing back to the host, so they can
be captured in a CUDA graph once they have run. Values are moved bit for bit; nothing here has a gradient.

Shapes: N = out_features, K = in_features, both multiples of 64.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.sparse24 import masks, metadata
from blockshock_lib.sparse24.packing import MULTIPLE
from blockshock_lib.sparse24.pattern import Pattern, has_kernel, result, written

NOT_FINITE = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
"""The bits of infinity: those of |w| are as large where w is not finite, and smaller elsewhere."""


def both(weight: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """The buffers of W [N, K], bf16 or fp16, and of W^T, under a mask that is 2:4 along both dimensions.

    Raises:
        UnsupportedError: the mask is not 2:4 along N, or a dimension is no multiple of 64.
        ValueError: the weight does not fit the pattern by shape or device, or has not 16 bits.
    """
    pattern.require_transposable()
    weight = pattern.fitting(weight, pattern.shape)
    check(pattern.shape, weight.dtype)
    buffers = _empty(pattern.shape, weight), _empty(pattern.shape[::-1], weight)
    (values, bytes_), (values_t, bytes_t) = map(_parts, buffers)
    if has_kernel(weight):
        _kernels().compress(pattern, weight, values, values_t, bytes_, bytes_t)
    else:
        values_of_both(weight, pattern, values, values_t)
        bytes_.copy_(metadata.of(pattern))
        bytes_t.copy_(metadata.of(pattern.t()))
    return buffers


def values_of_both(weight: Tensor, pattern: Pattern, values: Tensor, values_t: Tensor) -> None:
    """Write the values [N, K/2] of W [N, K] and [K, N/2] of W^T, both contiguous, where the metadata are there already.

    Any dtype and multiples of 4; 16-bit values on a CUDA device read the weight once.

    Raises:
        UnsupportedError: the mask is not 2:4 along N.
        ValueError: a tensor does not fit the pattern by shape, dtype or device, or is not contiguous.
    """
    if not has_kernel(weight):
        pattern.gather(weight, out=values)
        pattern.transpose_values(values, out=values_t)
        return
    pattern.require_transposable()
    rows, columns = pattern.shape
    weight = pattern.fitting(weight, (rows, columns))
    targets = result(values, weight, (rows, columns // 2)), result(values_t, weight, (columns, rows // 2))
    _kernels().compress(pattern, weight, *targets)
    written(values, targets[0])
    written(values_t, targets[1])


def blank(pattern: Pattern, dtype: torch.dtype) -> Tensor:
    """The buffer [N, 9/16 K] of a mask, with its metadata and with values that are still to be written.

    Raises:
        UnsupportedError: a dimension is no multiple of 64.
        ValueError: not a dtype of 16 bits.
    """
    check(pattern.shape, dtype)
    buffer = _empty(pattern.shape, torch.empty(0, dtype=dtype, device=pattern.tiles.device))
    _, bytes_ = _parts(buffer)
    if has_kernel(buffer):
        _kernels().metadata(pattern, bytes_)
    else:
        bytes_.copy_(metadata.of(pattern))
    return buffer


def magnitude(weight: Tensor) -> Tensor:
    """The buffer of the two larger |w| of each group of four along K of W [N, K]; a tie goes to the lower index.

    As `masks.make` chooses for the family "magnitude". Waits for the device, to learn whether all weights are finite.

    Raises:
        UnsupportedError: a dimension is no multiple of 64.
        ValueError: not a matrix of 16-bit values, or a weight is NaN or infinite.
    """
    if weight.dim() != 2:
        raise ValueError(f"a weight has two dimensions [out_features, in_features], not {weight.dim()}")
    check(weight.shape, weight.dtype)
    weight = weight.detach()
    buffer = _empty(weight.shape, weight)
    values, bytes_ = _parts(buffer)
    if has_kernel(weight):
        bad = torch.zeros(1, dtype=torch.int32, device=weight.device)
        _kernels().magnitude(weight, values, bytes_, bad, NOT_FINITE[weight.dtype])
        if bool(bad):
            raise ValueError("a magnitude mask needs finite weights")
    else:
        keep = masks.make(SimpleNamespace(family="magnitude", pattern=""), tuple(weight.shape), weight=weight)
        pattern = Pattern.of(keep)
        pattern.gather(weight, out=values)
        bytes_.copy_(metadata.of(pattern))
    return buffer


def check(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises UnsupportedError where a dimension is no multiple of 64, ValueError for a dtype that has not 16 bits."""
    if dtype not in NOT_FINITE:
        raise ValueError(f"bf16 or fp16 is compressed, not {dtype}")
    if any(size < MULTIPLE or size % MULTIPLE for size in shape):
        raise UnsupportedError(
            f"a packed weight needs dimensions that are multiples of {MULTIPLE}, not {shape[0]}x{shape[1]}"
        )


def _empty(shape: tuple[int, int], like: Tensor) -> Tensor:
    rows, columns = shape
    return torch.empty(rows, columns * 9 // 16, dtype=like.dtype, device=like.device)


def _parts(buffer: Tensor) -> tuple[Tensor, Tensor]:
    """(values [N, K/2], metadata uint8 [N K/8]) of a buffer [N, 9/16 K]: views."""
    rows, half = buffer.shape[0], buffer.shape[1] * 8 // 9
    flat = buffer.view(-1)
    return flat[: rows * half].view(rows, half), flat[rows * half :].view(torch.uint8)


def _kernels():
    # Here, as Triton comes with PyTorch's CUDA builds only.
    from blockshock_lib.sparse24 import compress_kernels

    return compress_kernels
