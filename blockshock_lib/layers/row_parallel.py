"""B1: standard row-parallel tensor parallelism (Megatron-LM, arXiv:1909.08053); the rival that Block-Shock
must beat.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from blockshock_lib.layers.sharded import Cost, Part, Shape, ShardedLinear, column_shard, summed


class RowParallelLinear(ShardedLinear):
    """Input features and weight columns are sharded over all ranks; the [B, N] partial sums are all-reduced."""

    def hold(self, weight: torch.Tensor, keep: torch.Tensor | None, part: Part) -> None:
        super().hold(weight, keep, part)
        self.cols = part.cols

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        return Part(None, slice(0, out_features), column_shard(in_features, rank, world_size))

    def local(self, x: torch.Tensor) -> torch.Tensor:
        # The column slice is a view; the GEMM takes its row stride, so nothing is copied.
        return F.linear(x[:, self.cols], self.weight)

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        k = shape.in_features / shape.world_size
        stored = shape.out_features * k
        return summed(shape, 2.0 * shape.batch * stored, stored * shape.itemsize, k)
