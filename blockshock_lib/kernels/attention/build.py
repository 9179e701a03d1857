"""Block lists of a pattern's rules: blocks are judged whole where the rule's bounds allow, the others pair by pair.

A block is known by its number, as of `BlockLists.of`. All is done on the device, with few waits for it, in pieces.
"""

import torch
from torch import Tensor

from blockshock_lib.kernels.attention import bands, rules
from blockshock_lib.kernels.attention.lists import BlockLists, pack
from blockshock_lib.kernels.attention.rules import Rule

LEAST, CHUNK = 1 << 12, 1 << 16  # blocks that are judged together: what is held for them is smaller than the lists
PAIRS = 1 << 20  # pairs of query and key that are looked at together
MIX = 0x9E3779B97F4A7C15 - 2**64  # odd


def lists(
    found: tuple[Rule, ...], plane: tuple, q_len: int, k_len: int, block: int, device: torch.device
) -> BlockLists:
    """`Pattern.lists`, whose checks have passed; those of a band alone, and whole blocks, in closed form."""
    atoms = [atom for rule in found for term in rule for atom in term]
    if [*map(type, atoms)] == [rules.Band] and atoms[0].low <= atoms[0].high and q_len % block == k_len % block == 0:
        return bands.lists(*atoms, plane, q_len, k_len, block, device)
    full, partial, tiles = [], [], [torch.empty(0, block, block // 32, dtype=torch.int32, device=device)]
    tile = [torch.empty(0, dtype=torch.int64, device=device)]
    blocks = -(-q_len // block) * -(-k_len // block)
    kind = torch.int32 if 2 * len(found) * blocks < 2**31 else torch.int64
    for number, rule in enumerate(found):
        whole, maybe = _judged(rule, q_len, k_len, block, device, kind)
        if len(maybe):
            seen, of, bits = _looked_at(rule, maybe, q_len, k_len, block)
            each = seen == block * block
            some = ((seen > 0) & ~each).nonzero()[:, 0]  # one wait for the device, whatever is taken by it
            whole, maybe = torch.cat((whole, maybe[each])), maybe[some]
            tile.append(of[some] + sum(map(len, tiles)))
            tiles.append(bits)
        full.append(whole.add_(number * blocks))
        partial.append(maybe.add_(number * blocks))
    whole, full, partial = None, torch.cat(full), torch.cat(partial)  # of the largest there is one alone
    shared, same = _distinct(torch.cat(tiles))
    rest = {"tiles": shared, "plane": torch.tensor(plane, dtype=torch.int32, device=device)}
    sizes = {"block": block, "q_len": q_len, "k_len": k_len}
    return BlockLists.of(full, partial, same[torch.cat(tile)], len(found), **sizes, **rest)


def _judged(
    rule: Rule, q_len: int, k_len: int, block: int, device: torch.device, kind: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The blocks that are surely full, and those that may hold some pair, of the first plane, [n] of `kind`, rising."""
    rows, columns, shift = -(-q_len // block), -(-k_len // block), max(k_len - q_len, 0)
    least, most = rules.reach(rule)
    wide = min(columns, max(most - least, 0) // block + 3)  # blocks of keys that a row can reach
    every = torch.arange(max(rows, wide), device=device, dtype=torch.int32)
    p0 = every[:rows, None] * block + shift
    p1 = (p0 + (block - 1)).clamp(max=q_len - 1 + shift)
    first = ((p0 - min(most, k_len)) // block).clamp(0, columns - wide)
    begin = every[:rows, None].to(kind) * columns

    def judged(p0: Tensor, p1: Tensor, first: Tensor, begin: Tensor) -> Tensor:
        column = first + every[:wide] if wide < columns else every[:wide]
        k0 = column * block
        may, must = rules.bounds(rule, p0, p1, k0, (k0 + (block - 1)).clamp(max=k_len - 1))
        number = (begin + column).mul_(2).add_(must & (k0 <= k_len - block))  # one wait for the device instead of two
        return number[may.expand_as(number)]

    # What no band bounds may list few of those that are judged.
    at_once = min(CHUNK if wide < columns else CHUNK // 4 * 3, max(LEAST, rows * wide // 4))
    pieces = zip(*(x.split(max(1, at_once // wide)) for x in (p0, p1, first, begin)), strict=True)
    found = torch.cat([judged(*piece) for piece in pieces])
    whole = (found & 1).bool()
    found >>= 1
    return found[whole], found[~whole]


def _looked_at(rule: Rule, maybe: Tensor, q_len: int, k_len: int, block: int) -> tuple[Tensor, ...]:
    """Of each block how many of its bits are set, and the number of its tile; and the tiles."""
    columns, shift = -(-k_len // block), max(k_len - q_len, 0)
    p0, k0 = (maybe // columns).int() * block, (maybe % columns).int() * block
    told = rules.alike(rule, p0 + shift, k0, block)
    if told is None:
        return _each(rule, p0, k0, q_len, k_len, block)
    told += [(size - begin).clamp(max=block) for begin, size in ((p0, q_len), (k0, k_len))]
    first, same = _same(torch.stack(told, 1))
    seen, tile, tiles = _each(rule, p0[first], k0[first], q_len, k_len, block)
    return seen[same], tile[same], tiles


def _each(rule: Rule, p0: Tensor, k0: Tensor, q_len: int, k_len: int, block: int) -> tuple[Tensor, ...]:
    shift, count = max(k_len - q_len, 0), 0
    place = torch.arange(block, device=p0.device, dtype=torch.int32)
    found = []
    for rows, columns in zip(*(x.split(max(1, PAIRS // block**2)) for x in (p0, k0)), strict=True):
        q = (rows[:, None] + place)[:, :, None]  # beyond the last as the last: a short block can be full
        k = (columns[:, None] + place)[:, None]
        sees = rules.sees(rule, q.clamp(max=q_len - 1) + shift, k.clamp(max=k_len - 1)) & (k < k_len)
        sees = sees.expand(-1, block, block)  # a rule of keys alone knows no query
        tiles, tile = _distinct(pack(sees))
        found.append((sees.flatten(1).sum(1), tile + count, tiles))
        count += len(tiles)
    return found[0] if len(found) == 1 else tuple(map(torch.cat, zip(*found, strict=True)))


def _distinct(words: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles int32 [n, block, block / 32] without repeats, and of each one its place among them."""
    first, place = _same(words)
    return words[first], place


def _same(values: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows [n, ...], whole: the place of one of each kind, and the kind of each [n]."""
    flat = values.flatten(1).long()
    kinds, kind = (
        (flat * torch.full(flat.shape[1:], MIX, device=flat.device).cumprod(0)).sum(1).unique(return_inverse=True)
    )
    first = _one_of(kinds, kind)
    if not torch.equal(values[first][kind], values):  # two kinds with one sum
        kinds, kind = values.unique(dim=0, return_inverse=True)
        first = _one_of(kinds, kind)
    return first, kind


def _one_of(kinds: Tensor, kind: Tensor) -> Tensor:
    place = torch.arange(len(kind), device=kind.device)
    return torch.empty_like(place[: len(kinds)]).scatter_(0, kind, place)
