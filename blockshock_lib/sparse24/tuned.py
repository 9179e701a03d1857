"""The 2:4 product by whichever is fastest for the batch: the small-batch kernel or cuSPARSELt, on one packed weight.

Both read the same buffer, so nothing is packed twice. What is fastest is measured by `cslt_tune.tune_any`, once for a
shape and a batch, and kept on disk. A batch that nobody has tuned goes to the small-batch kernel where that takes it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from blockshock_lib.sparse24 import cslt, small
from blockshock_lib.sparse24.packed import Packed, check_input
from blockshock_lib.sparse24.tuning import Setting


def linear(x: Tensor, packed: Packed, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """x [B, K] times the packed weight [N, K] transposed, plus `bias` [N]: [B, N], contiguous; into `out` if given.

    x may be a slice of a wider tensor. Uses the way that was tuned for this batch, padded to a multiple of 8.

    Raises:
        ValueError: x, `out` or `bias` does not fit by shape, dtype or device.
    """
    check_input(x, packed, out, bias)
    rows = cslt.padded(x.shape[0])
    way = packed.extra.get(rows) or _untuned(packed.shape, rows, packed.dtype, x.device)
    return multiply(x, packed.data[0], packed.shape, way, out, bias)


def multiply(
    x: Tensor,
    buffer: Tensor,
    shape: tuple[int, int],
    way: Setting | small.Config,
    out: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """The product of x [B, K] that fits `buffer` of a weight of this shape [N, K], this way; unchecked.

    Raises:
        RuntimeError: the library refuses the setting.
    """
    one = small if isinstance(way, small.Config) else cslt
    return one.multiply(x, buffer, shape, way, out, bias)


@functools.lru_cache(4096)
def _untuned(shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device) -> Setting | small.Config:
    if rows <= small.MOST_ROWS and not small.unsupported(device, dtype):
        return small.default(shape, rows)
    return Setting()
