"""B2: standard column-parallel tensor parallelism (Megatron-LM, arXiv:1909.08053)."""

from __future__ import annotations

import torch

from blockshock_lib.layers.sharded import Cost, Part, Shape, ShardedLinear, column_shard


class ColumnParallelLinear(ShardedLinear):
    """Output features and weight rows are sharded over all ranks; the shards of y are all-gathered.

    Each rank makes its shard of y^T, [N/w, B]: the shards then gather into y^T [N, B] without a copy, and y is its
    transposed view. A GEMM that reads y takes either layout at the same cost.
    """

    def hold(self, weight: torch.Tensor, keep: torch.Tensor | None, part: Part) -> None:
        super().hold(weight, keep, part)
        self.register_buffer("bias_shard", None if self.bias is None else self.bias[part.rows, None].clone())

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        return Part(None, column_shard(out_features, rank, world_size), slice(0, in_features))

    def local(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias_shard is None:
            return torch.mm(self.weight, x.t())
        return torch.addmm(self.bias_shard, self.weight, x.t())

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return self.group.all_gather(partial).t()

    def combine(self, partials: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(partials).t()

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        w, item = shape.world_size, shape.itemsize
        stored = shape.out_features * shape.in_features / w
        out = shape.batch * shape.out_features * item
        weights = stored * item
        read = weights + shape.batch * shape.in_features * item
        shard = out / w
        return Cost(2.0 * shape.batch * stored, read, shard, out * (w - 1) / w, weights, weights + out + shard)
