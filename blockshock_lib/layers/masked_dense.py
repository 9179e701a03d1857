"""C: the same split by mask as Block-Shock, multiplied dense: shows what the 2:4 kernels alone are worth."""

from __future__ import annotations

import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers.costs import Cost, Shape, dense_dw, summed, summed_dx
from blockshock_lib.layers.part import Part, term_mask
from blockshock_lib.layers.term_parallel import TermParallelLinear
from blockshock_lib.sparse24.pattern import Pattern


class MaskedDenseLinear(TermParallelLinear):
    """Each rank keeps its term as a dense matrix with zeros in the holes, and multiplies all of it.

    dW is computed dense and then set to zero in the holes, so that an optimizer leaves them zero.
    """

    def hold(self, weight: torch.Tensor, keep: torch.Tensor | None, part: Part) -> None:
        super().hold(weight, keep, part)
        self.pattern = None if self.frozen else Pattern.of(term_mask(keep, part))

    def hold_bytes(self) -> dict[str, int]:
        return super().hold_bytes() | {"pattern": self.pattern.nbytes if self.pattern else 0}

    def local(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.mm(x[:, self.cols], self.weight.t(), out=self.room(x) if out is None else out)

    def local_dx(self, dy: torch.Tensor) -> torch.Tensor:
        return self.place_dx(torch.mm(dy, self.weight))

    def local_dw(self, dy: torch.Tensor, x: torch.Tensor, by: str | None = None) -> torch.Tensor:
        dense = super().local_dw(dy, x)
        return self.pattern.masked(dense, out=dense)

    def from_dense(self, dense: torch.Tensor) -> torch.Tensor:
        if self.pattern is None:
            raise UnsupportedError("a frozen masked dense layer does not keep its mask: make it anew with the weight")
        return self.pattern.masked(dense[self.rows, self.cols])

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        k = shape.term_columns
        stored = shape.out_features * k
        return summed(shape, 2.0 * shape.batch * stored, stored * shape.itemsize, k)

    @classmethod
    def cost_dx(cls, shape: Shape) -> Cost:
        k = shape.term_columns
        stored = shape.out_features * k
        return summed_dx(shape, 2.0 * shape.batch * stored, stored * shape.itemsize, k)

    @classmethod
    def cost_dw(cls, shape: Shape, by: str = "full") -> Cost:
        """The dense product, then one pass over it that writes zeros in the holes."""
        product = dense_dw(shape, shape.out_features, shape.term_columns)
        return product._replace(read=product.read + product.written, written=2 * product.written)
