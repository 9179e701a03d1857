"""Masks that keep two of every four weights along the input dimension, and the proof that they do.

A mask M is a bool tensor [out_features, in_features]; True keeps a weight. Term 0 of Block-Shock holds W where M,
term 1 holds W where ~M, and the two add up to W. A *group* is four neighbours along the input dimension, a *tile* 4x4.

Shapes: N = out_features, K = in_features. Every function works in chunks of rows, so that a mask of 40960x40960
(1.6 GB) needs temporaries of tens of megabytes only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from blockshock_lib.errors import UnsupportedError

if TYPE_CHECKING:
    from blockshock_lib.params import Mask

PATTERNS = torch.tensor([p for p in product((True, False), repeat=4) if sum(p) == 2])
"""The six groups with two of four kept, bool [6, 4]."""

TILES = torch.stack([rows for i in product(range(6), repeat=4) if ((rows := PATTERNS[list(i)]).sum(0) == 2).all()])
"""The 90 tiles with two kept in every row and every column, bool [90, 4, 4]. Their complements are among them."""

_CHUNK = 1 << 24  # elements of a mask handled at once: int64 temporaries of a chunk stay below 64 MB


class Proof(NamedTuple):
    """What was measured on a pair of terms; see `prove`."""

    complementary: bool
    rows_2to4: bool
    columns_2to4: bool


def make(
    mask: Mask,
    shape: tuple[int, int],
    *,
    weight: Tensor | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Term 0's mask M(0); term 1's is `~M(0)`.

    Args:
        mask: family and pattern (`params.Mask`, or anything with these two attributes).
        shape: (out_features, in_features), both multiples of 4.
        weight: [out_features, in_features], any float dtype; read by the family "magnitude" only.
        seed: of the random families. The same seed gives the same mask on a CPU and on a GPU.
        device: where the mask is to live.

    Returns:
        bool [out_features, in_features], contiguous.

    Raises:
        UnsupportedError: a dimension is not a positive multiple of 4.
        ValueError: unknown family or pattern; "magnitude" without a finite weight of this shape.
    """
    rows, columns = shape
    if rows < 4 or columns < 4 or rows % 4 or columns % 4:
        raise UnsupportedError(f"a 2:4 mask needs both dimensions to be multiples of 4, not {rows}x{columns}")
    if mask.family == "magnitude":
        return _magnitude(weight, (rows, columns)).to(device)
    if mask.family == "random":
        return _drawn(PATTERNS.view(6, 1, 4), (rows, columns), seed, device)
    if mask.family == "transposable" and mask.pattern == "random":
        return _drawn(TILES, (rows, columns), seed, device)
    return tile(mask).to(device).repeat(rows // 4, columns // 4)


def tile(mask: Mask) -> Tensor:
    """The 4x4 tile that a periodic mask repeats: bool [4, 4] on the CPU.

    Raises:
        UnsupportedError: the mask is not periodic.
        ValueError: unknown family or pattern.
    """
    if mask.family == "uniform":
        if sorted(mask.pattern) != list("0011"):
            raise ValueError(f"uniform pattern {mask.pattern!r}: write two ones and two zeros, for example '1100'")
        return torch.tensor([[c == "1" for c in mask.pattern]] * 4)
    if mask.family == "transposable" and mask.pattern == "checkerboard":
        return torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]], dtype=torch.bool)
    if mask.family in ("random", "magnitude") or (mask.family, mask.pattern) == ("transposable", "random"):
        raise UnsupportedError(f"the mask {' '.join((mask.family, mask.pattern)).strip()!r} is not periodic")
    raise ValueError(
        f"mask family {mask.family!r} with pattern {mask.pattern!r}: allowed are uniform (1100, 0011, 1010, 0101, "
        "1001, 0110), random, transposable (checkerboard, random) and magnitude"
    )


