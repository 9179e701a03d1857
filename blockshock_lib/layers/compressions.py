"""The ways to pack one term of a weight whose mask is known, for the forward and for dX; phase 1 compares them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from blockshock_lib.sparse24 import compress
from blockshock_lib.sparse24.packed import Packed
from blockshock_lib.sparse24.pattern import Pattern


def ways(kept: Tensor, mask: Tensor) -> dict[str, Callable[[], object]]:
    """Name -> a call that packs `kept` [N, k], bf16 or fp16 and zero outside `mask` [N, k]; its transpose too where the
    mask is 2:4 there. Empty for other dtypes, which no 2:4 kernel multiplies.

    "by mask" is one pass of our own. "library" is cuSPARSELt's compression, which goes by value, once for each
    orientation; it is given the transpose, which it would not make itself.
    """
    if kept.element_size() != 2:
        return {}
    pattern = Pattern.of(mask)
    if pattern.transposable:
        found = {"by mask": lambda: compress.both(kept, pattern)}
    else:
        found = {"by mask": lambda: _one(kept, pattern)}
    if kept.device.type == "cuda":
        sides = [kept, kept.t().contiguous()] if pattern.transposable else [kept]
        found["library"] = lambda: [torch._cslt_compress(side) for side in sides]
    return found


def _one(kept: Tensor, pattern: Pattern) -> Tensor:
    buffer = compress.blank(pattern, kept.dtype)
    packed = Packed("cslt", pattern.shape, kept.dtype, (buffer,))
    pattern.gather(kept, out=packed.values)
    return buffer
