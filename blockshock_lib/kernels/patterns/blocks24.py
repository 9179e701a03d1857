"""2:4 inside kept blocks: half of the weights of every block that is kept. A 2:4 product a row of blocks, of its blocks
side by side with the columns of x that they need, for no library multiplies both at once.
"""

import torch
from torch import Tensor

from blockshock_lib.kernels.patterns import blocks, two_four
from blockshock_lib.kernels.patterns.pattern import Counts, Kernel, Packed, Pattern
from blockshock_lib.kernels.sparse24.backends import choose


class Blocks24(Packed):
    """`lines`: of each row of n > 0 blocks its rows, the columns of x that it needs, int32, and a packed 2:4 weight
    [b, n b].
    """

    def __init__(self, weight: Tensor, mask: Tensor, block: int):
        self.lines, backend = [], choose("auto", weight.device)
        for row, kept in enumerate(blocks.kept_blocks(mask, block)):
            if bool(kept.any()):
                at = (kept.nonzero() * block + torch.arange(block, device=mask.device)).flatten().int()
                lines = slice(row * block, (row + 1) * block)
                self.lines.append((lines, at, two_four.TwoFour(weight[lines, at], mask[lines, at], 0, backend)))
        super().__init__(weight, **self.lines[0][2].tensors)

    def multiply(self, x: Tensor) -> Tensor:
        y = x.new_zeros(x.shape[0], self.shape[0])
        for lines, at, one in self.lines:
            y[:, lines] = one.multiply(x.index_select(1, at))
        return y

    def dense(self) -> Tensor:
        out = self.tensors["values"].new_zeros(self.shape)
        for lines, at, one in self.lines:
            out[lines, at.long()] = one.dense()
        return out

    def copy(self) -> "Blocks24":
        other = super().copy()
        other.lines = [(lines, at.clone(), one.copy()) for lines, at, one in self.lines]
        other.tensors = other.lines[0][2].tensors
        return other

    @property
    def nbytes(self) -> int:
        return sum(at.nbytes + one.nbytes for _, at, one in self.lines)


def weight_bytes(counts: Counts, itemsize: int) -> float:
    """Half of e, and half a byte of metadata to four, an entry of a kept block; 4 a column of one."""
    return counts.blocks * ((itemsize / 2 + 1 / 8) * counts.block**2 + 4 * counts.block)


def unsupported(device: torch.device, dtype: torch.dtype, shape: tuple[int, int], block: int) -> str:
    return two_four.unsupported(choose("auto", device), device, dtype, (block, block))


def keep(scores: Tensor, sparsity: float, block: int) -> Tensor:
    if sparsity < 0.5:
        raise ValueError(f"2:4 inside blocks leaves out half of the weights or more, not {sparsity:g}")
    inside = two_four.keep(scores, 0.5, 0)
    return inside & blocks.keep(scores * inside, 2 * sparsity - 1, block)


PATTERN = Pattern("2:4 in blocks", keep, (Kernel("blocks24", Blocks24, weight_bytes, unsupported),), True)