def periodic_classes(mask: Mask, term: int = 0) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Rows that share a pattern, with the columns that they keep, as residues modulo 4.

    A term of a periodic mask is one dense block a class: rows r with `r % 4` in the first tuple times columns c with
    `c % 4` in the second. For the checkerboard's term 0: `[((0, 1), (0, 1)), ((2, 3), (2, 3))]`.

    Raises:
        UnsupportedError: the mask is not periodic.
        ValueError: unknown family or pattern; a term other than 0 or 1.
    """
    if term not in (0, 1):
        raise ValueError(f"term {term}: a 2:4 mask splits a weight into terms 0 and 1")
    kept = tile(mask) if term == 0 else ~tile(mask)
    classes: dict[tuple[int, ...], list[int]] = {}
    for row, pattern in enumerate(kept.tolist()):
        classes.setdefault(tuple(c for c, keep in enumerate(pattern) if keep), []).append(row)
    return [(tuple(rows), columns) for columns, rows in classes.items()]


def prove(first: Tensor, second: Tensor | None = None) -> Proof:
    """Measure both terms' masks, bool [N, K]; `second` is `~first` where it is not given.

    Returns:
        complementary: every weight is kept by exactly one term.
        rows_2to4: both terms keep two of every four along the input dimension (what the hardware needs).
        columns_2to4: both terms keep two of every four along the output dimension (what a transposed product needs).
        Both are False where that dimension is not a multiple of 4.

    Raises:
        ValueError: not bool, not 2-D, or two different shapes.
    """
    for term in (first, first if second is None else second):
        if term.dtype != torch.bool or term.dim() != 2 or term.shape != first.shape:
            raise ValueError(f"two bool masks of one 2-D shape are needed, not {term.dtype} {tuple(term.shape)}")
    second = ~first if second is None else second
    rows, columns = first.shape
    both = (first, second)
    return Proof(
        complementary=all(bool((a != b).all()) for a, b in zip(_chunks(first), _chunks(second), strict=True)),
        rows_2to4=columns % 4 == 0 and all(first_bad_group(term) is None for term in both),
        columns_2to4=rows % 4 == 0
        and all(bool((_kept_in_columns(chunk) == 2).all()) for term in both for chunk in _chunks(term)),
    )


def require(first: Tensor, second: Tensor | None = None, *, columns: bool = False) -> Proof:
    """`prove`, and raise ValueError with what is wrong; `columns` asks for 2:4 along the output dimension as well."""
    proof = prove(first, second)
    if not proof.complementary:
        raise ValueError("the two terms' masks are not complementary: a weight is kept twice or not at all")
    if not proof.rows_2to4:
        raise ValueError("the mask does not keep two of every four weights along the input dimension")
    if columns and not proof.columns_2to4:
        raise ValueError("the mask does not keep two of every four weights along the output dimension")
    return proof


def first_bad_group(mask: Tensor) -> tuple[int, int, int] | None:
    """(row, first column, kept) of the first group of a bool mask [N, K] that does not keep two; None if all do."""
    start = 0
    for chunk in _chunks(mask):
        kept = _kept(chunk)
        if not bool((kept == 2).all()):
            row, group = (kept != 2).nonzero()[0].tolist()
            return start + row, 4 * group, int(kept[row, group])
        start += chunk.shape[0]
    return None


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    rows = max(4, _CHUNK // max(1, tensor.shape[1]) // 4 * 4)  # whole tiles, so that columns can be counted too
    return iter(tensor.split(rows))


def _kept(chunk: Tensor) -> Tensor:
    return chunk.reshape(chunk.shape[0], -1, 4).sum(-1, dtype=torch.int8)


def _kept_in_columns(chunk: Tensor) -> Tensor:
    return chunk.reshape(-1, 4, chunk.shape[1]).sum(1, dtype=torch.int8)


def _drawn(choices: Tensor, shape: tuple[int, int], seed: int, device: torch.device | str) -> Tensor:
    """Every block of [h, 4] drawn from `choices` [count, h, 4], evenly and without regard to its neighbours."""
    count, height, _ = choices.shape
    rows, columns = shape[0] // height, shape[1] // 4
    choices, out = choices.to(device), torch.empty(shape, dtype=torch.bool, device=device)
    step = max(1, _CHUNK // 4 // columns)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        index = _hash(start, stop, columns, seed, out.device).mul_(count).bitwise_right_shift_(32)
        blocks = choices[index].transpose(1, 2)  # [r, c, h, 4] -> [r, h, c, 4]
        out[start * height : stop * height] = blocks.reshape(-1, shape[1])
    return out


def _hash(start: int, stop: int, columns: int, seed: int, device: torch.device) -> Tensor:
    """32 even bits a place, int64 [stop - start, columns], from row, column and seed only.

    A generator's stream differs between a CPU and a GPU and depends on the order of drawing; a hash of the place does
    not.
    The mixing step is MurmurHash3's 32-bit finaliser (A. Appleby, public domain).
    """

    def mix(h: Tensor) -> Tensor:
        h = (h ^ (h >> 16)).mul_(0x85EBCA6B).bitwise_and_(0xFFFFFFFF)
        h = (h ^ (h >> 13)).mul_(0xC2B2AE35).bitwise_and_(0xFFFFFFFF)
        return h ^ (h >> 16)

    row = mix(torch.arange(start, stop, device=device).add_(seed * 0x9E3779B9 & 0x7FFFFFFF).bitwise_and_(0xFFFFFFFF))
    column = mix(torch.arange(columns, device=device).add_((seed + 1) * 0x61C88647 & 0x7FFFFFFF))
    return mix(row[:, None] ^ column[None, :] * 0x2545F491 & 0xFFFFFFFF)


def _magnitude(weight: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """The two larger |w| of each group; a tie goes to the lower index. `topk` and `sort` leave ties to the device."""
    if weight is None or tuple(weight.shape) != shape:
        raise ValueError(f"a magnitude mask of {shape} needs the weight of that shape")
    out = torch.empty(shape, dtype=torch.bool, device=weight.device)
    for source, target in zip(_chunks(weight.detach()), _chunks(out), strict=True):
        size = source.abs().reshape(source.shape[0], -1, 4)
        if not bool(size.isfinite().all()):
            raise ValueError("a magnitude mask needs finite weights")
        w = size.unbind(-1)
        for i in range(4):
            larger = sum((w[j] >= w[i] if j < i else w[j] > w[i]).to(torch.int8) for j in range(4) if j != i)
            target.view(target.shape[0], -1, 4)[..., i] = larger < 2
    return out
