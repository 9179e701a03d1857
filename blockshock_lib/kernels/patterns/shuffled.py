"""Blocks of a shuffled weight: rows and columns are ordered by their sums, so that large entries lie together, and the
blocks are kept there. The idea of Shfl-BW (Huang et al., DAC 2022, arXiv 2203.05016), with a simpler order.

The mask alone tells the order: rows of one row of blocks keep the same columns.
"""

import torch
from torch import Tensor

from blockshock_lib.kernels.patterns import blocks
from blockshock_lib.kernels.patterns.pattern import Counts, Kernel, Packed, Pattern


class Shuffled(Packed):
    """A weight in shuffled order packed in blocks, and both orders: x's columns and y's are moved in every call."""

    def __init__(self, weight: Tensor, mask: Tensor, block: int):
        rows, columns = order(mask, block), order(mask.t(), block)
        self.inner = blocks.Bsr(weight[rows][:, columns], mask[rows][:, columns], block)
        own = {"rows_order": rows.argsort().int(), "columns_order": columns.int()}
        super().__init__(weight, **self.inner.tensors, **own)

    def multiply(self, x: Tensor) -> Tensor:
        y = self.inner.multiply(x.index_select(1, self.tensors["columns_order"]))
        return y.index_select(1, self.tensors["rows_order"])

    def tune(self, x: Tensor) -> None:
        self.inner.tune(x)

    def dense(self) -> Tensor:
        columns = self.tensors["columns_order"].argsort()
        return self.inner.dense()[self.tensors["rows_order"].long()][:, columns]

    def copy(self) -> "Shuffled":
        other = super().copy()
        other.inner = self.inner.copy()
        other.tensors |= other.inner.tensors
        return other


def order(mask: Tensor, block: int) -> Tensor:
    """int64 [N]: rows that keep the same columns beside each other. ValueError where these are not whole blocks."""
    _, pattern, many = mask.unique(dim=0, return_inverse=True, return_counts=True)
    if bool((many % block).any()):
        raise ValueError(f"the mask is not of shuffled blocks of {block}: some row keeps columns of its own")
    return pattern.argsort(stable=True)


def weight_bytes(counts: Counts, itemsize: int) -> float:
    """As blocks in their order, and 4 (N + K) for both orders."""
    counts = counts._replace(blocks=counts.kept // counts.block**2)
    return blocks.bsr_bytes(counts, itemsize) + 4 * (counts.n + counts.k)


def keep(scores: Tensor, sparsity: float, block: int) -> Tensor:
    rows, columns = (scores.double().sum(side).argsort(descending=True, stable=True) for side in (1, 0))
    kept = torch.empty_like(scores, dtype=torch.bool)
    kept[rows[:, None], columns] = blocks.keep(scores[rows][:, columns], sparsity, block)
    return kept


PATTERN = Pattern("shuffled blocks", keep, (Kernel("bsr_shuffled", Shuffled, weight_bytes, blocks.bsr),), True)
