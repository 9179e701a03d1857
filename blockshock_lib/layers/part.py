"""The part of a weight W [N, K] that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Part:
    """The part of W that one rank multiplies: mask term (None = all entries), output rows, input columns."""

    term: int | None
    rows: slice
    cols: slice


def column_shard(in_features: int, index: int, count: int) -> slice:
    """The `index`-th of `count` equal runs of input columns. ValueError when they do not divide."""
    if in_features % count:
        raise ValueError(f"{in_features} features do not split into {count} equal shards")
    step = in_features // count
    return slice(index * step, (index + 1) * step)


def part_of(weight: torch.Tensor, keep: torch.Tensor | None, part: Part) -> torch.Tensor:
    """A contiguous copy of one part of W [N, K], with +0.0 where the part's term does not hold the entry."""
    w = weight[part.rows, part.cols]
    if part.term is None:
        return w.clone(memory_format=torch.contiguous_format)
    return torch.where(term_mask(keep, part), w, torch.zeros((), dtype=w.dtype, device=w.device))


def term_mask(keep: torch.Tensor, part: Part) -> torch.Tensor:
    """[rows, cols] bool: where this part's term holds the entry."""
    k = keep[part.rows, part.cols]
    return k if part.term == 0 else ~k
