"""Block lists of a band in closed form, where both lengths are whole blocks: a block's distance from the diagonal alone
tells whether it is visited and what it holds. A block at distance d holds the p - k from (d - 1) block + 1 to
(d + 1) block - 1.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from blockshock_lib.kernels.attention.lists import BlockLists, Rows
from blockshock_lib.kernels.attention.rules import Band


def lists(band: Band, plane: tuple, q_len: int, k_len: int, block: int, device: torch.device) -> BlockLists:
    """`Pattern.lists`, whose checks have passed, of a band that is not empty and of lengths that `block` divides.

    All sizes are known without the device, so it is never waited for; what it must be told it is told at once.
    """
    rows, columns = q_len // block, k_len // block
    least, most = max(band.low // block, 1 - rows), min(-(-band.high // block), columns - 1)  # what is visited
    inner, outer = max(-((1 - band.low) // block) + 1, least), min((band.high + 1) // block - 1, most)  # what is full
    if outer < inner:  # none
        inner, outer = most + 1, most
    cut = [*range(least, inner), *range(outer + 1, most + 1)]  # few, whatever the lengths
    p = torch.tensor(cut, dtype=torch.int64)[:, None, None] * block + torch.arange(block)[:, None]
    p = p - torch.arange(0, block, 32)  # [cut, block, words], less the first key of the word
    begin, end = ((p - edge).clamp(0, 32) for edge in (band.high, band.low - 1))
    tiles = ((1 << end) - (1 << begin)).clamp(min=0)
    numbers = [*range(len(cut))]
    ways = torch.tensor([[-far for far in cut[::-1]], numbers[::-1], cut, numbers], dtype=torch.int64)
    told = [tiles, ways, torch.tensor(plane)]
    known = torch.cat([part.flatten() for part in told]).int().to(device).split([part.numel() for part in told])
    tiles, ways, plane = (part.view(like.shape) for part, like in zip(known, told, strict=True))
    diagonal = torch.arange(columns, dtype=torch.int32, device=device)  # the block at distance 0
    far = least + torch.arange(max(most + 1 - least, 0))
    each = rows + far.clamp(max=0) - (far - (columns - rows)).clamp(min=0)  # as many blocks of a distance are there
    full = int(each[inner - least : outer + 1 - least].sum())
    sizes = (full, int(each.sum()) - full)
    sides = (
        _side(diagonal[columns - rows :], columns, *ways[:2], -outer, -inner, *sizes),
        _side(diagonal - (columns - rows), rows, *ways[2:], inner, outer, *sizes),
    )
    return BlockLists(block, q_len, k_len, *sides, tiles, plane)


def _side(
    base: Tensor, others: int, cut: Tensor, tiles: Tensor, first: int, last: int, full_size: int, partial_size: int
) -> Rows:
    """Of each line, whose diagonal block is `base` [n]: the partial blocks `cut` away, and the full ones from `first`
    to `last` away, where they are among the `others`; so many they are of all lines.
    """
    entry = base[:, None] + cut
    here = (entry >= 0) & (entry < others)
    partial, way = here.nonzero_static(size=partial_size).unbind(1)
    begin, end = (base + first).clamp(0, others), (base + (last + 1)).clamp(0, others)
    count = torch.stack((end - begin, here.sum(1)))
    at = pad(count.cumsum(1, dtype=torch.int32), (1, 0))
    full = (begin - at[0, :-1]).repeat_interleave(count[0], output_size=full_size)
    full += torch.arange(full_size, dtype=torch.int32, device=base.device)
    order = count.sum(0).argsort(descending=True, stable=True)[None].int()
    return Rows(at[0], full, at[1], entry[partial, way], tiles[way], order)
