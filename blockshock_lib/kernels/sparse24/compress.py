"""A weight compressed as cuSPARSELt does it, byte for byte, but by a mask and for W and W^T together.

A buffer is [N, 9/16 K] of the weight's dtype, 16 bits: N K/2 values row by row, then N K/8 bytes of metadata: a nibble
for each group of four along K, `first | second << 2` (see packing.nibbles). The library does not publish their order:
it was read off its output on an H200 (cuSPARSELt 0.8.0), and `known` asks again on the device at hand. A block of 64
rows and 32 columns is 256 bytes; blocks follow each other row by row. Inside, from the slowest index to the fastest:

| index | of | stands for |
|---|---|---|
| tile | 4 | 16 rows |
| r | 8 | a row of the upper half of these, and the one 8 below it |
| gl | 4 | groups gl and gl + 4 |
| gh | 2 | which of the two groups |
| r8 | 2 | which of the two rows: the upper one is in the low nibble of a byte |

So 64 bits hold the eight groups of two rows.

The library needs a pass for each orientation, each of about 30 times its bytes' time on an H200, and goes by value: a
kept zero may be given another place. Here the mask decides, and the weight is read once: bytes a weight that
`values_of_both` moves are 2 + 2 and `blank` 1/8, and a byte a 4x4 tile where the mask repeats no tile. Each is one
Triton kernel on a CUDA device (kernels.py); the torch version here is its oracle. They read nothing back to the host,
so they can be captured in a CUDA graph once they have run. Values are moved bit for bit; nothing here has a gradient.

Shapes: N = out_features, K = in_features, both multiples of 64, else UnsupportedError.
"""

from functools import lru_cache

import torch
from torch import Tensor

from blockshock_lib.errors import UnsupportedError, first_line
from blockshock_lib.kernels.sparse24 import masks
from blockshock_lib.kernels.sparse24.mask import MASKS
from blockshock_lib.kernels.sparse24.masks import parts
from blockshock_lib.kernels.sparse24.packing import check_shape, nibbles
from blockshock_lib.kernels.sparse24.pattern import Pattern, result, triton_for, written

_DTYPES = (torch.bfloat16, torch.float16)


def values_of_both(weight: Tensor, pattern: Pattern, values: Tensor, values_t: Tensor) -> None:
    """Write the values [N, K/2] of W [N, K], any dtype, and [K, N/2] of W^T, both contiguous, under a mask that is 2:4
    along both dimensions, else UnsupportedError; ValueError where one of them does not fit the pattern.
    """
    pattern.require_transposable()
    rows, columns = pattern.shape
    weight = pattern.fitting(weight, (rows, columns))
    targets = result(values, weight, (rows, columns // 2)), result(values_t, weight, (columns, rows // 2))
    if kernels := triton_for(weight):
        kernels.compress(pattern, weight, *targets)
        written(values, targets[0])
        written(values_t, targets[1])
        return
    pattern.gather(weight, out=values)
    pattern.transpose_values(values, out=values_t)


def blank(pattern: Pattern, dtype: torch.dtype) -> Tensor:
    """The buffer [N, 9/16 K] of a mask, with its metadata and with values that are still to be written; unchecked."""
    rows, columns = pattern.shape
    buffer = torch.empty(rows, columns * 9 // 16, dtype=dtype, device=pattern.tiles.device)
    bytes_ = buffer.view(-1)[rows * columns // 2 :].view(torch.uint8)
    if kernels := triton_for(buffer):
        kernels.metadata(pattern, bytes_)
    else:
        bytes_.copy_(metadata(pattern))
    return buffer


def metadata(pattern: Pattern) -> Tensor:
    """The metadata of a pattern [N, K] in cuSPARSELt's order, in the simplest torch code: uint8 [N K/8]."""
    rows, columns = pattern.shape
    out = torch.empty(rows, columns // 8, dtype=torch.uint8, device=pattern.tiles.device)
    for part in parts(rows, columns, 64):
        blocks = nibbles(pattern.rows(part).mask()).view(-1, 4, 2, 8, columns // 32, 2, 4)
        low, high = blocks.permute(0, 4, 1, 3, 6, 5, 2).unbind(-1)  # rb, kb, tile, r, gl, gh
        out[part] = (low | high << 4).reshape(-1, columns // 8)
    return out.view(-1)


def known(device: torch.device) -> str:
    """Why the metadata of cuSPARSELt on this device are not those of `metadata`; "" when they are.

    Other GPUs or versions of the library may have another order: a small random weight of either dtype is compressed by
    the library, once a process and device, and compared byte for byte. What passes is not kept: a CUDA graph's capture,
    in which that cannot be asked, or a lack of memory, which is raised.
    """
    try:
        return _known(device)
    except UnsupportedError as passing:  # which no cache keeps
        return first_line(passing)


@lru_cache
def _known(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError("cuSPARSELt's metadata are unknown while a CUDA graph is captured: pack a weight before")
    keep = masks.make(MASKS["random"], (192, 320), device=device)  # no square, and no multiple of a larger block
    pattern = Pattern.of(keep)
    for dtype in _DTYPES:
        ones = keep.to(dtype)
        wanted = torch.cat((pattern.gather(ones).view(-1).view(torch.uint8), metadata(pattern)))
        try:
            found = torch._cslt_compress(ones)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return f"cuSPARSELt does not compress on {device}: {error}".splitlines()[0]
        if not torch.equal(found.view(-1).view(torch.uint8), wanted):
            return f"cuSPARSELt on {device} writes its compressed buffer in another order than the one known here"
    return ""


def check(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """UnsupportedError where a dimension is no multiple of 64, ValueError for a dtype that has not 16 bits."""
    if dtype not in _DTYPES:
        raise ValueError(f"bf16 or fp16 is compressed, not {dtype}")
    check_shape(shape)
