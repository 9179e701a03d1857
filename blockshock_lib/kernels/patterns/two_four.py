"""Two of every four neighbours along K: PyTorch's own product, cuSPARSELt's planned once, and the small-batch kernel's;
see kernels/sparse24.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from blockshock_lib.kernels.patterns.pattern import Counts, Kernel, Packed, Pattern
from blockshock_lib.kernels.sparse24 import masks, stock
from blockshock_lib.kernels.sparse24.backends import BACKENDS, Backend
from blockshock_lib.kernels.sparse24.mask import MASKS
from blockshock_lib.kernels.sparse24.packing import MULTIPLE
from blockshock_lib.kernels.sparse24.pattern import Pattern as Pattern24


class TwoFour(Packed):
    """A packed 2:4 weight with its backend."""

    def __init__(self, weight: Tensor, mask: Tensor, block: int, backend: Backend):
        self.backend, self.packed = backend, backend.pack(weight, mask)
        super().__init__(weight, values=self.packed.values)

    def multiply(self, x: Tensor) -> Tensor:
        return self.backend.linear(x, self.packed)

    def tune(self, x: Tensor) -> None:
        self.backend.tune(x, self.packed)

    @torch.no_grad()
    def mask(self) -> Tensor:
        """bool [N, K], read off the packed form."""
        return self.backend.unpacked(self.packed.ones()) != 0

    def dense(self) -> Tensor:
        mask = self.mask()
        return torch.zeros_like(mask, dtype=self.packed.dtype).masked_scatter_(mask, self.packed.values)

    def copy(self) -> "TwoFour":
        mask = self.mask()
        other = TwoFour(mask.to(self.packed.dtype), mask, 0, self.backend)
        other.packed.values.copy_(self.packed.values)
        if isinstance(other.packed.extra, dict):
            other.packed.extra.update(self.packed.extra)
        return other

    def again(self, weight: Tensor, kept: Pattern24) -> "TwoFour":
        """Another weight [N, K], zero where `kept` keeps nothing, as this one was tuned. Nothing is checked: the host
        waits for no device.
        """
        if self.backend.blank is None:
            packed = stock.compress(weight)
        else:
            packed = replace(self.backend.blank(kept, weight.dtype), extra=self.packed.extra)
            kept.gather(weight, out=packed.values)
        other = object.__new__(TwoFour)
        other.__dict__ |= vars(self) | {"packed": packed, "tensors": {"values": packed.values}}
        return other

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes


def weight_bytes(counts: Counts, itemsize: int) -> float:
    """e N K / 2, and four bits a group of four: N K / 8 (PTX ISA, mma.sp's metadata)."""
    return (itemsize / 2 + 1 / 8) * counts.n * counts.k


def unsupported(
    backend: Backend, device: torch.device, dtype: torch.dtype, shape: tuple[int, int], block: int = 0
) -> str:
    if any(side < MULTIPLE or side % MULTIPLE for side in shape):
        return f"dimensions must be multiples of {MULTIPLE}, not {shape[0]}x{shape[1]}"
    return backend.unsupported(device, dtype) or backend.too_large(shape)


def keep(scores: Tensor, sparsity: float, block: int) -> Tensor:
    if sparsity != 0.5:
        raise ValueError(f"2:4 leaves out half of the weights, not {sparsity:g}")
    return masks.make(MASKS["magnitude"], tuple(scores.shape), weight=scores, device=scores.device)


PATTERN = Pattern(
    "2:4",
    keep,
    tuple(
        Kernel(name, partial(TwoFour, backend=BACKENDS[name]), weight_bytes, partial(unsupported, BACKENDS[name]))
        for name in ("reference", "torch", "cslt", "tuned")
    ),
)
