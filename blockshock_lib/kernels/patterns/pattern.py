"""What every pattern gives: a mask of exact counts, packed forms with their products, and the least each must move.

A weight is [N, K] = [out_features, in_features], a mask bool of that shape, True where a weight is kept; x is [B, K].
The gradient for x is the product of the transposed weight, packed by the transposed mask: `Pattern.pack(W.t(), M.t())`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockshock_lib.errors import UnsupportedError, allowed


class Counts(NamedTuple):
    """Of a mask [N, K]: weights kept, rows and columns and blocks that hold one; without a block these are entries."""

    n: int
    k: int
    kept: int
    rows: int
    columns: int
    block: int
    blocks: int


class Cost(NamedTuple):
    """What one product must at least do: FLOPs (a multiply and an add are two), bytes read and written."""

    flops: float
    read: float
    written: float


class Packed(ABC):
    """A weight in the form that one kernel multiplies.

    Attributes:
        tensors: name -> all that it stores, "values" among them: the kept weights, in the kernel's order.
    """

    def __init__(self, weight: Tensor, **tensors: Tensor):
        self.shape, self.dtype, self.tensors = tuple(weight.shape), weight.dtype, tensors

    def product(self, x: Tensor) -> Tensor:
        """x [B, K] times the weight transposed: [B, N], contiguous, in the weight's dtype. ValueError where x does not
        fit; UnsupportedError where the kernel cannot take this batch.
        """
        device = self.tensors["values"].device
        if x.dim() != 2 or x.shape[0] < 1 or x.shape[1] != self.shape[1]:
            raise ValueError(f"the input must be [B, {self.shape[1]}], not {list(x.shape)}")
        if x.dtype != self.dtype or x.device != device:
            wanted = f"{self.dtype} on {device} as the weight is"
            raise ValueError(f"the input must be {wanted}, not {x.dtype} on {x.device}")
        return self.multiply(x)

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """`product` of an x that fits."""

    @abstractmethod
    def dense(self) -> Tensor:
        """[N, K], zero where nothing is kept."""

    def tune(self, x: Tensor) -> None:
        """Searches for the fastest way for x's batch, once; what was found is kept on disk. On a CPU nothing."""
        return None

    def copy(self) -> "Packed":
        other = object.__new__(type(self))
        other.__dict__ |= vars(self) | {"tensors": {name: one.clone() for name, one in self.tensors.items()}}
        return other

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.tensors.values())


@dataclass(frozen=True)
class Kernel:
    """One way to multiply a pattern.

    Attributes:
        pack: (weight, mask, block) -> Packed; both are checked before.
        weight_bytes: (counts, bytes an element) -> those of the packed weight, as `Packed.nbytes` counts them.
        unsupported: (device, dtype, shape [N, K], block) -> why it cannot run there, "" when it can.
    """

    name: str
    pack: Callable[[Tensor, Tensor, int], Packed]
    weight_bytes: Callable[[Counts, int], float]
    unsupported: Callable[[torch.device, torch.dtype, tuple[int, int], int], str] = lambda *place: ""

    def cost(self, counts: Counts, batch: int, itemsize: int) -> Cost:
        """By each weight kept, and each operand read or written once: the roofline's bytes (Williams et al. 2009). Of x
        the columns that some kept weight needs.
        """
        read = self.weight_bytes(counts, itemsize) + batch * counts.columns * itemsize
        return Cost(2.0 * batch * counts.kept, read, batch * counts.n * itemsize)


