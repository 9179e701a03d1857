"""One call for block-sparse attention by segments, rates and a ratio, on one rank or with the sequence over several."""

import warnings
from collections.abc import Sequence
from functools import reduce
from operator import or_

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from blockshock_lib.comm import Group
from blockshock_lib.errors import allowed
from blockshock_lib.kernels.attention.pattern import Pattern, block_diagonal, causal, columns, full, positive, random
from blockshock_lib.layers.attention.dilated import checked_pairs, dilated_attention
from blockshock_lib.layers.attention.parallel import ContextParallelAttention
from blockshock_lib.layers.attention.sparse import sparse_attention
from blockshock_lib.layers.attention.top_k import TopK, top_k
from blockshock_lib.layers.guards import refuse_unequal

VARIANTS = ("base", "dilated", "ring", "ring_dilated")


def create_block_sparse_attention(
    variant: str,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    sparsity_ratio: float,
    block_size: int = 128,
    causal: bool = True,
    length: int | None = None,
    group: Group | None = None,
    backend: str = "auto",
    gradient_compression: float | None = None,
    seed: int = 0,
    width: int | None = None,
    heads: int | None = None,
    device: object = None,
) -> "BlockSparseAttention":
    """A module for q [B, H, S, D], k and v [B, H / G, S, D] -> [B, H, S, D]; with `width` and `heads`, x [B, S, width]
    -> [B, S, width] by projections of its own.

    Of each pair of segment length w and rate r, `sparsity_ratio` is the share of blocks that is computed, drawn by
    `seed`: .05 is 95 % sparse, 1 takes all. Each block of the diagonal is computed beside that.

    | variant | what a query sees |
    |---|---|
    | base | in its segment of w, for each pair, every r-th block of keys, thinned to the ratio: one softmax over all |
    | dilated | `dilated_attention` (LongNet): of w gathered at rate r, the blocks of a gathered segment thinned |
    | ring | base over the ranks of `group`, whose keys go round; zigzag shares |
    | ring_dilated | dilated over ranks that exchange heads: in a ring each step would hold a few rows of a segment |

    The last two need `length` of the whole sequence and `group`; each rank calls the module with its share (`shard` and
    `gather` of its `ranks` make and undo that). Making one is a collective. `device`: where a ring's lists and the
    projections lie, the CPU by default; without either there is nothing to lie anywhere.
    `gradient_compression`: the share of each gradient bucket that `distributed` sends; it needs `width` and `heads`.

    ValueError where an argument is out of range, or has no meaning for this variant, and a warning where the ratio has
    none, as the segments hold too few blocks; UnsupportedError where ranks were given other arguments. Errors of a call
    are those of `sparse_attention`, `dilated_attention` and `ContextParallelAttention`.
    """
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}; {allowed(variant, VARIANTS)}")
    if (length is None or group is None) if variant.startswith("ring") else (length, group) != (None, None):
        raise ValueError("variants ring and ring_dilated, and these alone, take the whole length and a group of ranks")
    if group is not None:  # first of all: where one rank alone refuses what it was given, the others would wait for it
        given = {"variant": variant, "segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
        given |= {"sparsity_ratio": sparsity_ratio, "block_size": block_size, "causal": causal, "seed": seed}
        refuse_unequal(group, "create_block_sparse_attention", **given, width=width, heads=heads)
    for name, size in (("width", width), ("heads", heads), ("length", length)):
        if size is not None:
            positive(name, size)
    if (width is None) != (heads is None) or (width and width % heads):
        raise ValueError(f"width and heads are given together, and width is a multiple of heads: not {width}, {heads}")
    if gradient_compression is not None and width is None:
        raise ValueError("gradient_compression needs width and heads: without projections there is no gradient to send")
    if gradient_compression is not None and not 0 < gradient_compression <= 1:
        raise ValueError(f"gradient_compression lies in (0, 1], not at {gradient_compression}")
    if device is not None and width is None and group is None:
        raise ValueError(f"device {device!r}: without width and heads nothing of variant {variant!r} lies on a device")
    pairs, dilated = checked_pairs(segment_lengths, dilation_rates), variant.endswith("dilated")
    base = _thinned(pairs, sparsity_ratio, block_size, causal, seed)
    pattern = _thinned(None, sparsity_ratio, block_size, causal, seed) if dilated else base
    _warn_unfelt(pairs, sparsity_ratio, block_size, causal, dilated, seed)
    options = {"backend": backend, "block": block_size}
    ranks = None
    if group is not None:
        strategy = "heads" if dilated else "ring"
        ranks = ContextParallelAttention(base, length, group, strategy, **options, device=device or "cpu")
    arguments = pattern, pairs if dilated else None, ranks, options, gradient_compression, width, heads
    return BlockSparseAttention(*arguments, device=device)


def _thinned(pairs: list | None, ratio: float, block: int, is_causal: bool, seed: int) -> Pattern:
    """Of a whole sequence; without pairs of one gathered segment."""
    if pairs is None and ratio == 1:  # as dense kernels know it
        return causal() if is_causal else full()
    kept, diagonal = random(ratio, seed, block), block_diagonal(block)
    if pairs is None:
        found = kept | diagonal
    else:
        found = reduce(or_, (block_diagonal(w) & (kept & columns(rate * block, block) | diagonal) for w, rate in pairs))
    return causal() & found if is_causal else found


def _warn_unfelt(pairs: list, ratio: float, block: int, is_causal: bool, dilated: bool, seed: int) -> None:
    """Where each segment, gathered if `dilated`, has few blocks, they may all be drawn, or none beside the diagonal."""
    length = max(-(-w // rate) if dilated else w for w, rate in pairs)
    if 0 < ratio < 1 and length <= 8 * block:
        kinds = (_thinned(None if dilated else pairs, each, block, is_causal, seed) for each in (ratio, 0, 1))
        some, none, every = (kind.lists(length, block=block).pairs.item() for kind in kinds)
        if some in (none, every):
            told = f"takes {'none' if some == none else 'all'} of the blocks beside the diagonal"
            warnings.warn(f"sparsity_ratio {ratio} {told}: take smaller blocks or longer segments", stacklevel=3)


class BlockSparseAttention(nn.Module):
    """What `create_block_sparse_attention` makes."""

    def __init__(
        self,
        pattern: Pattern,
        pairs: list[tuple[int, int]] | None,
        ranks: ContextParallelAttention | None,
        options: dict,
        compression: float | None = None,
        width: int | None = None,
        heads: int | None = None,
        device: object = None,
    ):
        super().__init__()
        self.pattern, self.pairs, self.ranks = pattern, pairs, ranks
        self.options, self.compression, self.heads = options, compression, heads
        sizes = ((width, 3 * width), (width, width)) if width else ()
        self.qkv, self.out = [nn.Linear(*size, device=device) for size in sizes] or (None, None)

    def forward(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        """(q, k, v), or (x) of a module with projections. ValueError for the other."""
        if (k is None, v is None) != (self.qkv is not None,) * 2:
            raise ValueError("a module with width and heads is called with x alone, one without with q, k and v")
        if self.qkv is None:
            return self.attend(q, k, v)
        heads = self.qkv(q).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(*heads).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.ranks is not None:
            return self.ranks.exchanged(q, k, v, self._dilated) if self.pairs else self.ranks(q, k, v)
        return self._dilated(q, k, v) if self.pairs else sparse_attention(q, k, v, self.pattern, **self.options)

    def _dilated(self, q: Tensor, k: Tensor, v: Tensor, heads: slice = slice(0, None)) -> Tensor:
        lengths, rates = zip(*self.pairs, strict=True)
        return dilated_attention(
            *(q, k, v, lengths, rates), pattern=self.pattern, first_head=heads.start, **self.options
        )

    def distributed(self, process_group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
        """This module under DDP over `process_group`, with the largest `gradient_compression` of each bucket sent where
        that was given. Gradients are means over the ranks: so of a ring the loss is the mean over a rank's own share.
        """
        ddp = DistributedDataParallel(self, process_group=process_group)
        if self.compression is not None:
            ddp.register_comm_hook(TopK(self.compression, process_group=process_group), top_k)
        return ddp
