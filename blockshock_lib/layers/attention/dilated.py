"""Dilated attention as LongNet has it (arXiv:2307.02486, equations 10 to 15): by gathering, not by masking.

Of each pair (w, r) the sequence is cut into segments of w, and in each segment head j attends among the positions
j mod r, j mod r + r, ... only. Every head runs every pair; what the pairs give is merged by their softmax denominators.
So a key that two pairs hold counts twice, by design: the result is one softmax weighted by how often a key is held.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from blockshock_lib.kernels.attention import backends
from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.kernels.attention.merge import merge
from blockshock_lib.kernels.attention.pattern import Pattern, causal, full
from blockshock_lib.layers.attention.sparse import call_of

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

    The parts are merged, so the backend must have a backward that takes the logsumexp over all keys: `reference`,
    `triton`, `gluon`, and `sdpa`, which has no gradient of the logsumexp.

    ValueError where there are not as many lengths as rates, one is not positive, q and k differ in length, or the
    pattern differs by head, by batch element or is of one length. UnsupportedError where the backend cannot do it, with
    its reason.
    """
    pairs = checked_pairs(segment_lengths, dilation_rates)
    if q.dim() != 4 or k.dim() != 4 or q.shape[2] != k.shape[2] or k.shape != v.shape or q.shape[1] % k.shape[1]:
        shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        raise ValueError(f"q [B, H, S, D], k and v [B, H / G, S, D] of one length are needed, not {shapes}")
    mask = pattern or (CAUSAL if causal else FULL)
    if mask.lengths or mask.positions or mask.plane != FULL.plane:
        raise ValueError("the pattern of gathered segments must fit any length, and be the same for all heads")
    parts = [gathered(q.shape[1], q.shape[2], *pair, q.device, first_head) for pair in pairs]
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))

    def chosen(call: Call) -> ModuleType:
        with torch.set_grad_enabled(grad):  # inside of an autograd.Function it is off
            return backends.explicit(backend, replace(call, q=call.q.detach().requires_grad_(grad)))

    out, lse = _Pairs.apply(q, k, v, parts, partial(call_of, pattern=mask, scale=scale, lse=True, block=block), chosen)
    return (out, lse) if return_lse else out


class _Pairs(torch.autograd.Function):
    """Of all pairs only the merged out and lse are kept: by these each part gives its share of the gradients."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, pairs: list, make: Callable, chosen: Callable) -> tuple:
        made, ctx.make, ctx.parts = [], make, []
        for parts in pairs:
            lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
            made.append((torch.zeros_like(q), lse))
            for heads, places in parts:
                call = make(*(_take(x, q.shape[1], heads, places) for x in (q, k, v)))
                row = chosen(call)
                for whole, part in zip(made[-1], row.forward(call), strict=True):
                    whole[:, heads[:, None, None], places] = _spread(part, len(q))
                ctx.parts.append((heads, places, row))
        out, lse = merge(*zip(*made, strict=True))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        wide = torch.promote_types(q.dtype, torch.float32)  # rounded once, at the end
        totals = [torch.zeros_like(q, dtype=wide) for _ in range(3)]
        for heads, places, row in ctx.parts:
            take = partial(_take, count=q.shape[1], heads=heads, places=places)
            level = None if dlse is None else take(dlse)
            found = row.backward(ctx.make(take(q), take(k), take(v)), take(dout), take(out), take(lse), level)
            for total, part in zip(totals, found, strict=True):
                total[:, heads[:, None, None], places] += _spread(part, len(q))
        dq, dk, dv = (total.unflatten(1, (x.shape[1], -1)).sum(2) for total, x in zip(totals, (q, k, v), strict=True))
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None


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


def _take(x: Tensor, count: int, heads: Tensor, places: Tensor) -> Tensor:
    # [B, H | H / G, S, ...] -> [B * segments, h, rows, ...], of some of `count` heads, H
    return x[:, heads[:, None, None] // (count // x.shape[1]), places].transpose(1, 2).flatten(0, 1)


def _spread(x: Tensor, batch: int) -> Tensor:
    # [B * segments, h, rows, ...] -> [B, h, segments, rows, ...]
    return x.unflatten(0, (batch, -1)).transpose(1, 2)
