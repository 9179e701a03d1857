"""The oracle: attention over listed blocks in plain torch, on any device and in any dtype, gradients by autograd."""

import math

import torch
from torch import Tensor

from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.kernels.attention.lists import BlockLists, unpack


def refuse(call: Call) -> str:
    return ""


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """What is not finite in a key or value reaches only the queries that see it,
    and makes their whole output NaN.
    """
    q, k, v, lists, scale = call.q, call.k, call.v, call.lists, call.scale
    batch, heads = q.shape[:2]
    # A row of work for each head: [B * H, S, D].
    q, k, v = (x.repeat_interleave(heads // x.shape[1], 1).flatten(0, 1) for x in (q, k, v))
    lost_q, lost_k = ~q.isfinite().all(-1), ~(k.isfinite() & v.isfinite()).all(-1)
    q, k, v = q.masked_fill(lost_q[..., None], 0), *(x.masked_fill(lost_k[..., None], 0) for x in (k, v))
    plane = lists.plane.expand(batch, heads).flatten()
    by_plane = [(plane == number).nonzero()[:, 0] for number in range(lists.planes)]
    back = torch.cat(by_plane).argsort()
    made = []
    for row, queries in enumerate(q.split(lists.block, 1)):
        parts = []
        for number, at in enumerate(by_plane):
            keys, bits = _seen(lists, number * lists.q_blocks + row)
            keys, bits = keys.clamp(max=lists.k_len - 1), bits[: queries.shape[1]]
            parts.append(_softmax(queries[at], k[at][:, keys], v[at][:, keys], bits, lost_k[at][:, keys], scale))
        made.append([torch.cat(each)[back] for each in zip(*parts, strict=True)])
    out, lse = (torch.cat(each, 1).unflatten(0, (batch, heads)) for each in zip(*made, strict=True))
    return out.masked_fill(lost_q.view(batch, heads, -1, 1), math.nan), lse


def _seen(lists: BlockLists, row: int) -> tuple[Tensor, Tensor]:
    """The keys of the blocks that a row visits [n], and who sees them, bool [block, n]."""
    rows, place = lists.rows, torch.arange(lists.block, device=lists.tiles.device)
    full = rows.full[rows.full_at[row] : rows.full_at[row + 1]]
    part = slice(rows.partial_at[row], rows.partial_at[row + 1])
    keys = (torch.cat((full, rows.partial[part]))[:, None] * lists.block + place).flatten()
    bits = unpack(lists.tiles[rows.tile[part].long()]).transpose(0, 1).flatten(1)
    return keys, torch.cat((bits.new_ones(lists.block, len(full) * lists.block), bits), 1)


def _softmax(q: Tensor, k: Tensor, v: Tensor, bits: Tensor, lost: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    # q [heads, m, D], k and v [heads, n, D], bits [m, n], lost [heads, n]
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~bits, -math.inf)
    empty = ~bits.any(1)
    lse = scores.masked_fill(empty[:, None], 0).logsumexp(-1)  # of an empty row something finite, for its gradient
    lse = lse.masked_fill(empty, -math.inf) if bits.shape[1] else scores.new_full(scores.shape[:2], -math.inf)
    weights = (scores - lse.masked_fill(empty, 0)[..., None]).exp()
    sees_lost = (bits & lost[:, None]).any(-1)
    return (weights @ v).masked_fill(sees_lost[..., None], math.nan), lse
