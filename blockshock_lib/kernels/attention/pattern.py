"""Patterns: which keys each query sees. Written once, they give block lists, a rule for FlexAttention and a picture.

A pattern is combined by `&` and `|`, and differs by head and batch by `by_head` and `by_batch`. Queries are the last of
the positions: with fewer queries than keys the last query stands beside the last key, as in decoding.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor

from blockshock_lib.errors import allowed
from blockshock_lib.kernels.attention import build, rules
from blockshock_lib.kernels.attention.lists import BlockLists
from blockshock_lib.kernels.attention.rules import FAR, Rule

KEPT = 16  # lists of one pattern: decoding asks for others with each token
NUMBERED: weakref.WeakValueDictionary[int, "Pattern"] = weakref.WeakValueDictionary()  # an operator takes no objects


@dataclass(frozen=True, eq=False)
class Pattern:
    """Which keys each query sees.

    `rules`: the distinct ones; `plane` [B | 1][H | 1]: which each head has. `lengths`: (queries, keys) that it was
    made for, where it was (from_mask, block_lists); `positions`: how many it knows (documents).
    """

    rules: tuple[Rule, ...]
    plane: tuple[tuple[int, ...], ...] = ((0,),)
    lengths: tuple[int, int] | None = None
    positions: int | None = None
    made: dict[tuple, BlockLists] = field(default_factory=dict, repr=False)  # the lists asked for last
    number: int = field(default_factory=itertools.count().__next__, init=False, repr=False)  # of this process

    def __post_init__(self):
        NUMBERED[self.number] = self

    def __reduce__(self):  # a copy has a number and lists of its own
        return Pattern, (self.rules, self.plane, self.lengths, self.positions)

    def __and__(self, other: "Pattern") -> "Pattern":
        return self._join(other, lambda a, b: tuple(rules.both(x, y) for x in a for y in b))

    def __or__(self, other: "Pattern") -> "Pattern":
        return self._join(other, lambda a, b: a + tuple(term for term in b if term not in a))

    def _join(self, other: "Pattern", join: Callable[[Rule, Rule], Rule]) -> "Pattern":
        if not isinstance(other, Pattern):
            return NotImplemented
        batch, heads = _wider(len(self.plane), len(other.plane)), _wider(len(self.plane[0]), len(other.plane[0]))
        pairs: dict[tuple[int, int], int] = {}
        plane = tuple(
            tuple(pairs.setdefault((self.plane_of(b, h), other.plane_of(b, h)), len(pairs)) for h in range(heads))
            for b in range(batch)
        )
        joined = tuple(join(self.rules[a], other.rules[b]) for a, b in pairs)
        return Pattern(joined, plane, _same(self.lengths, other.lengths), _same(self.positions, other.positions))

    def plane_of(self, batch: int, head: int) -> int:
        row = self.plane[batch % len(self.plane)]
        return row[head % len(row)]

    def of_heads(self, heads: slice) -> "Pattern":
        """That of some heads alone."""
        if len(self.plane[0]) == 1:
            return self
        return replace(self, plane=tuple(row[heads] for row in self.plane), made={})

    def lists(self, q_len: int, k_len: int | None = None, block: int = 128, device: object = "cpu") -> BlockLists:
        """Its block lists for `q_len` queries and `k_len` keys (as many where not given), in blocks of `block`, made
        and kept on `device`. Nothing here grows with the product of the lengths.

        ValueError where a length is not positive, `block` is no multiple of 32, there are more queries than keys, or
        the pattern was made for other lengths.
        """
        k_len = q_len if k_len is None else k_len
        self.check(q_len, k_len)
        if not isinstance(block, int) or block < 32 or block % 32:
            raise ValueError(f"a block is a positive multiple of 32 queries and keys, not {block!r}")
        key = (q_len, k_len, block, torch.device(device))
        if key not in self.made:
            while len(self.made) >= KEPT:
                del self.made[next(iter(self.made))]
            self.made[key] = build.lists(self.rules, self.plane, *key)
        return self.made[key]

    def check(self, q_len: int, k_len: int) -> None:
        """ValueError where the pattern is not of these lengths."""
        if q_len < 1 or k_len < 1:
            raise ValueError(f"a pattern needs at least one query and one key, not {q_len} and {k_len}")
        asked = f"{q_len} queries and {k_len} keys"
        if self.lengths not in (None, (q_len, k_len)):
            raise ValueError(f"this pattern is of {self.lengths[0]} queries and {self.lengths[1]} keys, not of {asked}")
        if self.positions not in (None, k_len):
            raise ValueError(f"the documents of this pattern have {self.positions} positions together, not {k_len}")
        if q_len > k_len and (self.lengths is None or self.positions):
            raise ValueError(f"the queries are the last of the keys' positions, so at most as many; not {asked}")

    def sees(self, q: Tensor, k: Tensor, q_len: int, k_len: int, batch: int = 0, head: int = 0) -> Tensor:
        """Bool, of the shape that q and k, int64 numbers of queries and keys, broadcast to: the rule itself."""
        seen = rules.sees(self.rules[self.plane_of(batch, head)], q + max(k_len - q_len, 0), k)
        return seen.expand(torch.broadcast_shapes(q.shape, k.shape))

    def mask_mod(self, q_len: int, k_len: int | None = None, device: object = "cpu") -> Callable[..., Tensor]:
        """(batch, head, query, key) -> bool: FlexAttention's `mask_mod`. ValueError as of `lists`."""
        k_len = q_len if k_len is None else k_len
        self.check(q_len, k_len)
        own = [rules.on(rule, device) for rule in self.rules]  # a compiled rule can move no table
        if len(own) == 1:
            return lambda b, h, q, k: rules.sees(own[0], q + max(k_len - q_len, 0), k)
        plane = torch.tensor(self.plane, device=device)
        wide, high = (int(size > 1) for size in plane.shape)

        def seen(b, h, q, k):
            of = plane[b * wide, h * high]
            each = [rules.sees(rule, q + max(k_len - q_len, 0), k) & (of == i) for i, rule in enumerate(own)]
            return reduce(torch.logical_or, each)  # FlexAttention's compiler knows no stack in a mask_mod

        return seen


