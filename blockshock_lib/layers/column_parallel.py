"""B2: standard column-parallel tensor parallelism (Megatron-LM, arXiv:1909.08053)."""

from __future__ import annotations

import torch

from blockshock_lib.layers.costs import Cost, Shape, dense_dw
from blockshock_lib.layers.part import Part, column_shard
from blockshock_lib.layers.sharded import ShardedLinear


class ColumnParallelLinear(ShardedLinear):
    """Output features and weight rows are sharded over all ranks; the shards of y are all-gathered.

    Each rank makes its shard of y^T, [N/w, B]: the shards then gather into y^T [N, B] without a copy, and y is its
    transposed view. A GEMM that reads y takes either layout at the same cost.
    """

    transposed_y = True
    joined = "all-gather"

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        return Part(None, column_shard(out_features, rank, world_size), slice(0, in_features))

    def local(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return torch.mm(self.weight, x.t())
        return torch.addmm(self.bias[self.rows, None], self.weight, x.t())

    def reduce(self, partial: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        gathered = self.group.all_gather(partial).t()
        return gathered if out is None else out.copy_(gathered)

    def combine(self, partials: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(partials).t()

    def local_dx(self, dy: torch.Tensor) -> torch.Tensor:
        return torch.mm(dy[:, self.rows], self.weight)

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        stored = shape.out_features * shape.in_features / shape.world_size
        weights, shard = stored * shape.itemsize, shape.y / shape.world_size
        flops, sent = 2.0 * shape.batch * stored, shape.all_gathered(shape.y)
        return Cost(flops, weights + shape.x, shard, sent, weights, weights + shape.y + shard)

    @classmethod
    def cost_dx(cls, shape: Shape) -> Cost:
        stored = shape.out_features * shape.in_features / shape.world_size
        weights, read = stored * shape.itemsize, stored * shape.itemsize + shape.y / shape.world_size
        sent = shape.all_reduced(shape.x)
        return Cost(2.0 * shape.batch * stored, read, shape.x, sent, weights, weights + shape.x)

    @classmethod
    def cost_dw(cls, shape: Shape, by: str = "full") -> Cost:
        return dense_dw(shape, shape.out_features / shape.world_size, shape.in_features)
