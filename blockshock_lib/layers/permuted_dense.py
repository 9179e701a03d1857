"""D: a periodic mask's term as dense products in a permuted basis; the honest strongest rival.

A periodic 2:4 mask repeats one 4x4 tile. Rows of W(g) whose tile row is the same hold the same columns, so each such
class of rows times its columns is a plain dense matrix of half the input width: no zeros are stored, no 2:4 kernel is
needed.
"""

from __future__ import annotations

import torch

from blockshock_lib import sparse24
from blockshock_lib.layers import periodic
from blockshock_lib.layers.costs import Cost, Shape, dense_dw, summed, summed_dx
from blockshock_lib.layers.part import Part
from blockshock_lib.layers.term_parallel import TermParallelLinear
from blockshock_lib.params import Mask


class PermutedDenseLinear(TermParallelLinear):
    """W(g) as C dense blocks [N/C, K/2], one for each class of rows; x is gathered once for each class.

    The gathers of x and dy and the scatters of y and dX are part of `local`, `local_dx` and `local_dw`, and are timed:
    a model could fold them into its neighbours' weights, this layer does not assume that it does.
    """

    gathers = True
    dw_by = "periodic"

    @classmethod
    def unsupported(cls, mask: Mask, device: torch.device, dtype: torch.dtype, **options) -> str:
        return "" if mask.periodic else f"mask {mask.name} is not periodic, so no permutation makes its terms dense"

    def hold(self, weight: torch.Tensor, keep: torch.Tensor | None, part: Part) -> None:
        self.classes = periodic.classes_of(self.mask, part.term)
        # One GEMM a class; classes are of equal size, so that they make one batched tensor.
        self.weight = self._parameter(self.from_dense(weight))

    def local(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        y = self.room(x) if out is None else out
        return self._product(x[:, self.cols], self.out_features, y, transposed=False)

    def local_dx(self, dy: torch.Tensor) -> torch.Tensor:
        return self.place_dx(self._product(dy, self.cols.stop - self.cols.start, transposed=True))

    def _product(
        self, x: torch.Tensor, features: int, y: torch.Tensor | None = None, *, transposed: bool
    ) -> torch.Tensor:
        """x [B, K] times the blocks, into `y` if given: gathered by a class's columns, put in its rows; the other way
        for dX.
        """
        if len(self.classes) == 1 and not transposed:
            return torch.mm(periodic.gather(x, self.classes[0][1]), self.weight[0].t(), out=y)
        y = x.new_empty(x.shape[0], features) if y is None else y
        for (rows, cols), w in zip(self.classes, self.weight, strict=True):
            source, target = (rows, cols) if transposed else (cols, rows)
            part = periodic.gather(x, source) @ (w if transposed else w.t())
            place = periodic.take(y, target)
            place.copy_(part.view(place.dtype).view(place.shape))
            del part  # or it would still be held while the next class's is made
        return self._fill(y) if transposed else y

    def _fill(self, dx: torch.Tensor) -> torch.Tensor:
        """Zeros where no class has a column: a uniform mask's term reads half of x, so half of its dX is zero."""
        held = {place for _, cols in self.classes for place in range(4)[cols]}
        for place in set(range(4)) - held:
            dx[:, place::4] = 0
        return dx

    def local_dw(self, dy: torch.Tensor, x: torch.Tensor, by: str | None = None) -> torch.Tensor:
        x, grad = x[:, self.cols], torch.empty_like(self.weight)
        for (rows, cols), out in zip(self.classes, grad, strict=True):
            torch.mm(periodic.gather(dy, rows).t(), periodic.gather(x, cols), out=out)
        return grad

    def from_dense(self, dense: torch.Tensor) -> torch.Tensor:
        tiles = dense[self.rows, self.cols].unflatten(1, (-1, 4)).unflatten(0, (-1, 4))
        return torch.stack([tiles[:, rows][..., cols].flatten(2).flatten(0, 1) for rows, cols in self.classes])

    def part_dense(self, tensor: torch.Tensor) -> torch.Tensor:
        n, k = self.out_features, self.cols.stop - self.cols.start
        dense = tensor.new_zeros(n, k)
        tiles = dense.view(n // 4, 4, k // 4, 4)
        for (rows, cols), block in zip(self.classes, tensor, strict=True):
            place = tiles[:, rows][..., cols]
            place.copy_(block.view(place.shape))
        return dense

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        k, classes = shape.term_columns, _classes(shape)
        stored = shape.out_features * k / 2
        extra = shape.batch * k / 2 * shape.itemsize + (shape.y / classes if classes > 1 else 0)
        return summed(shape, 2.0 * shape.batch * stored, stored * shape.itemsize, k, extra)

    @classmethod
    def cost_dx(cls, shape: Shape) -> Cost:
        k, classes = shape.term_columns, _classes(shape)
        stored = shape.out_features * k / 2
        # One class's dy, gathered where it is not all of it, and its product before it is put in its columns.
        extra = (shape.y / classes if classes > 1 else 0) + shape.batch * k / 2 * shape.itemsize
        return summed_dx(shape, 2.0 * shape.batch * stored, stored * shape.itemsize, k, extra)

    @classmethod
    def cost_dw(cls, shape: Shape, by: str = "periodic") -> Cost:
        k, classes = shape.term_columns, _classes(shape)
        product = dense_dw(shape, shape.out_features, k / 2)
        gathered = (shape.y / classes if classes > 1 else 0) + shape.batch * k / 2 * shape.itemsize
        return product._replace(read=shape.y + shape.batch * k * shape.itemsize, peak=product.peak + gathered)


def _classes(shape: Shape) -> int:
    return len(sparse24.masks.periodic_classes(shape.mask))
