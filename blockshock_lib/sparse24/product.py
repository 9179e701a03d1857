"""The 2:4 products, behind one table: name -> how to pack a weight and how to multiply with it.

    backend = product.choose("auto", torch.device("cuda"))
    packed = backend.pack(weight, masks.make(mask, weight.shape, device="cuda"))
    backend.tune(x, packed)
    y = backend.linear(x, packed)          # x [B, K], y [B, N]

| name | packs with | multiplies with | runs on |
|---|---|---|---|
| reference | packing.pack | unpack, then a dense product | anything |
| torch | to_sparse_semi_structured | F.linear on the tensor subclass | NVIDIA GPUs from compute capability 8.0 |
| cslt | torch._cslt_compress of the mask, then the values | torch._cslt_sparse_mm, tuned | the same |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockshock_lib.sparse24 import cslt, cslt_tune, reference, stock
from blockshock_lib.sparse24.packed import Packed

__all__ = ["BACKENDS", "Backend", "Packed", "choose"]


@dataclass(frozen=True)
class Backend:
    """One way to multiply with a 2:4 weight.

    Attributes:
        name: its key in `BACKENDS`.
        unsupported: (device, dtype) -> why it cannot run there, "" when it can.
        too_large: (shape [N, K]) -> why no weight of that size can be multiplied, "" when one can. Asks no device.
        pack: (weight [N, K], mask bool [N, K]) -> Packed. ValueError, UnsupportedError.
        blank: (mask bool [N, K], dtype) -> Packed, its `values` still to be written: needs no dense weight. The mask is
            2:4, which is not looked at again. UnsupportedError.
        linear: (x [B, K], packed) -> y [B, N], contiguous, in x's dtype. x may be a slice of a wider tensor.
        tune: (x [B, K], packed) -> None: choose what is fastest for this batch size, once, before timing.
    """

    name: str
    unsupported: Callable[[torch.device, torch.dtype], str]
    too_large: Callable[[tuple[int, ...]], str]
    pack: Callable[[Tensor, Tensor], Packed]
    blank: Callable[[Tensor, torch.dtype], Packed]
    linear: Callable[[Tensor, Packed], Tensor]
    tune: Callable[[Tensor, Packed], None]


BACKENDS: dict[str, Backend] = {
    "reference": Backend(
        "reference",
        reference.unsupported,
        reference.too_large,
        reference.pack,
        reference.blank,
        reference.linear,
        reference.tune,
    ),
    "torch": Backend("torch", stock.unsupported, stock.too_large, stock.pack, stock.blank, stock.linear, stock.tune),
    "cslt": Backend("cslt", cslt.unsupported, cslt.too_large, cslt.pack, cslt.blank, cslt.linear, cslt_tune.tune),
}


def choose(name: str, device: torch.device | str) -> Backend:
    """The backend of that name; "auto" is cslt on a CUDA device and reference elsewhere.

    Whether it can run there is for `Backend.unsupported` to say: a GPU without cuSPARSELt gets its reason, never
    another backend than the one asked for.

    Raises:
        ValueError: no such backend.
    """
    if name == "auto":
        name = "cslt" if torch.device(device).type == "cuda" else "reference"
    if name not in BACKENDS:
        raise ValueError(f"no 2:4 product is called {name!r}; there are auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]
