"""What the methods share that split W by a mask into two terms."""

from __future__ import annotations

import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers.part import Part, column_shard
from blockshock_lib.layers.sharded import ShardedLinear


class TermParallelLinear(ShardedLinear):
    """Superposition: W = W(0) + W(1) by a mask. Rank r holds term r % 2 of input shard r // 2; one all-reduce adds
    them.

    Two ranks hold one term each of the whole input; four and eight split each term by input columns as well.
    """

    uses_mask = True

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        if world_size % 2:
            raise UnsupportedError(f"two terms need an even number of ranks, not {world_size}")
        return Part(rank % 2, slice(0, out_features), column_shard(in_features, rank // 2, world_size // 2))

    def place_dx(self, made: torch.Tensor) -> torch.Tensor:
        """dX of this rank's columns -> [B, K] with zeros elsewhere, ready for the sum over all ranks.

        From four ranks on, only the two ranks of a shard add up and the shards stand side by side. One all-reduce over
        all ranks does both, and moves as many bytes as an all-gather of every rank's columns would.
        """
        if made.shape[1] == self.in_features:
            return made
        dx = made.new_zeros(made.shape[0], self.in_features)
        dx[:, self.cols] = made
        return dx