def checked(pattern: object) -> Pattern:
    """ValueError where it is none: a name or a mask, as other libraries take."""
    if not isinstance(pattern, Pattern):
        kind = type(pattern).__name__
        raise ValueError(f"pattern is a Pattern, as attention.causal() or attention.from_mask(mask) give, not a {kind}")
    return pattern


def causal() -> Pattern:
    """Each query sees the keys up to its own position."""
    return _one(rules.Band(0, FAR))


def full() -> Pattern:
    """Each query sees each key: dense attention."""
    return _one(rules.Band(-FAR, FAR))


def window(size: int) -> Pattern:
    """Keys less than `size` positions away, before and behind; with `causal()` the last `size`, its own among them."""
    far = positive("size", size) - 1
    return _one(rules.Band(-far, far))


def dilated_window(size: int, step: int) -> Pattern:
    """Every `step`-th key, `size` of them on either side, the query's own position counted on both."""
    step = positive("step", step)
    far = min((positive("size", size) - 1) * step, FAR)
    return _one(rules.Band(-far, far), rules.Strip(step, 0, 1, "p - k"))


def global_local(globals: int, size: int) -> Pattern:
    """The first `globals` positions see all and are seen by all; the others see `window(size)` (Longformer)."""
    first = positive("globals", globals)
    return _one(rules.Strip(FAR, 0, first, "p")) | _one(rules.Strip(FAR, 0, first)) | window(size)


def documents(lengths: Sequence[int]) -> Pattern:
    """Sequences packed one after another, each seeing itself only. `lengths` add up to the number of keys."""
    sizes = torch.tensor([positive("a document's length", length) for length in lengths])
    if not len(sizes):
        raise ValueError("documents needs at least one length")
    number = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(sizes)
    return Pattern((((rules.Documents(number),),),), positions=len(number))


def block_diagonal(size: int) -> Pattern:
    """Pieces of `size` positions, each seeing itself only."""
    return _one(rules.Diagonal(positive("size", size)))


def columns(every: int, width: int) -> Pattern:
    """Of every `every` keys the last `width`, seen by all queries."""
    positive("every", every), positive("width", width)
    if width > every:
        raise ValueError(f"of every {every} keys no {width} can be seen")
    return _one(rules.Strip(end := min(every, FAR), min(every - width, FAR), end))


def strided(every: int, local: int, width: int = 128) -> Pattern:
    """`window(local)`, and of every `every` keys the last `width`."""
    return window(local) | columns(every, width)


def random(density: float, seed: int = 0, block: int = 128) -> Pattern:
    """Blocks of `block` x `block` pairs, each seen with probability `density`: the same for the same seed anywhere."""
    if not 0 <= density <= 1:
        raise ValueError(f"a density lies between 0 and 1, not at {density}")
    if not isinstance(seed, int) or not -(2**31) <= seed < 2**32:  # the hash is of 32 bits
        raise ValueError(f"seed is a whole number from -2**31 to 2**32 - 1, not {seed!r}")
    return _one(rules.Cells(positive("block", block), round(density * 2**32), seed))


def from_mask(mask: Tensor) -> Pattern:
    """Bool [B | 1, H | 1, queries, keys] or [queries, keys], True where a query sees a key; a copy is kept."""
    if mask.dtype != torch.bool or mask.dim() not in (2, 4) or not mask.numel():
        raise ValueError(f"a bool mask [B | 1, H | 1, queries, keys] is needed, not {mask.dtype} {list(mask.shape)}")
    mask = mask.clone() if mask.dim() == 4 else mask[None, None].clone()
    return _tables(mask, 1, tuple(mask.shape[2:]))


