"""Where cuSPARSELt keeps the metadata of a 16-bit 2:4 weight, in the simplest torch code: the oracle of the compressor.

The library does not publish this. It was read off its output on an H200 (cuSPARSELt 0.8.0): for eight shapes every
group was given a code, and the place was noted where the code came out. `known` asks again on the device at hand.

A buffer holds N K/2 values, row by row, and N K/8 bytes of metadata behind them: a nibble for each group of four along
K, `first | second << 2` (see packing.nibbles). A block of 64 rows and 32 columns is 256 bytes, and the blocks follow
each other row by row. Inside a block, from the slowest index to the fastest:

| index | of | stands for |
|---|---|---|
| tile | 4 | 16 rows |
| r | 8 | a row of the upper half of these, and the one 8 below it |
| gl | 4 | groups gl and gl + 4 |
| gh | 2 | which of the two groups |
| r8 | 2 | which of the two rows: the upper one is in the low nibble of a byte |

So 64 bits hold the eight groups of two rows.
"""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace

import torch
from torch import Tensor

from blockshock_lib.errors import UnsupportedError, first_line
from blockshock_lib.sparse24 import masks, packing
from blockshock_lib.sparse24.pattern import Pattern

_CHUNK = 1 << 22  # weights handled at once
_PROBE = (192, 320)  # no square, and no multiple of a larger block


def of(pattern: Pattern) -> Tensor:
    """The metadata of a pattern [N, K], both multiples of 64: uint8 [N K/8], in cuSPARSELt's order."""
    rows, columns = pattern.shape
    out = torch.empty(rows, columns // 8, dtype=torch.uint8, device=pattern.tiles.device)
    step = max(1, _CHUNK // (64 * columns)) * 64
    for part in (slice(start, min(rows, start + step)) for start in range(0, rows, step)):
        blocks = packing.nibbles(pattern.rows(part).mask()).view(-1, 4, 2, 8, columns // 32, 2, 4)
        low, high = blocks.permute(0, 4, 1, 3, 6, 5, 2).unbind(-1)  # rb, kb, tile, r, gl, gh
        out[part] = (low | high << 4).reshape(-1, columns // 8)
    return out.view(-1)


def known(device: torch.device) -> str:
    """Why the metadata of cuSPARSELt on this device are not those of `of`; "" when they are.

    Another generation of GPUs or another version of the library may have another order. So both dtypes of a small
    random weight are compressed by the library, once a process and device, and compared byte for byte. What passes is
    not kept: a CUDA graph's capture, in which that cannot be asked, or a lack of memory, which is raised.
    """
    try:
        return _known(device)
    except UnsupportedError as passing:  # which no cache keeps
        return first_line(passing)


@lru_cache
def _known(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "cuSPARSELt's metadata cannot be asked for while a CUDA graph is captured: pack a weight once before"
        )
    keep = masks.make(SimpleNamespace(family="random", pattern=""), _PROBE, device=device)
    pattern = Pattern.of(keep)
    for dtype in (torch.bfloat16, torch.float16):
        ones = keep.to(dtype)
        wanted = torch.cat((pattern.gather(ones).view(-1).view(torch.uint8), of(pattern)))
        try:
            found = torch._cslt_compress(ones)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return f"cuSPARSELt does not compress on {device}: {error}".splitlines()[0]
        if not torch.equal(found.view(-1).view(torch.uint8), wanted):
            return f"cuSPARSELt on {device} writes its compressed buffer in another order than the one known here"
    return ""
