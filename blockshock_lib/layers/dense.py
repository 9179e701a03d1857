"""A: the dense product on one GPU; the absolute reference for speed and error."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from blockshock_lib.comm import Pending
from blockshock_lib.layers.costs import Cost, Shape, dense_dw, summed, summed_dx
from blockshock_lib.layers.part import Part
from blockshock_lib.layers.sharded import ShardedLinear


class DenseLinear(ShardedLinear):
    """Rank 0 computes all of y = x W^T + b; the other ranks stand by."""

    joined = ""

    @classmethod
    def ranks(cls, world_size: int) -> int:
        return 1

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        return Part(None, slice(0, out_features), slice(0, in_features))

    def local(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return self._add_bias(partial)

    def local_dx(self, dy: torch.Tensor) -> torch.Tensor:
        return torch.mm(dy, self.weight)

    def start_dx(self, partial: torch.Tensor) -> Pending:
        return Pending(partial)

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        n, k = shape.out_features, shape.in_features
        alone = shape._replace(world_size=1)
        return summed(alone, 2.0 * shape.batch * n * k, n * k * shape.itemsize, k)

    @classmethod
    def cost_dx(cls, shape: Shape) -> Cost:
        n, k = shape.out_features, shape.in_features
        return summed_dx(shape._replace(world_size=1), 2.0 * shape.batch * n * k, n * k * shape.itemsize, k)

    @classmethod
    def cost_dw(cls, shape: Shape, by: str = "full") -> Cost:
        return dense_dw(shape, shape.out_features, shape.in_features)
