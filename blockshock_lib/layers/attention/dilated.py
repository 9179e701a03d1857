"""Dilated attention as LongNet has it (arXiv:2307.02486, equations 10 to 15): by gathering, not by masking.

Of each pair (w, r) the sequence is cut into segments of w, and in each segment head j attends among the positions
j mod r, j mod r + r, ... only. Every head runs every pair; what the pairs give is merged by their softmax denominators.
So a key that two pairs hold counts twice, by design: the result is one softmax weighted by how often a key is held.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from blockshock_lib.kernels.attention.merge import merge
from blockshock_lib.kernels.attention.pattern import Pattern, causal, full
from blockshock_lib.layers.attention.sparse import sparse_attention

CAUSAL, FULL = causal(), full()  # their lists are kept from call to call


def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    causal: bool = True,
    backend: str = "auto",
    scale: float | None = None,
    return_lse: bool = False,
    pattern: Pattern | None = None,
    first_head: int = 0,
    block: int = 128,
) -> Tensor | tuple[Tensor, Tensor]:
    """q [B, H, S, D]; k and v [B, H / G, S, D] -> out [B, H, S, D], and with `return_lse` the logsumexp over all pairs,
    fp32, [B, H, S]. A position that no pair holds for a head gets 0 and -inf; with a rate of 1 there is none.

    `pattern`, in the place of `causal`: which of a segment's gathered keys its gathered queries see, the same for all
    segments and heads. `first_head`: the number of q's first head among all, where a rank has some only.

    ValueError where there are not as many lengths as rates, one is not positive, q and k differ in length, or the
    pattern differs by head, by batch element or is of one length.
    """
    pairs = checked_pairs(segment_lengths, dilation_rates)
    if q.dim() != 4 or k.dim() != 4 or q.shape[2] != k.shape[2] or k.shape != v.shape or q.shape[1] % k.shape[1]:
        shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        raise ValueError(f"q [B, H, S, D], k and v [B, H / G, S, D] of one length are needed, not {shapes}")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    mask, outs, lses = pattern or (CAUSAL if causal else FULL), [], []
    if mask.lengths or mask.positions or mask.plane != FULL.plane:
        raise ValueError("the pattern of gathered segments must fit any length, and be the same for all heads")
    for length, rate in pairs:
        parts = []
        for heads, places in gathered(q.shape[1], q.shape[2], length, rate, q.device, first_head):
            rows = [_take(x, heads, places) for x in (q, k, v)]
            out, lse = sparse_attention(*rows, mask, backend, scale, return_lse=True, block=block)
            # [B * segments, h, rows, D] -> [B, h, segments, rows, D]
            spread = (x.unflatten(0, (q.shape[0], -1)).transpose(1, 2) for x in (out, lse[..., None]))
            parts.append((heads, places, *spread))
        outs.append(_put(q.new_zeros(q.shape), parts, 2))
        lses.append(_put(lse.new_full((*q.shape[:3], 1), -torch.inf), parts, 3)[..., 0])
    out, lse = merge(outs, lses)
    return (out, lse) if return_lse else out


def checked_pairs(segment_lengths: Sequence[int], dilation_rates: Sequence[int]) -> list[tuple[int, int]]:
    """(length, rate) of each pair. ValueError as of `dilated_attention`."""
    pairs = list(zip(segment_lengths, dilation_rates, strict=False))
    if len(segment_lengths) != len(dilation_rates) or not pairs or min(map(min, pairs)) < 1:
        told = f"{list(segment_lengths)} and {list(dilation_rates)}"
        raise ValueError(f"dilated attention needs as many positive segment lengths as dilation rates, not {told}")
    return pairs


@lru_cache(maxsize=16)  # made on the host, which a CUDA graph could not capture
@torch.inference_mode(False)  # training may save them later
def gathered(
    heads: int, size: int, length: int, rate: int, device: torch.device, first: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Parts of equal shape of one pair's work: (heads int64 [h], positions int64 [h, segments, rows])."""
    found = []
    offset = torch.arange(first, first + heads, device=device) % rate
    whole = size // length * length
    for begin, end in ((0, whole), (whole, size)):  # segments of `length`, then the shorter last one
        starts = torch.arange(begin, end, length, device=device)
        counts = (min(length, end - begin) - offset + rate - 1).div(rate, rounding_mode="floor").clamp(min=0)
        for count in sorted(set(counts.tolist()) - {0}) if end > begin else ():
            mine = (counts == count).nonzero()[:, 0]
            rows = offset[mine][:, None] + torch.arange(count, device=device) * rate
            found.append((mine, starts[None, :, None] + rows[:, None]))
    return found


def _take(x: Tensor, heads: Tensor, places: Tensor) -> Tensor:
    # [B, H, S, D] -> [B * segments, h, rows, D]
    return x[:, heads[:, None, None], places].transpose(1, 2).flatten(0, 1)


def _put(whole: Tensor, parts: list, which: int) -> Tensor:
    for part in parts:
        heads, places = part[:2]
        whole = whole.index_put(
            (torch.arange(len(whole), device=whole.device)[:, None, None, None], heads[:, None, None], places),
            part[which].to(whole.dtype),
        )
    return whole
