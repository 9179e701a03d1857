"""The 2:4 products, behind one table: name -> how to pack a weight and how to multiply with it.

    backend = product.choose("auto", torch.device("cuda"))
    packed = backend.pack(weight, masks.make(mask, weight.shape, device="cuda"))
    backend.tune(x, packed)
    y = backend.linear(x, packed)          # x [B, K], y [B, N]

| name | packs with | multiplies with | runs on |
|---|---|---|---|
| reference | packing.pack | unpack, then a dense product | anything |
| torch | to_sparse_semi_structured | F.linear on the tensor subclass | NVIDIA GPUs from compute capability 8.0 |
| cslt | compress.py, cuSPARSELt's bytes | cuSPARSELt, planned once and tuned | the same |
| small | the same | small.cu, B <= 128, tuned | NVIDIA GPUs of compute capability 9.0 |
| tuned | the same | small or cslt, by what was measured for the batch | as cslt |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockshock_lib.sparse24 import cslt, cslt_tune, reference, small, stock, tuned
from blockshock_lib.sparse24.packed import Packed
from blockshock_lib.sparse24.pattern import Pattern

__all__ = ["BACKENDS", "Backend", "Packed", "choose"]


@dataclass(frozen=True)
class Backend:
    """One way to multiply with a 2:4 weight.

    Attributes:
        name: its key in `BACKENDS`.
        unsupported: (device, dtype) -> why it cannot run there, "" when it can.
        too_large: (shape [N, K]) -> why no weight of that size can be multiplied, "" when one can. Asks no device.
        pack: (weight [N, K], mask bool [N, K]) -> Packed. ValueError, UnsupportedError.
        blank: (pattern of a mask [N, K], dtype) -> Packed, its `values` still to be written: needs no dense weight.
            UnsupportedError.
        linear: (x [B, K], packed, out=None, bias=None) -> y [B, N], contiguous, in x's dtype; written into `out` [B, N]
            if given, `bias` [N] added in the product's epilogue where it has one. x may be a slice of a wider tensor.
        tune: (x [B, K], packed) -> None: choose what is fastest for this batch size, once, before timing.
        pack_both: (weight [N, K], pattern of a mask) -> Packed of the weight and of its transpose, in one pass; None
            where a backend has no such pass. ValueError, UnsupportedError.
        pack_magnitude: (weight [N, K]) -> Packed of the larger two of every four weights along K, in one pass; None as
            above. ValueError, UnsupportedError.
    """

    name: str
    unsupported: Callable[[torch.device, torch.dtype], str]
    too_large: Callable[[tuple[int, ...]], str]
    pack: Callable[[Tensor, Tensor], Packed]
    blank: Callable[[Pattern, torch.dtype], Packed]
    linear: Callable[..., Tensor]
    tune: Callable[[Tensor, Packed], None]
    pack_both: Callable[[Tensor, Pattern], tuple[Packed, Packed]] | None = None
    pack_magnitude: Callable[[Tensor], Packed] | None = None


_cslt = Backend(
    "cslt",
    cslt.unsupported,
    cslt.too_large,
    cslt.pack,
    cslt.blank,
    cslt.linear,
    cslt_tune.tune,
    cslt.pack_both,
    cslt.pack_magnitude,
)

_rows = (
    Backend(
        "reference",
        reference.unsupported,
        reference.too_large,
        reference.pack,
        reference.blank,
        reference.linear,
        reference.tune,
    ),
    Backend("torch", stock.unsupported, stock.too_large, stock.pack, stock.blank, stock.linear, stock.tune),
    _cslt,
    # The same packed weight, multiplied by other kernels.
    replace(_cslt, name="small", unsupported=small.unsupported, linear=small.linear, tune=cslt_tune.tune_small),
    replace(_cslt, name="tuned", linear=tuned.linear, tune=cslt_tune.tune_any),
)
BACKENDS: dict[str, Backend] = {row.name: row for row in _rows}


def choose(name: str, device: torch.device | str) -> Backend:
    """The backend of that name; "auto" is tuned on a CUDA device and reference elsewhere.

    Whether it can run there is for `Backend.unsupported` to say: a GPU without cuSPARSELt gets its reason, never
    another backend than the one asked for.

    Raises:
        ValueError: no such backend.
    """
    if name == "auto":
        name = "tuned" if torch.device(device).type == "cuda" else "reference"
    if name not in BACKENDS:
        raise ValueError(f"no 2:4 product is called {name!r}; there are auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]
