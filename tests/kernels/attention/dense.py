"""Attention by a whole mask, in float64: what every kernel is compared with."""

import math

import torch

from blockshock_lib.kernels.attention.lists import unpack


def whole_mask(pattern, q_len, k_len, batch=1, heads=1):
    """Bool [batch, heads, q_len, k_len], from the rule alone."""
    q, k = torch.arange(q_len)[:, None], torch.arange(k_len)[None]
    each = [[pattern.sees(q, k, q_len, k_len, b, h).expand(q_len, k_len) for h in range(heads)] for b in range(batch)]
    return torch.stack([torch.stack(row) for row in each])


def attention(q, k, v, mask, scale):
    """(out, logsumexp) in float64; a query without keys gets 0 and -inf."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
    scores = (q.double() @ k.transpose(2, 3) * scale).masked_fill(~mask, -math.inf)
    empty = ~mask.any(-1)
    lse = scores.masked_fill(empty[..., None], 0).logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(~mask, 0)
    return weights @ v, lse.masked_fill(empty, -math.inf)


def merge(outs, lses):
    """(out, logsumexp) of parts of the keys, of each part's, at least in fp32."""
    levels = torch.stack([each.to(torch.promote_types(each.dtype, torch.float32)) for each in lses])
    lse = levels.logsumexp(0)
    shares = (levels - lse.masked_fill(lse == -math.inf, 0)).exp()
    return sum(out * share[..., None] for out, share in zip(outs, shares, strict=True)).to(outs[0].dtype), lse


def listed(lists, plane=0, turned=False):
    """Bool [q_len, k_len]: what the lists say, pair by pair; turned, those by columns."""
    whole = torch.zeros(lists.q_blocks, lists.k_blocks, lists.block, lists.block, dtype=torch.bool)
    rows, lines = (lists.columns, whole.transpose(0, 1)) if turned else (lists.rows, whole)
    for i, line in enumerate(lines):
        row = plane * len(lines) + i
        line[rows.full[rows.full_at[row] : rows.full_at[row + 1]].long()] = True
        part = slice(rows.partial_at[row], rows.partial_at[row + 1])
        line[rows.partial[part].long()] = unpack(lists.tiles[rows.tile[part].long()])
    return whole.transpose(1, 2).flatten(2).flatten(0, 1)[: lists.q_len, : lists.k_len]
