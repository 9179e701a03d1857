"""Dilated attention as LongNet has it (arXiv:2307.02486, equations 10 to 15): by gathering, not by masking.

Of each pair (w, r) the sequence is cut into segments of w, and in each segment head j attends among the positions
j mod r, j mod r + r, ... only. Every head runs every pair; what the pairs give is merged by their softmax denominators.
So a key that two pairs hold counts twice, by design: the result is one softmax weighted by how often a key is held.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from blockshock_lib.kernels.attention import backends, merge
from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.kernels.attention.pattern import Pattern, causal, checked, full
from blockshock_lib.kernels.once import once
from blockshock_lib.layers.attention.sparse import call_of, refuse_unfit

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
    mask = (CAUSAL if causal else FULL) if pattern is None else checked(pattern)
    if mask.lengths or mask.positions or mask.plane != FULL.plane:
        raise ValueError("the pattern of gathered segments must fit any length, and be the same for all heads")
    refuse_unfit(q, k, v, mask, scale)
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q, k and v must be of one length, not {list(q.shape)} and {list(k.shape)}")
    parts = [part for pair in pairs for part in _parts(q.shape[1], q.shape[2], *pair, first_head)]
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))

    def chosen(call: Call) -> ModuleType:
        with torch.set_grad_enabled(grad):  # inside of an autograd.Function it is off
            asked = replace(call, q=call.q.detach().requires_grad_(grad), lse_grad=return_lse)
            return backends.explicit(backend, asked)

    out, lse = _Pairs.apply(q, k, v, parts, partial(call_of, pattern=mask, scale=scale, lse=True, block=block), chosen)
    return (out, lse) if return_lse else out


class _Part(NamedTuple):
    """Heads of one pair, a position apart: by a stride of a head and a position they are one view, without an index."""

    head: int
    place: int  # where this head begins
    sizes: tuple[int, int, int, int]  # segments, groups of heads, `rate` apart, heads of a group, rows
    length: int
    rate: int

    def of(self, x: Tensor) -> Tensor:
        """[B, H, S, ...] -> its view [B, *sizes, ...]."""
        batch, head, place, *rest = x.stride()
        steps = (batch, self.length * place, self.rate * head, head + place, self.rate * place, *rest)
        return x[:, self.head :, self.place :].as_strided((len(x), *self.sizes, *x.shape[3:]), steps)

    def taken(self, x: Tensor) -> Tensor:
        """[B, H, S, ...] -> [B * segments, groups * heads, rows, ...]: a view where strides allow it, else a copy."""
        # 16 bytes are copied in the time of one element: so where rows are of whole ones, they are the elements.
        steps = (*x.stride()[:3], x.storage_offset(), x.shape[-1])
        whole = x.dim() == 4 and x.stride(3) == 1 and not any(step * x.itemsize % 16 for step in steps)
        return self.of(x.view(torch.complex128) if whole else x).flatten(2, 3).flatten(0, 1).view(x.dtype)


class _Pairs(torch.autograd.Function):
    """Of all pairs only the merged out and lse are kept: by these each part gives its share of the gradients."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, parts: list, make: Callable, chosen: Callable) -> tuple:
        made, ctx.make, ctx.parts = [], make, []
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        operands = [x[:, :, None].expand(-1, -1, q.shape[1] // x.shape[1], -1, -1).flatten(1, 2) for x in (q, k, v)]
        for part in parts:
            call, here = make(*map(part.taken, operands)), part.of(lse)
            row = chosen(call)
            found, level = row.forward(call)
            torch.logaddexp(here, level.view_as(here), out=here)
            ctx.parts.append((part, row))
            made.append((found, level))
        out, finite = torch.zeros_like(q, dtype=lse.dtype), lse.clamp(min=torch.finfo(lse.dtype).min)
        for part, (found, level) in zip(parts, made, strict=True):
            here, most = part.of(out), part.of(finite)
            merge.add(here, found.view_as(here), (level.view_as(most) - most).exp())
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple:
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        totals = [torch.zeros_like(q, dtype=lse.dtype) for _ in range(3)]  # rounded once, at the end
        operands = [x[:, :, None].expand(-1, -1, q.shape[1] // x.shape[1], -1, -1).flatten(1, 2) for x in (q, k, v)]
        for part, row in ctx.parts:
            level = None if dlse is None else part.taken(dlse)
            found = row.backward(ctx.make(*map(part.taken, operands)), *map(part.taken, (dout, out, lse)), level)
            for total, each in zip(totals, found, strict=True):
                merge.add(here := part.of(total), each.view_as(here))
        if k.shape != q.shape:
            totals[1:] = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in totals[1:])
        return *(x.to(q.dtype) for x in totals), None, None, None


def checked_pairs(segment_lengths: Sequence[int], dilation_rates: Sequence[int]) -> list[tuple[int, int]]:
    """(length, rate) of each pair. ValueError as of `dilated_attention`."""
    given = segment_lengths, dilation_rates
    each = [list(one) if isinstance(one, Iterable) else [] for one in given]
    if len(each[0]) != len(each[1]) or not each[0] or not all(isinstance(x, int) and x > 0 for x in chain(*each)):
        told = "{!r} and {!r}".format(*given)
        raise ValueError(f"as many positive segment lengths as dilation rates, whole numbers, are needed, not {told}")
    return list(zip(*each, strict=True))


def _parts(heads: int, size: int, length: int, rate: int, first: int) -> Iterator[_Part]:
    """One pair's work: segments of `length`, then the shorter last one."""
    whole, offsets = size // length, [(first + head) % rate for head in range(min(rate, heads))]
    for begin, segments, end in ((0, whole, length), (whole * length, 1, size % length)):
        alike = [(at - i, len(range(at, end, rate)), len(range(i, heads, rate))) for i, at in enumerate(offsets)]
        for (ahead, rows, groups), run in groupby(range(len(alike)), alike.__getitem__):
            head, *others = run
            if segments and rows:
                yield _Part(head, begin + ahead + head, (segments, groups, 1 + len(others), rows), length, rate)
