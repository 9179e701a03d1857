"""The oracle: attention over listed blocks in plain torch, on any device and in any dtype, gradients by autograd."""

import itertools
import math

import torch
from torch import Tensor

from blockshock_lib.kernels.attention.call import Call, uncast
from blockshock_lib.kernels.attention.lists import BlockLists, unpack
from blockshock_lib.kernels.attention.merge import wide


def refuse(call: Call) -> str:
    return ""


@uncast
def attend(call: Call) -> tuple[Tensor, Tensor]:
    """16 bits are computed in fp32.

    What is not finite in a key or value reaches only the queries that see it, and makes their whole output NaN; in a
    key or in the query itself, the logsumexp too.
    """
    lists, scale, (batch, heads) = call.lists, call.scale, call.q.shape[:2]
    # A row of work for each head: [B * H, S, D].
    q, k, v = (wide(x).repeat_interleave(heads // x.shape[1], 1).flatten(0, 1) for x in (call.q, call.k, call.v))
    lost_q, lost_k, lost_v = (~x.isfinite().all(-1) for x in (q, k, v))
    q, k, v = (x.masked_fill(lost[..., None], 0) for x, lost in ((q, lost_q), (k, lost_k), (v, lost_v)))
    plane = lists.plane.expand(batch, heads).flatten()
    by_plane = [(plane == number).nonzero()[:, 0] for number in range(lists.planes)]
    back = torch.cat(by_plane).argsort()
    made = []
    for row, queries in enumerate(q.split(lists.block, 1)):
        parts = []
        for number, at in enumerate(by_plane):
            keys, bits = _seen(lists, number * lists.q_blocks + row)
            keys, bits = keys.clamp(max=lists.k_len - 1), bits[: queries.shape[1]]
            lost = lost_k[at][:, keys], lost_v[at][:, keys]
            parts.append(_softmax(queries[at], k[at][:, keys], v[at][:, keys], bits, *lost, scale))
        made.append([torch.cat(each)[back] for each in zip(*parts, strict=True)])
    out, lse = (torch.cat(each, 1).unflatten(0, (batch, heads)) for each in zip(*made, strict=True))
    lost_q = lost_q.view(lse.shape) & (lse > -math.inf)  # what sees nothing is 0, whatever it asks
    return out.masked_fill(lost_q[..., None], math.nan).to(call.q.dtype), lse.masked_fill(lost_q, math.nan)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return attend(call)


@uncast
def backward(call: Call, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv by their formulas; `out` and `lse` may be those over more keys than these."""
    batch, heads, lists = *call.q.shape[:2], call.lists
    q, dout, out = (wide(x).flatten(0, 1) for x in (call.q, dout, out))
    k, v = (wide(x).repeat_interleave(heads // x.shape[1], 1).flatten(0, 1) for x in (call.k, call.v))
    lse = lse.flatten(0, 1).to(q.dtype)
    delta = (dout * out).sum(-1) - (0 if dlse is None else dlse.flatten(0, 1))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    # 0 times NaN is NaN: what is not finite counts as 0 in a sum, and as NaN in the weights of who sees it. A query
    # without a gradient, as a loss leaves the padding, gives none, whatever it saw.
    live = (dout != 0).any(-1) if dlse is None else (dout != 0).any(-1) | (dlse.flatten(0, 1) != 0)
    lost = ~dout.isfinite().all(-1)
    in_q, in_k, in_dout = (x.masked_fill(~x.isfinite().all(-1, keepdim=True), 0) for x in (q, k, dout))
    plane, rows = lists.plane.expand(batch, heads).flatten(), torch.arange(lists.q_len, device=q.device)
    for number, (row, places) in itertools.product(range(lists.planes), enumerate(rows.split(lists.block))):
        keys, bits = _seen(lists, number * lists.q_blocks + row)
        there, mine = keys < lists.k_len, (plane == number).nonzero()
        keys, bits = keys[there], bits[: len(places), there]
        at, seen = (mine, places), (mine, keys)  # of [B * H, S, D]
        bits = bits & live[at][..., None]
        scores = q[at] @ k[seen].mT * call.scale
        weights = (scores - lse[at][..., None]).exp().masked_fill(~bits, 0)
        dscores = (weights * (dout[at] @ v[seen].mT - delta[at][..., None]) * call.scale).masked_fill(~bits, 0)
        dq[at] = dscores @ in_k[seen]
        dk[seen] += dscores.mT @ in_q[at]
        dv[seen] += weights.masked_fill(bits & lost[at][..., None], math.nan).mT @ in_dout[at]
    dk, dv = (x.unflatten(0, (batch, call.k.shape[1], -1)).sum(2) for x in (dk, dv))
    return tuple(x.to(call.q.dtype) for x in (dq.unflatten(0, (batch, heads)), dk, dv))


def _seen(lists: BlockLists, row: int) -> tuple[Tensor, Tensor]:
    """The keys of the blocks that a row visits [n], and who sees them, bool [block, n]."""
    rows, place = lists.rows, torch.arange(lists.block, device=lists.tiles.device)
    full = rows.full[rows.full_at[row] : rows.full_at[row + 1]]
    part = slice(rows.partial_at[row], rows.partial_at[row + 1])
    keys = (torch.cat((full, rows.partial[part]))[:, None] * lists.block + place).flatten()
    bits = unpack(lists.tiles[rows.tile[part].long()]).transpose(0, 1).flatten(1)
    return keys, torch.cat((bits.new_ones(lists.block, len(full) * lists.block), bits), 1)


def _softmax(
    q: Tensor, k: Tensor, v: Tensor, bits: Tensor, lost_k: Tensor, lost_v: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    # q [heads, m, D], k and v [heads, n, D], bits [m, n], lost_k and lost_v [heads, n]
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~bits, -math.inf)
    empty = ~bits.any(1)
    lse = scores.masked_fill(empty[:, None], 0).logsumexp(-1)  # of an empty row something finite, for its gradient
    lse = lse.masked_fill(empty, -math.inf) if bits.shape[1] else scores.new_full(scores.shape[:2], -math.inf)
    weights = (scores - lse.masked_fill(empty, 0)[..., None]).exp()
    no_lse, no_out = ((bits & lost[:, None]).any(-1) for lost in (lost_k, lost_k | lost_v))
    return (weights @ v).masked_fill(no_out[..., None], math.nan), lse.masked_fill(no_lse, math.nan)
