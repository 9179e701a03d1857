"""Whole rows or columns: what is left is a smaller dense product."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from blockshock_lib.kernels.patterns.pattern import Counts, Kernel, Packed, Pattern, largest, whole


class Smaller(Packed):
    """The kept rows and columns as a dense weight, and which they are; x is read, and y written, at those places."""

    def __init__(self, weight: Tensor, mask: Tensor, block: int):
        rows, columns = mask.any(1), mask.any(0)
        if not torch.equal(mask, rows[:, None] & columns):
            raise ValueError("the mask does not keep whole rows and columns")
        places = {"rows": rows.nonzero().flatten().int(), "columns": columns.nonzero().flatten().int()}
        super().__init__(weight, values=weight[rows][:, columns].contiguous(), **places)

    def multiply(self, x: Tensor) -> Tensor:
        values, rows, columns = self.tensors.values()
        y = F.linear(x if len(columns) == self.shape[1] else x.index_select(1, columns), values)
        return y if len(rows) == self.shape[0] else x.new_zeros(len(x), self.shape[0]).index_copy_(1, rows.long(), y)

    def dense(self) -> Tensor:
        values, rows, columns = self.tensors.values()
        out = values.new_zeros(self.shape)
        out[rows.long()[:, None], columns.long()] = values
        return out


def weight_bytes(counts: Counts, itemsize: int) -> float:
    """e a kept entry, and 4 a kept row and column."""
    return itemsize * counts.kept + 4 * (counts.rows + counts.columns)


def _keep(scores: Tensor, sparsity: float, block: int, side: int) -> Tensor:
    sums = scores.double().sum(1 - side)
    kept = largest(sums, min(len(sums), block * whole(1 - sparsity, len(sums) // block)))
    return kept.unsqueeze(1 - side).expand(scores.shape).clone()


def _pattern(name: str, side: int) -> Pattern:
    return Pattern(name, partial(_keep, side=side), (Kernel(f"smaller_{name}", Smaller, weight_bytes),), True)


ROWS, COLUMNS = _pattern("rows", 0), _pattern("columns", 1)
