"""Masks that keep two of every four weights along the input dimension, and the proof that they do.

A mask M is bool [N, K] = [out_features, in_features]; True keeps a weight. Term 0 of Block-Shock holds W where M, term
1 where ~M. A *group* is four neighbours along the input dimension, a *tile* 4x4. All is done in runs of rows: a mask of
40960x40960 (1.6 GB) needs temporaries of tens of megabytes only.
"""

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor
from torch.types import Device

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import mask as named
from blockshock_lib.kernels.sparse24.mask import Mask

PATTERNS = torch.tensor([p for p in product((True, False), repeat=4) if sum(p) == 2])
"""The six groups with two of four kept, bool [6, 4]."""

TILES = torch.stack([rows for i in product(range(6), repeat=4) if ((rows := PATTERNS[list(i)]).sum(0) == 2).all()])
"""The 90 tiles with two kept in every row and every column, bool [90, 4, 4]. Their complements are among them."""

_CHUNK = 1 << 22  # entries handled at once: their int64 temporaries stay below 32 MB


def make(
    mask: Mask, shape: tuple[int, int], *, weight: Tensor | None = None, seed: int = 0, device: Device = "cpu"
) -> Tensor:
    """Term 0's mask M(0), bool of this shape; term 1's is `~M(0)`. A seed gives the same mask on a CPU and on a GPU.

    UnsupportedError where a dimension is not a positive multiple of 4; ValueError for an unknown family or pattern, and
    for "magnitude" without a finite weight of this shape.
    """
    rows, columns = shape
    if rows < 4 or columns < 4 or rows % 4 or columns % 4:
        raise UnsupportedError(f"a 2:4 mask needs both dimensions to be multiples of 4, not {rows}x{columns}")
    if maker := MAKERS.get((mask.family, mask.pattern)):
        return maker((rows, columns), weight, seed, device)
    return tile(mask).to(device).repeat(rows // 4, columns // 4)


def tile(mask: Mask) -> Tensor:
    """The 4x4 tile that a periodic mask repeats: bool [4, 4] on the CPU. UnsupportedError where it is not periodic."""
    if mask.pattern not in named.PATTERNS.get(mask.family, ()):
        allowed = "; ".join(f"{family} ({', '.join(patterns)})" for family, patterns in named.PATTERNS.items())
        raise ValueError(f"mask family {mask.family!r} with pattern {mask.pattern!r}: allowed are {allowed}")
    if not mask.periodic:
        raise UnsupportedError(f"the mask {' '.join((mask.family, mask.pattern)).strip()!r} is not periodic")
    if mask.family == "uniform":
        return torch.tensor([[c == "1" for c in mask.pattern]] * 4)
    return torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]], dtype=torch.bool)


def first_bad_group(mask: Tensor) -> tuple[int, int, int] | None:
    """(row, first column, kept) of the first group of a bool mask [N, K] that does not keep two; None if all do."""
    for part in parts(*mask.shape):
        kept = mask[part].unflatten(1, (-1, 4)).sum(-1, dtype=torch.int8)
        if not bool((kept == 2).all()):
            row, group = (kept != 2).nonzero()[0].tolist()
            return part.start + row, 4 * group, int(kept[row, group])
    return None


def check_groups(mask: Tensor) -> None:
    """ValueError where a bool mask [N, K] does not keep two of every four along K."""
    if bad := first_bad_group(mask):
        row, column, kept = bad
        raise ValueError(f"the mask is not 2:4: row {row}, columns {column} to {column + 3} keep {kept} of 4")


def parts(rows: int, columns: int, multiple: int = 4) -> Iterator[slice]:
    """Runs of rows of a matrix, each of a multiple of so many, the last of what is left."""
    step = max(1, _CHUNK // (multiple * columns)) * multiple
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))


def _drawn(choices: Tensor, shape: tuple[int, int], seed: int, device: Device) -> Tensor:
    # Every block of [h, 4] from `choices` [count, h, 4], evenly and without regard to its neighbours.
    count, height, _ = choices.shape
    rows, columns = shape[0] // height, shape[1] // 4
    choices, out = choices.to(device), torch.empty(shape, dtype=torch.bool, device=device)
    for part in parts(rows, columns, 1):
        index = _hash(part.start, part.stop, columns, seed, out.device).mul_(count).bitwise_right_shift_(32)
        blocks = choices[index].transpose(1, 2)  # [r, c, h, 4] -> [r, h, c, 4]
        out[part.start * height : part.stop * height] = blocks.reshape(-1, shape[1])
    return out


def _hash(start: int, stop: int, columns: int, seed: int, device: torch.device) -> Tensor:
    """32 even bits a place, int64 [stop - start, columns], from row, column and seed only: a generator's stream differs
    between a CPU and a GPU. The mixing step is MurmurHash3's 32-bit finaliser (A. Appleby, public domain).
    """

    def mix(h: Tensor) -> Tensor:
        h = (h ^ (h >> 16)).mul_(0x85EBCA6B).bitwise_and_(0xFFFFFFFF)
        h = (h ^ (h >> 13)).mul_(0xC2B2AE35).bitwise_and_(0xFFFFFFFF)
        return h ^ (h >> 16)

    row = mix(torch.arange(start, stop, device=device).add_(seed * 0x9E3779B9 & 0x7FFFFFFF).bitwise_and_(0xFFFFFFFF))
    column = mix(torch.arange(columns, device=device).add_((seed + 1) * 0x61C88647 & 0x7FFFFFFF))
    return mix(row[:, None] ^ column[None, :] * 0x2545F491 & 0xFFFFFFFF)


def _magnitude(weight: Tensor | None, shape: tuple[int, int]) -> Tensor:
    if weight is None or tuple(weight.shape) != shape:
        raise ValueError(f"a magnitude mask of {shape} needs the weight of that shape")
    out = torch.empty(shape, dtype=torch.bool, device=weight.device)
    for part in parts(*shape):
        size = weight.detach()[part].abs().unflatten(1, (-1, 4))
        if not bool(size.isfinite().all()):
            raise ValueError("a magnitude mask needs finite weights")
        out[part] = larger_two(size)
    return out


def larger_two(sizes: Tensor) -> Tensor:
    """Of groups [N, K/4, 4] the two larger, bool [N, K]: what wins against two of the others, a tie by its index."""
    wins = sizes[..., None] > sizes[..., None, :]
    wins |= (sizes[..., None] == sizes[..., None, :]) & torch.ones(4, 4, device=sizes.device).triu(1).bool()
    return (wins.sum(-1) >= 2).flatten(1)


MAKERS: dict[tuple[str, str], Callable[[tuple[int, int], Tensor | None, int, Device], Tensor]] = {
    ("random", ""): lambda shape, _, seed, device: _drawn(PATTERNS.view(6, 1, 4), shape, seed, device),
    ("transposable", "random"): lambda shape, _, seed, device: _drawn(TILES, shape, seed, device),
    ("magnitude", ""): lambda shape, weight, _, device: _magnitude(weight, shape).to(device),
}
"""(family, pattern) -> what makes term 0's mask from shape, weight, seed and device; the others repeat a `tile`."""
