"""D with its permutations absorbed by the neighbours: what D would be in a model whose layers are made for it."""

import torch
from torch import Tensor

from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.layers import PermutedDenseLinear
from blockshock_lib.layers.classes import classes_of
from blockshock_lib.layers.parts import Part


class FoldedDenseLinear(PermutedDenseLinear):
    """A term's C dense blocks on slices of x [B, K], y [B, N] and their gradients, given and left in the order of
    `orders`, the bias too: nothing is copied. It assumes a chain of such layers, with what acts entry by entry between
    them, whose ends undo the orders once. `to_dense` is W in its own order.
    """

    forms = ()
    transposed_y = False

    def shard(self, weight: Tensor, keep: Tensor | None, part: Part) -> None:
        super().shard(weight, keep, part)
        # The rank's columns are the same stretch of each class's inputs.
        rows, columns = _places(self.mask)
        height, width, own = self.out_features // len(rows), self.in_features // len(columns), self.cols
        share = range(own.start // len(columns), own.stop // len(columns))
        self.blocks = []  # (outputs, inputs) of each class
        for of_rows, of_columns in self.classes:
            first, start = rows.index(of_rows) * height, columns.index(of_columns) * width
            self.blocks.append((slice(first, first + height), slice(start + share.start, start + share.stop)))

    def local(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = self.workspace(x) if out is None else out
        y = x.new_empty(x.shape[0], self.out_features) if y is None else y
        for (rows, columns), w in zip(self.blocks, self.weight, strict=True):
            self.gemm(x[:, columns], w, y[:, rows])
        return y

    def local_dgrad(self, dy: Tensor) -> Tensor:
        whole = sum(columns.stop - columns.start for _, columns in self.blocks) == self.in_features
        dx = (torch.empty if whole else torch.zeros)(dy.shape[0], self.in_features, dtype=dy.dtype, device=dy.device)
        for (rows, columns), w in zip(self.blocks, self.weight, strict=True):
            self.gemm(dy[:, rows], w.t(), dx[:, columns])
        return dx

    def local_wgrad(self, dy: Tensor, x: Tensor, by: str | None = None) -> Tensor:
        grad = torch.empty_like(self.weight)
        for (rows, columns), out in zip(self.blocks, grad, strict=True):
            self.gemm(dy[:, rows].t(), x[:, columns].t(), out)
        return grad

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, self.blocks[0][1]], self.weight[0]

    def dgrad_factors(self, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy[:, self.blocks[0][0]], self.weight[0].t()


def orders(mask: Mask, *features: int) -> list[Tensor]:
    """Where each of the permuted outputs [N] and inputs [K] stands in its own order; `features`: N, K."""
    return [
        torch.cat([torch.arange(count).view(-1, 4)[:, places].flatten() for places in some])
        for count, some in zip(features, _places(mask), strict=True)
    ]


def _places(mask: Mask) -> tuple[list[slice], list[slice]]:
    """Outputs and inputs that stand together, as places of every four."""
    classes = [one for term in (0, 1) for one in classes_of(mask, term)]
    return tuple(list({str(one[side]): one[side] for one in classes}.values()) for side in (0, 1))