@dataclass(frozen=True)
class Pattern:
    """One pattern.

    Attributes:
        keep: (scores [N, K], sparsity, block) -> mask; `mask` checks before.
        kernels: those that multiply it; the first runs on any device.
        blocks: whether it takes a `block`: the side of one, or the rows or columns that go together in number.
    """

    name: str
    keep: Callable[[Tensor, float, int], Tensor]
    kernels: tuple[Kernel, ...]
    blocks: bool = False

    def mask(self, scores: Tensor, sparsity: float, block: int = 0) -> Tensor:
        """bool [N, K]: the largest of scores [N, K], which are finite and at least 0, in this pattern; so many that the
        share `sparsity` is left out, as near as whole units come. Of equal ones the first counts. ValueError.
        """
        if scores.dim() != 2 or not scores.is_floating_point():
            raise ValueError(f"scores are a matrix of floating point, not {scores.dtype} {list(scores.shape)}")
        if not bool(scores.isfinite().all()) or bool((scores < 0).any()):
            raise ValueError("scores must be finite and not negative: take the absolute value of a weight")
        if not 0 <= sparsity < 1:
            raise ValueError(f"a sparsity lies from 0 to below 1, not at {sparsity:g}")
        self._check_block(tuple(scores.shape), block)
        return self.keep(scores, sparsity, block)

    def pack(self, weight: Tensor, mask: Tensor, block: int = 0, kernel: str = "") -> Packed:
        """The weight [N, K] where `mask` keeps it, for this kernel, by default the first that can: see `choose`.
        ValueError where the mask is none of this pattern; UnsupportedError where the kernel cannot.
        """
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ValueError(f"a weight is a matrix of floating point, not {weight.dtype} {list(weight.shape)}")
        if mask.dtype != torch.bool or mask.shape != weight.shape or mask.device != weight.device:
            wanted = f"bool {list(weight.shape)} on {weight.device}"
            raise ValueError(f"the mask must be {wanted}, not {mask.dtype} {list(mask.shape)} on {mask.device}")
        self._check_block(tuple(weight.shape), block)
        if not bool(mask.any()):
            raise ValueError("the mask keeps nothing")
        return self.choose(weight, block, kernel).pack(weight.detach(), mask, block)

    def choose(self, weight: Tensor, block: int = 0, name: str = "") -> Kernel:
        """The kernel of that name, else the last that can run: the table has the fastest last. ValueError, and
        UnsupportedError with the reason.
        """
        every = {kernel.name: kernel for kernel in self.kernels}
        if name and name not in every:
            raise ValueError(f"{name!r} is no kernel of {self.name}; {allowed(name, every)}")
        place = weight.device, weight.dtype, tuple(weight.shape), block
        why = {one.name: one.unsupported(*place) for one in ([every[name]] if name else self.kernels)}
        if able := [one for one, reason in why.items() if not reason]:
            return every[able[-1]]
        raise UnsupportedError(f"{self.name}: " + "; ".join(f"{one}: {reason}" for one, reason in why.items()))

    def _check_block(self, shape: tuple[int, int], block: int) -> None:
        if bool(block) != self.blocks:
            raise ValueError(f"{self.name} takes {'a' if self.blocks else 'no'} block, not {block}")
        if block < 0 or (block and any(side % block for side in shape)):
            raise ValueError(f"blocks of {block} do not divide {shape[0]}x{shape[1]}; allowed: a divisor of both")


def largest(scores: Tensor, count: int) -> Tensor:
    """bool of scores' shape: exactly `count` of them, the largest, of equal ones the first."""
    flat = scores.flatten()
    if not 0 < count < flat.numel():
        return torch.full_like(scores, count > 0, dtype=torch.bool)
    least = flat.kthvalue(flat.numel() - count + 1).values
    keep, ties = flat > least, flat == least
    keep |= ties & (ties.cumsum(0) <= count - keep.sum())
    return keep.view(scores.shape)


def whole(share: float, units: int) -> int:
    """The nearest number of units, at least one: half a unit goes up."""
    return max(1, int(share * units + 0.5))


def tiled(tensor: Tensor, block: int) -> Tensor:
    """A view [N/b, K/b, b, b] of the blocks of a matrix [N, K]."""
    return tensor.unflatten(1, (-1, block)).unflatten(0, (-1, block)).transpose(1, 2)


def spread(blocks: Tensor, block: int) -> Tensor:
    """A mask of blocks [N/b, K/b] -> of entries [N, K]."""
    return blocks.repeat_interleave(block, 0).repeat_interleave(block, 1)


def counts(mask: Tensor, block: int = 0) -> Counts:
    blocks = tiled(mask, block).any(-1).any(-1) if block else mask
    return Counts(
        *mask.shape, *(int(each.sum()) for each in (mask, mask.any(1), mask.any(0))), block, int(blocks.sum())
    )


def empty_rows(mask: Tensor) -> int:
    """Outputs that keep no weight: they are zero, whatever x is."""
    return int((~mask.any(1)).sum())


def on_gpu(device: torch.device, dtype: torch.dtype, *_) -> str:
    """Why a kernel of 16-bit values on NVIDIA GPUs cannot run there."""
    if device.type != "cuda":
        return f"it runs on NVIDIA GPUs, not on the device type {device.type!r}"
    return "" if dtype in (torch.bfloat16, torch.float16) else f"it multiplies bf16 and fp16, not {dtype}"


def padded(x: Tensor, multiple: int) -> Tensor:
    """x [B, K], with rows of zeros up to a multiple of so many."""
    short = -x.shape[0] % multiple
    return F.pad(x, (0, 0, 0, short)) if short else x


def multiplied(matrix: Tensor, x: Tensor) -> Tensor:
    """y [B, N] of x [B, K] and a sparse matrix [N, K]; zeros before, which a product may only add to."""
    y = x.new_zeros(x.shape[0], matrix.shape[0])
    return torch.addmm(y.t(), matrix, x.t(), beta=0, out=y.t()).t()
