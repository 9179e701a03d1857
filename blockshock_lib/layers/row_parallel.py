"""B1: standard row-parallel tensor parallelism (Megatron-LM, arXiv:1909.08053); the rival that Block-Shock
must beat.
"""

from __future__ import annotations

import torch

from blockshock_lib.comm import Pending
from blockshock_lib.layers.costs import Cost, Shape, dense_dw, summed
from blockshock_lib.layers.part import Part, column_shard
from blockshock_lib.layers.sharded import ShardedLinear


class RowParallelLinear(ShardedLinear):
    """Input features and weight columns are sharded over all ranks; the [B, N] partial sums are all-reduced.

    In backward each rank makes its columns of dX as dX^T, [K/w, B]: they gather into [K, B] without a copy, and dX is
    the transposed view. A GEMM reads either layout at the same cost; an elementwise operation that joins dX with a
    row-major tensor reads one of them across its rows.
    """

    transposed_dx = True

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        return Part(None, slice(0, out_features), column_shard(in_features, rank, world_size))

    def local(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        # The column slice is a view; the GEMM takes its row stride, so nothing is copied.
        return torch.mm(x[:, self.cols], self.weight.t(), out=self.room(x) if out is None else out)

    def local_dx(self, dy: torch.Tensor) -> torch.Tensor:
        return torch.mm(self.weight.t(), dy.t())

    def start_dx(self, partial: torch.Tensor) -> Pending:
        return self.group.start_all_gather(partial, torch.t)

    def combine_dx(self, partials: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(partials).t()

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        k = shape.in_features / shape.world_size
        stored = shape.out_features * k
        return summed(shape, 2.0 * shape.batch * stored, stored * shape.itemsize, k)

    @classmethod
    def cost_dx(cls, shape: Shape) -> Cost:
        stored = shape.out_features * shape.in_features / shape.world_size
        weights, shard = stored * shape.itemsize, shape.x / shape.world_size
        sent, peak = shape.all_gathered(shape.x), weights + shape.x + (shard if shape.world_size > 1 else 0)
        return Cost(2.0 * shape.batch * stored, weights + shape.y, shard, sent, weights, peak)

    @classmethod
    def cost_dw(cls, shape: Shape, by: str = "full") -> Cost:
        return dense_dw(shape, shape.out_features, shape.in_features / shape.world_size)
