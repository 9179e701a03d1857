"""Block lists: which blocks of keys each block of queries visits, full and partial ones apart, in both directions.

Compressed rows, as of a sparse matrix: memory grows with the blocks that are visited, never with their square. A block
is full where each of its queries sees each of its keys; what a block beyond the end of the keys lacks, nobody sees, so
such a block is partial. A partial block's bits are a tile; equal tiles are held once.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """One direction. Row plane * n + i lists what block i visits, in rising order; n blocks a plane."""

    full_at: Tensor  # int32 [rows + 1], where each row begins in `full`
    full: Tensor  # int32, numbers of blocks
    partial_at: Tensor  # int32 [rows + 1]
    partial: Tensor  # int32
    tile: Tensor  # int32, of each partial block: the number of its tile
    order: Tensor  # int32 [planes, n], the blocks of a plane, those that visit most first


@dataclass(frozen=True, eq=False)
class BlockLists:
    """Made by `Pattern.lists`. Heads and batches with one pattern share a plane."""

    block: int  # queries and keys of a block: a multiple of 32
    q_len: int
    k_len: int
    rows: Rows  # of blocks of queries; entries are blocks of keys
    columns: Rows  # of blocks of keys; entries are blocks of queries
    tiles: Tensor  # int32 [tiles, block, block / 32]: bit c % 32 of [t, r, c // 32]: query r sees key c
    plane: Tensor  # int32 [B | 1, H | 1], the plane of a head
    pairs: Tensor  # int64 [planes], the pairs of query and key that see each other
    forms: dict[str, Any] = field(default_factory=dict)  # what backends made of it

    @property
    def planes(self) -> int:
        return len(self.pairs)

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.block)

    @property
    def k_blocks(self) -> int:
        return -(-self.k_len // self.block)

    @cached_property
    def density(self) -> float:
        """The share of pairs that see each other, the mean over heads."""
        return self.pairs[self.plane.long()].double().mean().item() / (self.q_len * self.k_len)

    @cached_property
    def block_density(self) -> float:
        """The share of blocks that are visited, the mean over heads: what a kernel's time follows."""
        at = (self.rows.full_at + self.rows.partial_at)[:: self.q_blocks].diff()
        return at[self.plane.long()].double().mean().item() / (self.q_blocks * self.k_blocks)

    @property
    def bytes(self) -> int:
        held = [*vars(self.rows).values(), *vars(self.columns).values(), self.tiles, self.plane, self.pairs]
        return sum(tensor.nbytes for tensor in held)

    def to(self, device: Any) -> "BlockLists":
        move = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        both = (Rows(**{name: t.to(device) for name, t in vars(way).items()}) for way in (self.rows, self.columns))
        return BlockLists(self.block, self.q_len, self.k_len, *both, **move)

    def mask(self, plane: int = 0) -> Tensor:
        """Bool [q_len, k_len]: what the lists say, pair by pair. For checks and pictures: it is as large as it says."""
        shape = (self.q_blocks, self.k_blocks, self.block, self.block)
        whole = torch.zeros(shape, dtype=torch.bool, device=self.tiles.device)
        for i in range(self.q_blocks):
            row, rows = plane * self.q_blocks + i, self.rows
            whole[i, rows.full[rows.full_at[row] : rows.full_at[row + 1]].long()] = True
            part = slice(rows.partial_at[row], rows.partial_at[row + 1])
            whole[i, rows.partial[part].long()] = unpack(self.tiles[rows.tile[part].long()])
        return whole.transpose(1, 2).flatten(2).flatten(0, 1)[: self.q_len, : self.k_len]


def pack(bits: Tensor) -> Tensor:
    """Bool [..., n], n a multiple of 32 -> int32 [..., n / 32], bit c of a word is element c of its 32."""
    places = torch.arange(32, device=bits.device)
    return (bits.unflatten(-1, (-1, 32)).long() << places).sum(-1).int()


def unpack(words: Tensor) -> Tensor:
    """The inverse of `pack`."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[..., None] >> places & 1).bool().flatten(-2)
