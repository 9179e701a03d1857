"""Block lists of a band in closed form, where both lengths are whole blocks: a block's distance from the diagonal alone
tells whether it is visited and what it holds. A block at distance d holds the p - k from (d - 1) block + 1 to
(d + 1) block - 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from blockshock_lib.kernels.attention.lists import BlockLists, Rows
from blockshock_lib.kernels.attention.rules import Band


def lists(band: Band, plane: tuple, q_len: int, k_len: int, block: int, device: torch.device) -> BlockLists:
    """`Pattern.lists`, whose checks have passed, of a band that is not empty and of lengths that `block` divides."""
    rows, columns = q_len // block, k_len // block
    least, most = max(band.low // block, 1 - rows), min(-(-band.high // block), columns - 1)  # what is visited
    inner, outer = max(-((1 - band.low) // block) + 1, least), min((band.high + 1) // block - 1, most)  # what is full
    if outer < inner:  # none
        inner, outer = most + 1, most
    cut = [*range(least, inner), *range(outer + 1, most + 1)]  # few, whatever the lengths
    p = torch.tensor(cut, dtype=torch.int64, device=device)[:, None, None] * block
    p = p + torch.arange(block, device=device)[:, None]
    p = p - torch.arange(0, block, 32, device=device)  # [cut, block, words], less the first key of the word
    begin, end = ((p - edge).clamp(0, 32) for edge in (band.high, band.low - 1))
    tiles = ((1 << end) - (1 << begin)).clamp(min=0).int()
    diagonal = torch.arange(columns, dtype=torch.int32, device=device)  # the block at distance 0
    turned = [-distance for distance in cut[::-1]]
    sides = (
        _side(diagonal[columns - rows :], columns, turned, range(len(cut))[::-1], -outer, -inner),
        _side(diagonal - (columns - rows), rows, cut, range(len(cut)), inner, outer),
    )
    return BlockLists(block, q_len, k_len, *sides, tiles, torch.tensor(plane, dtype=torch.int32, device=device))


def _side(base: Tensor, others: int, cut: Sequence[int], tiles: Sequence[int], first: int, last: int) -> Rows:
    """Of each line, whose diagonal block is `base` [n]: the partial blocks `cut` away, and the full ones from `first`
    to `last` away, where they are among the `others`.
    """
    entry, tile = (torch.tensor([*each], dtype=torch.int32, device=base.device) for each in (cut, tiles))
    entry = base[:, None] + entry
    here = (entry >= 0) & (entry < others)
    partial = here.nonzero(as_tuple=True)
    begin, end = (base + first).clamp(0, others), (base + (last + 1)).clamp(0, others)
    count = torch.stack((end - begin, here.sum(1)))
    at = pad(count.cumsum(1, dtype=torch.int32), (1, 0))
    full = (begin - at[0, :-1]).repeat_interleave(count[0])
    full += torch.arange(len(full), dtype=torch.int32, device=base.device)
    order = count.sum(0).argsort(descending=True, stable=True)[None].int()
    return Rows(at[0], full, at[1], entry[partial], tile[partial[1]], order)
