"""C: the same split by mask as Block-Shock, multiplied dense: shows what the 2:4 kernels alone are worth."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from blockshock_lib.layers.sharded import Cost, Part, Shape, TermParallelLinear, summed


class MaskedDenseLinear(TermParallelLinear):
    """Each rank keeps its term as a dense matrix with zeros in the holes, and multiplies all of it."""

    def hold(self, weight: torch.Tensor, keep: torch.Tensor | None, part: Part) -> None:
        super().hold(weight, keep, part)
        self.cols = part.cols

    def local(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x[:, self.cols], self.weight)

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        k = shape.in_features / (shape.world_size // 2)
        stored = shape.out_features * k
        return summed(shape, 2.0 * shape.batch * stored, stored * shape.itemsize, k)
