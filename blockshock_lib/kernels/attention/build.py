"""Block lists of a pattern's rules: blocks are judged whole where the rule's bounds allow, the others pair by pair."""

import torch
from torch import Tensor

from blockshock_lib.kernels.attention import rules
from blockshock_lib.kernels.attention.lists import BlockLists, pack
from blockshock_lib.kernels.attention.rules import Rule

CHUNK = 1 << 20  # blocks, or pairs of query and key, that are looked at together


def lists(
    found: tuple[Rule, ...], plane: tuple, q_len: int, k_len: int, block: int, device: torch.device
) -> BlockLists:
    """`Pattern.lists`, whose checks have passed."""
    full, partial, tiles, tile = [], [], [], []
    for number, rule in enumerate(found):
        whole, maybe = _judged(rule, q_len, k_len, block, device)
        seen, of, bits = _looked_at(rule, maybe, q_len, k_len, block)
        each = seen == block * block
        some = (seen > 0) & ~each
        whole = torch.cat((whole, maybe[each]))
        base = torch.tensor([number, 0, 0], device=device)
        full.append(torch.nn.functional.pad(whole, (1, 0)) + base)
        partial.append(torch.nn.functional.pad(maybe[some], (1, 0)) + base)
        tile.append(of[some] + sum(map(len, tiles)))
        tiles.append(bits)
    shared, same = _distinct(torch.cat(tiles))
    return BlockLists.of(
        torch.cat(full),
        torch.cat(partial),
        same[torch.cat(tile)],
        len(found),
        block=block,
        q_len=q_len,
        k_len=k_len,
        tiles=shared,
        plane=torch.tensor(plane, dtype=torch.int32, device=device),
    )


def _judged(rule: Rule, q_len: int, k_len: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The blocks that are surely full, and those that may hold some pair: int32 [n, 2], (row, column), by row."""
    rows, columns, shift = -(-q_len // block), -(-k_len // block), max(k_len - q_len, 0)
    least, most = rules.reach(rule)
    wide = min(columns, (most - least) // block + 3)  # blocks of keys that a row can reach
    whole, maybe = [], []
    for row in torch.arange(rows, device=device, dtype=torch.int32).split(max(1, CHUNK // wide)):
        p0 = row[:, None] * block
        p1 = (p0 + block - 1).clamp(max=q_len - 1)
        first = ((p0 + shift - min(most, k_len)) // block).clamp(0, columns - wide) if wide < columns else 0 * p0
        column = first + torch.arange(wide, device=device, dtype=torch.int32)
        k0 = column * block
        k1 = (k0 + block - 1).clamp(max=k_len - 1)
        may, must = rules.bounds(rule, p0 + shift, p1 + shift, k0, k1)
        must = must & (k0 + block <= k_len)
        both = torch.stack((row[:, None].expand_as(column), column), -1)
        whole.append(both[must.expand_as(column)])
        maybe.append(both[(may & ~must).expand_as(column)])
    return torch.cat(whole), torch.cat(maybe)


def _looked_at(rule: Rule, maybe: Tensor, q_len: int, k_len: int, block: int) -> tuple[Tensor, ...]:
    """Of each block how many of its bits are set, and the number of its tile; and the tiles."""
    shift, begin = max(k_len - q_len, 0), maybe * block
    told, same = rules.alike(rule, begin[:, 0] + shift, begin[:, 1], block), None
    if told is not None and len(maybe):
        same = torch.zeros(len(maybe), dtype=torch.long, device=maybe.device)
        short = ((size - begin[:, side]).clamp(max=block) for side, size in ((0, q_len), (1, k_len)))
        for number in (*told, *short):
            values, place = number.unique(return_inverse=True)
            same = (same * len(values) + place).unique(return_inverse=True)[1]
        first = torch.zeros(int(same.max()) + 1, dtype=torch.long, device=maybe.device)
        maybe = maybe[first.scatter_(0, same, torch.arange(len(maybe), device=maybe.device))]
    seen, tile, tiles = _each(rule, maybe, q_len, k_len, block)
    return (seen, tile, tiles) if same is None else (seen[same], tile[same], tiles)


def _each(rule: Rule, maybe: Tensor, q_len: int, k_len: int, block: int) -> tuple[Tensor, ...]:
    shift, count = max(k_len - q_len, 0), 0
    place = torch.arange(block, device=maybe.device, dtype=torch.int32)
    found = []
    for part in maybe.split(max(1, CHUNK // block**2)):  # one empty part of none
        q = (part[:, :1] * block + place)[:, :, None]  # beyond the last as the last: a short block can be full
        k = (part[:, 1:] * block + place)[:, None]
        sees = rules.sees(rule, q.clamp(max=q_len - 1) + shift, k.clamp(max=k_len - 1)) & (k < k_len)
        tiles, tile = _distinct(pack(sees))
        found.append((sees.flatten(1).sum(1), tile + count, tiles))
        count += len(tiles)
    return tuple(map(torch.cat, zip(*found, strict=True)))


def _distinct(words: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles int32 [n, block, block / 32] without repeats, and of each one its place among them."""
    flat = words.flatten(1).long()
    odd = torch.arange(1, 2 * flat.shape[1], 2, device=words.device) * 0x9E3779B97F4A7C1  # a sum by odd weights
    _, place = ((flat ^ flat >> 7) * odd).sum(1).unique(return_inverse=True)
    first = torch.full((int(place.max()) + 1 if len(place) else 0,), len(words), device=words.device)
    first.scatter_reduce_(0, place, torch.arange(len(words), device=words.device), "amin")
    if not torch.equal(words[first][place], words):  # two tiles with one sum
        return words.unique(dim=0, return_inverse=True)
    return words[first], place
