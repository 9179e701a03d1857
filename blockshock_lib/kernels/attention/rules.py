"""The atoms that patterns are made of: each says which keys a query sees, and what it knows of a whole block at once.

`sees` is the rule, pair by pair. `bounds` gives for a block of queries p0..p1 and of keys k0..k1 (both ends included)
two answers: whether some pair may see each other, and whether all do. Both are safe, not sharp. p is a query's
position among the keys: queries are the last of the positions, so that the last query stands beside the last key.

`alike` tells blocks apart: two that begin at (p0, k0) and give the same numbers have the same pairs, so that one of
them is looked at for all. None: each block may be another.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_, or_

import torch
from torch import Tensor

FAR = 1 << 30  # further than any position


class Atom:
    def alike(self, p0, k0, block):
        return None

    def on(self, device):
        return self


@dataclass(frozen=True)
class Band(Atom):
    """low <= p - k <= high."""

    low: int
    high: int

    def sees(self, p, k):
        return (p - k >= self.low) & (p - k <= self.high)

    def bounds(self, p0, p1, k0, k1):
        least, most = p0 - k1, p1 - k0
        return (most >= self.low) & (least <= self.high), (least >= self.low) & (most <= self.high)

    def alike(self, p0, k0, block):
        # Far outside and well inside of the band all blocks are alike.
        away, low, high = p0 - k0, self.low + block, self.high - block
        inside = (away >= low) & (away <= high)
        return (away.clamp(self.low - block, self.high + block).masked_fill(inside, low),)


@dataclass(frozen=True)
class Strip(Atom):
    """Of each `every` keys those from `begin` to before `end`; `of` "p": of queries, "p - k": of distances."""

    every: int
    begin: int
    end: int
    of: str = "k"

    def ends(self, p0, p1, k0, k1):
        return (k0, k1) if self.of == "k" else (p0, p1) if self.of == "p" else (p0 - k1, p1 - k0)

    def sees(self, p, k):
        place = self.ends(p, p, k, k)[0] % self.every
        return (place >= self.begin) & (place < self.end)

    def bounds(self, p0, p1, k0, k1):
        x0, x1 = self.ends(p0, p1, k0, k1)
        first = x0 % self.every
        last = first + x1 - x0
        some = (first < self.end) & (last >= self.begin) | (last >= self.begin + self.every)
        return some, (first >= self.begin) & (last < self.end) | (self.end - self.begin == self.every)

    def alike(self, p0, k0, block):
        x0, wide = self.ends(p0, p0, k0, k0 + (block - 1))[0], block if self.of != "p - k" else 2 * block - 1
        first = (x0 % self.every).clamp(min=self.begin - wide)
        empty = (first >= self.end) & (first <= self.every + self.begin - wide)
        return (first.masked_fill(empty, self.end),)


@dataclass(frozen=True)
class Diagonal(Atom):
    """p and k lie in one piece, all pieces of `size`, and at `first`, `first` + `rate`, ... of it."""

    size: int
    rate: int = 1
    first: int = 0

    def sees(self, p, k):
        one = p // self.size == k // self.size
        if self.rate == 1:
            return one
        return one & (p % self.size % self.rate == self.first) & (k % self.size % self.rate == self.first)

    def bounds(self, p0, p1, k0, k1):
        some, each = _one_piece(p0 // self.size, p1 // self.size, k0 // self.size, k1 // self.size)
        return some, each & (self.rate == 1)

    def alike(self, p0, k0, block):
        if self.size < block:  # a block may hold several ends of pieces
            return p0 % self.size, (p0 - k0).clamp(-self.size - block, self.size + block)
        ends = [(self.size - x % self.size).clamp(max=block) for x in (p0, k0)]
        steps = [x % self.size % self.rate for x in (p0, k0)] if self.rate > 1 else []
        return (p0 // self.size - k0 // self.size).clamp(-2, 2), *ends, *steps


class _Cells(Atom):
    """Cells of pairs, each of which sees whole or not at all."""

    def sees(self, p, k):
        return self.keeps(*self.cell(p, k))

    def bounds(self, p0, p1, k0, k1):
        first, last = self.cell(p0, k0), self.cell(p1, k1)
        one, kept = (first[0] == last[0]) & (first[1] == last[1]), self.keeps(*first)
        return kept | ~one, kept & one


@dataclass(frozen=True)
class Cells(_Cells):
    """Cells of `size` x `size` pairs, each kept or not by a hash: as many of 2^32 as `threshold`."""

    size: int
    threshold: int
    seed: int

    def cell(self, p, k):
        return p // self.size, k // self.size

    def keeps(self, i, j):
        mixed = _hash(i, j, self.seed)
        return mixed < self.threshold - 2**31 if self.threshold < 2**32 else mixed == mixed


@dataclass(frozen=True, eq=False)
class Table(_Cells):
    """Query q = p - shift and key k as table [q // size, k // size], bool."""

    table: Tensor
    size: int
    shift: int

    def __repr__(self):
        return f"Table({_told(self.table)}, {self.size}, {self.shift})"

    def cell(self, p, k):
        return (p - self.shift) // self.size, k // self.size

    def on(self, device):
        return replace(self, table=self.table.to(device))

    def keeps(self, i, j):
        return self.table.to(i.device)[i, j]


@dataclass(frozen=True, eq=False)
class Documents(Atom):
    """p and k lie in one document. `number` int32 [positions], of each position's document, rising."""

    number: Tensor

    def __repr__(self):
        return f"Documents({_told(self.number)})"

    def on(self, device):
        return replace(self, number=self.number.to(device))

    def sees(self, p, k):
        number = self.number.to(p.device)
        return number[p] == number[k]

    def bounds(self, p0, p1, k0, k1):
        number = self.number.to(p0.device)
        return _one_piece(number[p0], number[p1], number[k0], number[k1])

    def alike(self, p0, k0, block):
        # A side within one document is told by that one; where both are, it counts only whether theirs is the same.
        number, told = self.number.to(p0.device), []
        for begin in (p0, k0):
            end = number[(begin + (block - 1)).clamp(max=len(number) - 1)]
            told.append(torch.where(number[begin] == end, end, -1 - begin))
        both = (told[0] >= 0) & (told[1] >= 0)
        return *(side.masked_fill(both, 0) for side in told), told[0] == told[1]


Rule = tuple[tuple[Atom, ...], ...]  # some term holds; a term holds where each of its atoms does


def both(one: tuple[Atom, ...], other: tuple[Atom, ...]) -> tuple[Atom, ...]:
    """The term that holds where both do; of its bands one is left, what they have in common."""
    atoms = dict.fromkeys(one + other)
    bands = [atom for atom in atoms if isinstance(atom, Band)]
    shared = (Band(max(band.low for band in bands), min(band.high for band in bands)),) if bands else ()
    return (*shared, *(atom for atom in atoms if not isinstance(atom, Band)))


def on(rule: Rule, device: object) -> Rule:
    """The same rule, its tables on that device."""
    return tuple(tuple(atom.on(device) for atom in term) for term in rule)


def sees(rule: Rule, p: Tensor, k: Tensor) -> Tensor:
    """Bool, of the shape that p and k broadcast to."""
    return reduce(or_, (reduce(and_, (atom.sees(p, k) for atom in term)) for term in rule))


def bounds(rule: Rule, p0: Tensor, p1: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, Tensor]:
    """(may, must) of blocks: bool, of the shape that the four broadcast to."""
    terms = (reduce(_each(and_), (atom.bounds(p0, p1, k0, k1) for atom in term)) for term in rule)
    return reduce(_each(or_), terms)


def alike(rule: Rule, p0: Tensor, k0: Tensor, block: int) -> list[Tensor] | None:
    """Of blocks that begin at p0 and k0 [n]: numbers [n] that tell those with other pairs apart; None: all differ."""
    told = [atom.alike(p0, k0, block) for atom in dict.fromkeys(atom for term in rule for atom in term)]
    return None if None in told else [number for each in told for number in each]


def reach(rule: Rule) -> tuple[int, int]:
    """(least, most) p - k of a pair that the rule may let see each other, as far as its bands tell."""
    bands = [next((atom for atom in term if isinstance(atom, Band)), Band(-FAR, FAR)) for term in rule]
    return min(band.low for band in bands), max(band.high for band in bands)


def _each(join: Callable) -> Callable:
    return lambda one, other: tuple(map(join, one, other))


def _told(values: Tensor) -> str:
    # Torch's own text leaves out most of a large tensor, and ranks compare their patterns by text.
    return f"{list(values.shape)} {hashlib.sha256(values.cpu().numpy().tobytes()).hexdigest()}"


def _one_piece(p0, p1, k0, k1):
    # Numbers of pieces rise with the position.
    return (p0 <= k1) & (k0 <= p1), (p0 == p1) & (k0 == k1) & (p0 == k0)


def _hash(i, j, seed: int):
    # Wellons's lowbias32 in int32, whose products wrap; its sign is turned over, so that it rises as the 32 bits do.
    mixed = i.int() * _signed(0x9E3779B1) ^ j.int() * _signed(0x85EBCA77) ^ _signed(seed * 0xC2B2AE3D)
    for shift, odd in ((16, 0x7FEB352D), (15, _signed(0x846CA68B))):
        mixed = (mixed ^ mixed >> shift & (1 << 32 - shift) - 1) * odd
    return mixed ^ mixed >> 16 & 0xFFFF ^ _signed(1 << 31)


def _signed(bits: int) -> int:
    return (bits + 2**31) % 2**32 - 2**31
