"""Block lists of a band in closed form: a row of blocks visits a range, and its full blocks are a range of that.

What is as long as a side is made on the host; full blocks, which may be many, on the device: nothing is read back.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from blockshock_lib.kernels.attention.lists import BlockLists, Rows
from blockshock_lib.kernels.attention.rules import FAR, Band


def lists(band: Band, plane: tuple, q_len: int, k_len: int, block: int, device: torch.device) -> BlockLists:
    """`Pattern.lists`, whose checks have passed, where the one rule is a band."""
    low, high = (band.low, band.high) if band.low <= band.high else (FAR, -FAR)  # none: far from any position
    rows, columns = -(-q_len // block), -(-k_len // block)
    begin, first, after, end = _ranges(low, high, q_len, k_len, block)
    full, partial = after - first, first - begin + end - after
    at = pad(torch.stack((full, partial)).cumsum(1, dtype=torch.int32), (1, 0))
    line = torch.arange(rows + columns, dtype=torch.int32).repeat_interleave(partial)  # of each partial block
    entry = torch.arange(len(line), dtype=torch.int32) + (begin - at[1, :-1])[line]
    entry += (entry >= first[line]) * full[line]  # they lie before the full ones and behind
    i, j = torch.where(line < rows, line, entry), torch.where(line < rows, entry, line - rows)
    tiles, tile = _tiles(i, j, low, high, q_len, k_len, block)
    sides = []
    for start, stop, *held in zip((0, rows), (rows, rows + columns), entry.chunk(2), tile.chunk(2), strict=True):
        full_at, partial_at = at[:, start : stop + 1] - at[:, start, None]
        order = (end - begin)[start:stop].argsort(descending=True, stable=True)[None]
        held = (full_at, first[start:stop] - full_at[:-1], partial_at, *held, order)
        full_at, skipped, *rest = (x.to(device, torch.int32) for x in held)
        full = torch.arange(int(at[0, rows]), dtype=torch.int32, device=device)
        full += skipped.repeat_interleave(full_at.diff(), output_size=len(full))
        sides.append(Rows(full_at, full, *rest))
    plane = torch.tensor(plane, dtype=torch.int32, device=device)
    return BlockLists(block, q_len, k_len, *sides, tiles.to(device), plane)


def _ranges(low: int, high: int, q_len: int, k_len: int, block: int) -> tuple[Tensor, ...]:
    """Of rows, then columns [n]: their first block and their first full one, and what follows the last of each."""
    shift = max(k_len - q_len, 0)
    p0 = torch.arange(shift, shift + q_len, block, dtype=torch.int32)
    p1 = (p0 + (block - 1)).clamp(max=shift + q_len - 1)
    rows = [(p0 - high).clamp(min=0) // block + (p0 >= high + k_len), (p1 - (high - block + 1)).clamp(min=0) // block]
    rows += [(p0 - (low - 1)).clamp(max=k_len) // block, (p1 - (low - block)).clamp(max=k_len - 1 + block) // block]
    # All rise from row to row. So a column has a range of rows: of those that have begun by it, those not yet ended.
    column = torch.arange(-(-k_len // block), dtype=torch.int32)
    columns = [torch.searchsorted(each, column, right=True, out_int32=True) for each in reversed(rows)]
    begin, first, after, end = map(torch.cat, zip(rows, columns, strict=True))
    return begin, first, torch.maximum(first, after), torch.maximum(begin, end)


def _tiles(i: Tensor, j: Tensor, low: int, high: int, q_len: int, k_len: int, block: int) -> tuple[Tensor, Tensor]:
    """The tiles of partial blocks, of rows i and columns j [n], and of each the number of its tile."""
    # Blocks are of 36 kinds, by how they lie to either edge of the band, beside it or in one of two ways across, and by
    # whether their row and their column are the last. A kind has one tile.
    shift = max(k_len - q_len, 0)
    away = (i - j) * block + shift
    to_low, to_high = ((x // block).clamp(max=1) for x in (away - low, high - away))  # from -1
    kind = to_low * 12 + to_high * 4 + (i == (q_len - 1) // block) * 2 + (j == (k_len - 1) // block) + 16
    one = torch.full((36,), -1).scatter_(0, kind.long(), torch.arange(len(kind)))  # a block of each kind
    i, j = (x[one[one >= 0], None] for x in (i, j))
    p = (i * block + torch.arange(block)).clamp(max=q_len - 1) + shift  # beyond the last as the last
    word = (j * block + torch.arange(0, block, 32))[:, None]  # [kinds, 1, words], the first key of each
    begin, end = (p - high)[..., None] - word, (p - (low - 1)).clamp(max=k_len)[..., None] - word
    words = ((1 << end.clamp(0, 32)) - (1 << begin.clamp(0, 32))).clamp(min=0).int()
    tiles, same = words.unique(dim=0, return_inverse=True)
    return tiles, one.masked_scatter(one >= 0, same)[kind]
