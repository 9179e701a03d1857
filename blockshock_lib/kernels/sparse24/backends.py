"""The 2:4 products, behind one table: name -> how to pack a weight and how to multiply with it.

| name | packs with | multiplies with | runs on |
|---|---|---|---|
| reference | packing.pack | unpack, then a dense product | anything |
| torch | to_sparse_semi_structured | F.linear on the tensor subclass | NVIDIA GPUs from compute capability 8.0 |
| cslt | compress.py, cuSPARSELt's bytes | cuSPARSELt, planned once and tuned | the same |
| small | the same | small.cu, B <= 256, tuned | NVIDIA GPUs of compute capability 9.0 |
| tuned | the same | small or cslt, by what was measured for the batch | as cslt |
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from blockshock_lib.kernels.sparse24 import cslt, packing, small, stock, tune
from blockshock_lib.kernels.sparse24.packing import Packed
from blockshock_lib.kernels.sparse24.pattern import Pattern
from blockshock_lib.kernels.sparse24.plans import Setting
from blockshock_lib.kernels.sparse24.small import Config

_COLUMNS = 1024  # of a weight, that are read off its packed form at once


@dataclass(frozen=True)
class Backend:
    """What packs raises ValueError for what does not fit, UnsupportedError for what cannot run there.

    Attributes:
        unsupported: (device, dtype) -> why it cannot run there, "" when it can.
        pack: (weight [N, K], mask bool [N, K]) -> Packed.
        blank: (pattern of a mask [N, K], dtype) -> Packed, its `values` still to be written; None where packing goes by
            value. Needs no dense weight.
        linear: (x [B, K], packed, out=None, bias=None) -> x times the weight transposed, plus `bias` [N]: y [B, N],
            contiguous, in x's dtype, written into `out` if given. x may be a slice of a wider tensor. ValueError.
        too_large: (shape [N, K]) -> why no weight of that size can be multiplied, "" when one can. Asks no device.
        tune: (x [B, K], packed) -> None: choose what is fastest for this batch size, once, before timing.
    """

    name: str
    unsupported: Callable[[torch.device, torch.dtype], str]
    pack: Callable[[Tensor, Tensor], Packed]
    blank: Callable[[Pattern, torch.dtype], Packed] | None
    linear: Callable[..., Tensor]
    too_large: Callable[[tuple[int, ...]], str] = lambda shape: ""
    tune: Callable[[Tensor, Packed], None] = lambda x, packed: None

    def unpacked(self, packed: Packed) -> Tensor:
        """What it holds, dense [N, K], by its products with the columns of the identity."""
        columns = packed.shape[1]
        dense = torch.empty(packed.shape, dtype=packed.dtype, device=packed.values.device)
        for start in range(0, columns, _COLUMNS):
            one = torch.eye(min(_COLUMNS, columns - start), columns, dtype=dense.dtype, device=dense.device)
            dense[:, start : start + one.shape[0]] = self.linear(one.roll(start, 1), packed).t()
        return dense

    def __reduce__(self) -> tuple:
        return choose, (self.name, "cpu")  # a pickled layer names it


_tuned = Backend("tuned", cslt.unsupported, cslt.pack, cslt.blank, tune.linear, cslt.too_large, tune.tune)
_library, _kernel = (
    {"linear": partial(tune.linear, kinds=(kind,)), "tune": partial(tune.tune, kinds=(kind,))}
    for kind in (Setting, Config)
)
_rows = (
    Backend(
        "reference",
        lambda _, dtype: "" if dtype.is_floating_point else f"weights of floating point are needed, not {dtype}",
        packing.pack,
        lambda pattern, dtype: packing.pack((mask := pattern.mask()).to(dtype), mask),
        packing.linear,
    ),
    # The public interface of `F.linear` leaves no algorithm to choose: as a stock user would have it.
    Backend("torch", cslt.unsupported, stock.pack, None, stock.linear, cslt.too_large),
    # The same packed weight, multiplied by other kernels.
    replace(_tuned, name="cslt", **_library),
    replace(_tuned, name="small", unsupported=small.unsupported, **_kernel),
    _tuned,
)
BACKENDS: dict[str, Backend] = {row.name: row for row in _rows}


def choose(name: str, device: torch.device | str) -> Backend:
    """The backend of that name, else ValueError; "auto" is tuned on a CUDA device and reference elsewhere, whether or
    not that can run there: a GPU without cuSPARSELt gets its reason, never another backend than the one asked for.
    """
    if name == "auto":
        name = "tuned" if torch.device(device).type == "cuda" else "reference"
    if name not in BACKENDS:
        raise ValueError(f"no 2:4 product is called {name!r}; there are auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]
