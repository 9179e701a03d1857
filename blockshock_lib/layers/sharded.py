"""What every method shares: one rank's part of y = x W^T + b, and how the parts make y."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from blockshock_lib import sparse24
from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.params import Mask


@dataclass(frozen=True)
class Part:
    """The part of W that one rank multiplies: mask term (None = all entries), output rows, input columns."""

    term: int | None
    rows: slice
    cols: slice


class Cost(NamedTuple):
    """What one rank must at least do for one forward. FLOPs count a multiply and an add of each stored weight as 2.

    `sent` is bus bytes: an all-reduce of n bytes over w ranks moves 2 n (w-1)/w, an all-gather to n bytes n (w-1)/w
    (the convention of NCCL's tests). `peak` is weights plus the largest sum of live outputs and temporaries; the input
    is left out, for it is the same for all methods.
    """

    flops: float
    read: float
    written: float
    sent: float
    weights: float
    peak: float


class Shape(NamedTuple):
    """The sizes a cost depends on: B, in_features, out_features, bytes an element, world size, and the mask."""

    batch: int
    in_features: int
    out_features: int
    itemsize: int
    world_size: int
    mask: Mask


def column_shard(in_features: int, index: int, count: int) -> slice:
    """The `index`-th of `count` equal runs of input columns. ValueError when they do not divide."""
    if in_features % count:
        raise ValueError(f"{in_features} features do not split into {count} equal shards")
    step = in_features // count
    return slice(index * step, (index + 1) * step)


class ShardedLinear(nn.Module):
    """One rank's share of y = x W^T + b, forward only; W is [out_features, in_features], frozen.

    A subclass says which part each rank holds (`part`), how it is stored (`hold`), multiplied (`local`) and joined with
    the other ranks' (`reduce` by a collective, `combine` the same in one process), and what it costs (`cost`).

    Args:
        weight: [N, K], the full dense weight; only this rank's part is kept.
        bias: [N] or None; added once, after the ranks' sum.
        mask: the mask family, for methods that split W into two terms.
        keep: [N, K] bool, True where term 0 holds the entry; made from `mask` when left out.
        group: the ranks that share the layer.
    """

    uses_mask = False  # splits W into two terms
    gathers = False  # multiplies only the columns that a periodic mask keeps, as a dense product

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        mask: Mask | None = None,
        keep: torch.Tensor | None = None,
        group: Group | None = None,
    ):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.group = group or Group.of()
        self.mask = mask
        self.register_buffer("bias", bias)
        if self.uses_mask:
            if mask is None:
                raise ValueError(f"{type(self).__name__} splits W by a mask: give mask=")
            if keep is None:
                keep = sparse24.masks.make(mask, tuple(weight.shape), weight=weight, device=weight.device)
        if self.active:
            self.hold(weight, keep, self.part(self.group.rank, self.group.world_size, *weight.shape))

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, mask: Mask | str | None = None, process_group=None, **options):
        """This rank's share of a trained `nn.Linear` that every rank holds whole.

        Args:
            linear: out_features and in_features multiples of 64; bf16 or fp16 for the 2:4 kernels.
            mask: a Mask or the name of a shipped one ("checkerboard", "uniform_1100", "random", "magnitude", ...).
            process_group: the ranks that share the layer; default the world.

        Returns: a module [..., in_features] -> [..., out_features], the full y on every rank.
        Raises: UnsupportedError where the machine, dtype or shape cannot run it.
        """
        if isinstance(mask, str):
            mask = Mask.named(mask)
        bias = None if linear.bias is None else linear.bias.detach()
        return cls(linear.weight.detach(), bias, mask=mask, group=Group.of(process_group), **options)

    @classmethod
    def ranks(cls, world_size: int) -> int:
        """How many of the world's ranks work in this method."""
        return world_size

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        raise NotImplementedError(f"{cls.__name__} must say which part of W a rank holds")

    @classmethod
    def cost(cls, shape: Shape) -> Cost:
        raise NotImplementedError(f"{cls.__name__} must say what it costs")

    @classmethod
    def unsupported(cls, mask: Mask, device: torch.device, dtype: torch.dtype) -> str:
        """Why this machine, mask or dtype cannot run the method; "" when it can."""
        return ""

    @property
    def active(self) -> bool:
        """Whether this rank works in the method at all."""
        return self.group.rank < self.ranks(self.group.world_size)

    def hold(self, weight: torch.Tensor, keep: torch.Tensor | None, part: Part) -> None:
        """Stores this rank's part of `weight` [N, K]; `keep` [N, K] is True where term 0 holds the entry."""
        self.register_buffer("weight", part_of(weight, keep, part))

    def weight_bytes(self) -> int:
        """Bytes of the stored weight, read off its storage."""
        return self.weight.untyped_storage().nbytes() if self.active else 0

    def local(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, K] -> this rank's partial result, before any communication."""
        raise NotImplementedError(f"{type(self).__name__} must multiply its part")

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """This rank's partial result -> y [B, N] on every rank. May overwrite `partial`."""
        return self._add_bias(self.group.all_reduce(partial))

    def combine(self, partials: list[torch.Tensor]) -> torch.Tensor:
        """What `reduce` computes, from all ranks' partial results in one process: the collective's oracle. May
        overwrite them.
        """
        y = partials[0]
        for partial in partials[1:]:
            y.add_(partial)
        return self._add_bias(y)

    def tune(self, x: torch.Tensor) -> None:
        """Chance to search for the fastest kernel for x [B, K] before anything is timed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.shape[-1] == self.in_features:
            raise ValueError(f"x has {x.shape[-1]} features, the layer {self.in_features}")
        y = self.reduce(self.local(x.reshape(-1, self.in_features)))
        return y.reshape(*x.shape[:-1], self.out_features)

    def _add_bias(self, y: torch.Tensor) -> torch.Tensor:
        return y if self.bias is None else y.add_(self.bias)

    def extra_repr(self) -> str:
        mask = f", mask={self.mask.name}" if self.mask else ""
        return f"{self.in_features}, {self.out_features}, rank {self.group.rank} of {self.group.world_size}{mask}"


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


class TermParallelLinear(ShardedLinear):
    """Superposition: W = W(0) + W(1) by a mask. Rank r holds term r % 2 of input shard r // 2; one all-reduce adds
    them.

    Two ranks hold one term each of the whole input; four and eight split each term by input columns as well.
    """

    uses_mask = True

    @classmethod
    def part(cls, rank: int, world_size: int, out_features: int, in_features: int) -> Part:
        if world_size % 2:
            raise UnsupportedError(f"two terms need an even number of ranks, not {world_size}")
        return Part(rank % 2, slice(0, out_features), column_shard(in_features, rank // 2, world_size // 2))


def summed(shape: Shape, flops: float, weights: float, columns: float, extra: float = 0) -> Cost:
    """Cost of a method whose ranks each make a [B, N] partial of `columns` input columns, and all-reduce it.

    `extra` is bytes of temporaries that live beside the partial.
    """
    out = shape.batch * shape.out_features * shape.itemsize
    read = weights + shape.batch * columns * shape.itemsize
    return Cost(flops, read, out, 2 * out * (shape.world_size - 1) / shape.world_size, weights, weights + out + extra)
