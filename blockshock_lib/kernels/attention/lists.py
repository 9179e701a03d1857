"""Block lists: which blocks of keys each block of queries visits, full and partial ones apart, in both directions.

Compressed rows, as of a sparse matrix: memory grows with the blocks that are visited, never with their square. A block
is full where each of its queries sees each of its keys; what a block beyond the end of the keys lacks, nobody sees, so
such a block is partial. A partial block's bits are a tile; equal tiles are held once.
"""

from collections.abc import Sequence
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
    forms: dict[str, Any] = field(default_factory=dict)  # what backends made of it

    @classmethod
    def of(cls, full: Tensor, partial: Tensor, tile: Tensor, planes: int, **rest: Any) -> "BlockLists":
        """From blocks by number, (plane * blocks of queries + i) * blocks of keys + j, whole [n], in any order."""
        counts = [-(-rest[side] // rest["block"]) for side in ("q_len", "k_len")]
        rows = _rows((full, partial), tile, planes, *counts)
        columns = _rows([_turned(found, *counts) for found in (full, partial)], tile, planes, *counts[::-1])
        return cls(rows=rows, columns=columns, **rest)

    def blocks(self) -> tuple[Tensor, Tensor]:
        """The full and the partial blocks, by rising row: (plane, block of queries, block of keys), int64 [n, 3]."""
        found = []
        for at, entries in ((self.rows.full_at, self.rows.full), (self.rows.partial_at, self.rows.partial)):
            row = torch.arange(len(at) - 1, device=at.device).repeat_interleave(at.diff())
            found.append(torch.stack((row // self.q_blocks, row % self.q_blocks, entries.long()), 1))
        return found[0], found[1]

    def select(self, queries: Tensor, keys: Tensor) -> "BlockLists":
        """The lists of some blocks of queries and of keys alone, int64, rising: what a rank has of a whole sequence."""
        new = []
        for blocks, count in ((queries, self.q_blocks), (keys, self.k_blocks)):
            place = torch.full((count,), -1, device=blocks.device)
            place[blocks] = torch.arange(len(blocks), device=blocks.device)
            new.append(place)
        kept, masks = [], []
        for found in self.blocks():
            row, column = new[0][found[:, 1]], new[1][found[:, 2]]
            masks.append((row >= 0) & (column >= 0))
            kept.append(((found[:, 0] * len(queries) + row) * len(keys) + column)[masks[-1]])
        q_len, k_len = length_of(queries, self.block, self.q_len), length_of(keys, self.block, self.k_len)
        rest = {"block": self.block, "q_len": q_len, "k_len": k_len, "tiles": self.tiles, "plane": self.plane}
        return BlockLists.of(*kept, self.rows.tile[masks[1]].long(), self.planes, **rest)

    @property
    def planes(self) -> int:
        return len(self.rows.order)

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.block)

    @property
    def k_blocks(self) -> int:
        return -(-self.k_len // self.block)

    @cached_property
    def pairs(self) -> Tensor:
        """Int64 [planes]: the pairs of query and key that see each other."""
        full, partial = self.blocks()
        rows = [(self.q_len - each[:, 1] * self.block).clamp(max=self.block) for each in (full, partial)]
        seen = [unpack(part).sum(2) for part in self.tiles.split(1024)]  # of each query of a tile
        upto = torch.nn.functional.pad(torch.cat(seen).cumsum(1), (1, 0)) if seen else self.tiles.new_zeros(0, 1)
        found = torch.zeros(self.planes, dtype=torch.long, device=full.device)
        found.index_add_(0, full[:, 0], rows[0] * self.block)
        return found.index_add_(0, partial[:, 0], upto[self.rows.tile.long(), rows[1]].long())

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
        held = [*vars(self.rows).values(), *vars(self.columns).values(), self.tiles, self.plane]
        return sum(tensor.nbytes for tensor in held)

    def padded(self) -> list[tuple[Tensor, ...]]:
        """Of rows and of columns: counts int32 [B | 1, H | 1, n] and entries int32 [B | 1, H | 1, n, most], filled up
        with 0, of the partial blocks, then both of the full ones. Both are as wide as the longest row of either:
        FlexAttention of PyTorch 2.11 reads the full ones by the strides of the partial ones.
        """
        made = []
        for way, blocks in ((self.rows, self.q_blocks), (self.columns, self.k_blocks)):
            held, counts = [], torch.stack([at.diff() for at in (way.partial_at, way.full_at)])
            places = torch.arange(max(int(counts.max()), 1), device=counts.device)
            for count, entries in zip(counts.view(2, self.planes, blocks), (way.partial, way.full), strict=True):
                listed = places < count[..., None]
                filled = torch.zeros(listed.shape, dtype=torch.int32, device=listed.device)
                filled[listed] = entries
                held += [each[self.plane.long()] for each in (count.int(), filled)]
            made.append(tuple(held))
        return made

    def map(self, plane: int = 0) -> Tensor:
        """Int8 [q_blocks, k_blocks]: 0 where a block is not visited, 1 where it is partial, 2 where it is full."""
        found = torch.zeros(self.q_blocks, self.k_blocks, dtype=torch.int8, device=self.tiles.device)
        for kind, blocks in zip((2, 1), self.blocks(), strict=True):
            mine = blocks[blocks[:, 0] == plane]
            found[mine[:, 1], mine[:, 2]] = kind
        return found


def pack(bits: Tensor) -> Tensor:
    """Bool [..., n], n a multiple of 32 -> int32 [..., n / 32], bit c of a word is element c of its 32."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    return bits.unflatten(-1, (-1, 32)).int().bitwise_left_shift_(places).sum(-1, dtype=torch.int32)


def unpack(words: Tensor) -> Tensor:
    """The inverse of `pack`."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return (words[..., None] >> places & 1).bool().flatten(-2)


def length_of(blocks: Tensor, block: int, whole: int) -> int:
    """Positions in some blocks of a sequence of `whole`, whose last block may be short."""
    short = -whole % block if len(blocks) and int(blocks[-1]) == (whole - 1) // block else 0
    return len(blocks) * block - short


def _turned(number: Tensor, rows: int, columns: int) -> Tensor:
    """Blocks by number in the other direction."""
    row = number // columns
    return (row // rows).mul_(columns).add_(number % columns).mul_(rows).add_(row.remainder_(rows))


def _rows(found: Sequence[Tensor], tile: Tensor, planes: int, blocks: int, others: int) -> Rows:
    full, partial = found
    partial, at = partial.sort()
    first = torch.arange(planes * blocks + 1, dtype=full.dtype, device=full.device) * others
    starts, entries = [], []
    for numbers in (full.unique(), partial):  # none is there twice; a sort makes places too, which take twice the bytes
        starts.append(torch.searchsorted(numbers, first, out_int32=True))
        entries.append(numbers.remainder_(others).int())
    work = (starts[0].diff() + starts[1].diff()).view(planes, blocks)
    order = torch.argsort(work, dim=1, descending=True, stable=True).int()
    return Rows(starts[0], entries[0], starts[1], entries[1], tile[at].int(), order)