def block_lists(counts: Tensor, indices: Tensor, q_len: int, k_len: int | None = None, block: int = 128) -> Pattern:
    """Whole blocks by lists: counts int [B | 1, H | 1, blocks of queries] and indices int [..., most], of which a row's
    first `counts` are the blocks of keys that it visits, rising.

    ValueError where shapes do not fit, or a list leaves the range, does not rise or holds a block twice.
    """
    k_len = q_len if k_len is None else k_len
    block = positive("block", block)
    rows, columns = (-(-length // block) for length in (q_len, k_len))
    if counts.dim() != 3 or indices.shape[:3] != counts.shape or indices.dim() != 4 or counts.shape[2] != rows:
        shapes = f"not {list(counts.shape)} and {list(indices.shape)}"
        raise ValueError(f"counts [B | 1, H | 1, {rows}] and indices [B | 1, H | 1, {rows}, most] are needed, {shapes}")
    if counts.is_floating_point() or indices.is_floating_point():
        raise ValueError(f"counts and indices are whole numbers, not {counts.dtype} and {indices.dtype}")
    if (counts < 0).any() or (counts > indices.shape[3]).any():
        raise ValueError(f"counts lie between 0 and {indices.shape[3]}; there are {counts.min()} to {counts.max()}")
    listed = torch.arange(indices.shape[3], device=indices.device) < counts[..., None]
    if ((indices < 0) | (indices >= columns))[listed].any():
        raise ValueError(f"a list names a block of keys outside 0 to {columns - 1}")
    if ((indices[..., 1:] <= indices[..., :-1]) & listed[..., 1:]).any():
        raise ValueError("a list does not rise from block to block")
    table = torch.zeros(*counts.shape, columns + 1, dtype=torch.bool, device=indices.device)
    table.scatter_(3, indices.long().where(listed, torch.tensor(columns, device=indices.device)), True)
    return _tables(table[..., :columns], block, (q_len, k_len))


def by_head(patterns: Sequence[Pattern]) -> Pattern:
    """Head h sees as the h-th says, the same in each batch element."""
    rules, planes, known = _stacked(patterns, "head", 1)
    return Pattern(rules, (tuple(number for plane in planes for number in plane),), *known)


def by_batch(patterns: Sequence[Pattern]) -> Pattern:
    """Batch element b sees as the b-th says; each may differ by head."""
    heads = max((len(checked(pattern).plane[0]) for pattern in patterns), default=1)
    rules, planes, known = _stacked(patterns, "batch element", heads)
    return Pattern(rules, tuple(plane * (heads // len(plane)) for plane in planes), *known)


def _stacked(patterns: Sequence[Pattern], what: str, heads: int) -> tuple:
    if not patterns or any(len(checked(each).plane) > 1 or len(each.plane[0]) not in (1, heads) for each in patterns):
        raise ValueError(f"one pattern for each {what} is needed, each of one {what} itself and of equal heads")
    found: dict[Rule, int] = {}
    planes = [tuple(found.setdefault(each.rules[i], len(found)) for i in each.plane[0]) for each in patterns]
    known = (reduce(_same, (getattr(each, name) for each in patterns)) for name in ("lengths", "positions"))
    return tuple(found), planes, known


def _tables(table: Tensor, cell: int, lengths: tuple[int, int]) -> Pattern:
    batch, heads = table.shape[:2]
    shift = max(lengths[1] - lengths[0], 0)
    each = tuple(((rules.Table(table[b, h], cell, shift),),) for b in range(batch) for h in range(heads))
    return Pattern(each, tuple(tuple(range(b * heads, (b + 1) * heads)) for b in range(batch)), lengths)


def _one(*atoms: rules.Atom) -> Pattern:
    return Pattern(((atoms,),))


def positive(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is a positive whole number, not {value!r}")
    return min(value, FAR)  # what is further is as far, and no number of 32 bits


def _wider(a: int, b: int) -> int:
    if a != b and 1 not in (a, b):
        raise ValueError(f"patterns of {a} and of {b} batch elements or heads do not go together")
    return max(a, b)


def _same(a, b):
    if a is not None and b is not None and a != b:
        raise ValueError(f"patterns made for {a} and for {b} positions do not go together")
    return b if a is None else a


PRESETS = {  # what models are known by, each with its source
    "mistral": causal() & window(4096),  # Mistral 7B, arXiv:2310.06825
    "gpt_oss": causal() & window(128),  # every other layer, arXiv:2508.10925
    "gemma3": causal() & window(1024),  # five of six layers, arXiv:2503.19786
    "longformer": global_local(1, 257),  # 256 to either side and one global token, arXiv:2004.05150
    "sparse_transformer": causal() & (block_diagonal(128) | columns(128, 8)),  # "fixed", stride 128, arXiv:1904.10509
    # At 4096 positions 3 of 64 blocks at random, 2 global ones and a window of 3: in blocks there, in positions here.
    "bigbird": global_local(128, 97) | random(3 / 64, block=64),  # arXiv:2007.14062
}


def preset(name: str) -> Pattern:
    """The pattern of that name in PRESETS. ValueError where there is none."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; {allowed(name, PRESETS)}")
    return PRESETS[name]
