"""Which blocks of a sequence each rank holds: so that all have as much to do, and as much to hold."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from blockshock_lib.errors import allowed
from blockshock_lib.kernels.attention.lists import BlockLists, length_of

PLACEMENTS = ("contiguous", "zigzag", "cost")
SLACK = 0.05  # of a rank's work: so much more is taken for fewer bytes


@dataclass(frozen=True, eq=False)
class Placement:
    """Which blocks of the sequence each rank holds, int64, rising; the last block of all may be short."""

    name: str
    blocks: tuple[Tensor, ...]
    block: int
    length: int

    @cached_property
    def lengths(self) -> list[int]:
        """Positions that each rank holds. The host reads them of the GPU once: a CUDA graph cannot hold that."""
        return [length_of(blocks, self.block, self.length) for blocks in self.blocks]

    @cached_property
    def positions(self) -> list[Tensor]:
        """Int64, those of each rank, in the order in which it holds them."""
        places = torch.arange(self.block, device=self.blocks[0].device)
        each = [(blocks[:, None] * self.block + places).flatten() for blocks in self.blocks]
        return [positions[:length] for positions, length in zip(each, self.lengths, strict=True)]

    @cached_property
    def dealt(self) -> Tensor | slice:
        """The index that takes a whole sequence to the shares, one after the other."""
        return slice(None) if self.name == "contiguous" else torch.cat(self.positions)

    @cached_property
    def order(self) -> Tensor | slice:
        """The index that takes the shares, one after the other, to the whole sequence."""
        return self.dealt if isinstance(self.dealt, slice) else self.dealt.argsort()


def placed(lists: BlockLists, ranks: int, placement: str, strategy: str = "pull") -> Placement:
    """The blocks of a sequence dealt to the ranks: "contiguous"; "zigzag", a piece from the front and one from the back
    each; by "cost", the blocks that visit most first, each to the rank that has done least so far, where a rank that
    holds a neighbour is taken within a twentieth of the mean; or "auto", of these the one whose busiest rank visits
    least: to pull, within a twentieth of that, the one that needs the fewest blocks of others; for a ring, which waits
    for the busiest rank at each step, not "cost". ValueError where a rank would get none.
    """
    count = lists.q_blocks
    if placement not in (*PLACEMENTS, "auto"):
        raise ValueError(f"unknown placement {placement!r}; {allowed(placement, (*PLACEMENTS, 'auto'))}")
    if count < ranks * (2 if placement == "zigzag" else 1):
        raise ValueError(f"{count} blocks of {lists.block} positions do not do for {ranks} ranks placed by {placement}")
    if placement == "auto" and ranks > 1:
        names = [name for name in PLACEMENTS if name != "zigzag" or count >= 2 * ranks]
        fit = [placed(lists, ranks, name) for name in names if name != "cost" or strategy != "ring"]
        each = {one: loads(lists, one) for one in fit}
        least = min(work for work, _ in each.values()) * (1 + SLACK * (strategy == "pull"))
        return min((one for one in fit if each[one][0] <= least), key=lambda one: each[one][1])
    every = torch.arange(count, device=lists.tiles.device)
    if placement in ("contiguous", "auto"):
        held = every.tensor_split(ranks)
    elif placement == "zigzag":
        pieces = every.tensor_split(2 * ranks)
        held = [torch.cat((pieces[rank], pieces[-1 - rank])) for rank in range(ranks)]
    else:
        work = (lists.rows.full_at + lists.rows.partial_at).diff().view(lists.planes, count)
        held = _by_cost(work.sum(0).tolist(), ranks, lists.tiles.device)
    return Placement(placement, tuple(held), lists.block, lists.q_len)


def loads(lists: BlockLists, placement: Placement) -> tuple[int, int]:
    """The most blocks that a rank visits, over all planes, and the most blocks of keys that one needs of others."""
    visits = torch.cat([each[:, 1:] for each in lists.blocks()])  # [visits, 2]: of queries, of keys
    keys = [visits[torch.isin(visits[:, 0], mine), 1] for mine in placement.blocks]
    come = [int((~torch.isin(each.unique(), mine)).sum()) for each, mine in zip(keys, placement.blocks, strict=True)]
    return max(map(len, keys)), max(come)


def _by_cost(work: list[int], ranks: int, device: torch.device) -> list[Tensor]:
    # As many blocks for each rank, to within one, so that memory is balanced as well as work.
    most, slack = -(-len(work) // ranks), sum(work) / ranks * SLACK
    done, mine = [0.0] * ranks, [set() for _ in range(ranks)]
    for block in sorted(range(len(work)), key=lambda at: -work[at]):
        free = [rank for rank in range(ranks) if len(mine[rank]) < most]
        least = min(done[rank] for rank in free)
        near = [rank for rank in free if done[rank] <= least + slack]
        best = min(near, key=lambda rank: (-len({block - 1, block + 1} & mine[rank]), done[rank]))
        done[best] += work[block]
        mine[best].add(block)
    return [torch.tensor(sorted(blocks), device=device) for blocks in mine]
