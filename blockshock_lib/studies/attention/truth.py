"""What attention must give: float64 from the rule of a pattern, and by how much rounding alone may miss it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from blockshock_lib.layers.attention import Pattern

ROWS = 2048  # of queries that are turned into scores at once


class Made(NamedTuple):
    out: Tensor  # [B, H, S, D]
    lse: Tensor  # [B, H, S], base e; 0 where a query sees nothing, which `empty` tells
    dq: Tensor
    dk: Tensor  # [B, H / G, S_k, D]
    dv: Tensor
    empty: Tensor  # bool [B, H, S]


def attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, pattern: Pattern, scale: float, dtype: torch.dtype
) -> Made:
    """Attention and its gradients for `dout`, from whole matrices of scores in `dtype`: float64 is the truth.

    In q's own dtype it is the baseline: plain PyTorch with each product rounded, and the mean of the scores' gradients
    from the rounded output, as flash kernels have it.
    """
    (batch, heads, size), group, device = q.shape[:3], q.shape[1] // k.shape[1], q.device
    sums = torch.promote_types(dtype, torch.float32)
    out, dq = (torch.zeros_like(q, dtype=dtype) for _ in range(2))
    dk, dv = (torch.zeros_like(k, dtype=sums) for _ in range(2))
    lse = torch.zeros(q.shape[:3], dtype=sums, device=device)
    empty = torch.ones(q.shape[:3], dtype=torch.bool, device=device)
    keys = torch.arange(k.shape[2], device=device)[None]
    for b in range(batch):
        for h in range(heads):
            mine = b, h // group
            keys_, values = k[mine].to(dtype), v[mine].to(dtype)
            for rows in torch.arange(size, device=device).split(ROWS):
                seen = pattern.sees(rows[:, None], keys, size, k.shape[2], b, h).expand(len(rows), k.shape[2])
                queries, upstream, at = q[b, h, rows].to(dtype), dout[b, h, rows].to(dtype), (b, h, rows)
                none = ~seen.any(1)
                scores = (queries @ keys_.T * scale).masked_fill(~seen, -math.inf).masked_fill(none[:, None], 0)
                weights = scores.softmax(1).masked_fill(none[:, None], 0)
                made = weights @ values
                delta = (upstream.to(sums) * made.to(sums)).sum(1, keepdim=True)
                dscores = (weights.to(sums) * ((upstream @ values.T).to(sums) - delta) * scale).to(dtype)
                out[at], dq[at] = made, dscores @ keys_
                dk[mine] += dscores.T @ queries
                dv[mine] += weights.T @ upstream
                lse[at], empty[at] = scores.to(sums).logsumexp(1).masked_fill(none, 0), none
    return Made(out, lse, dq, dk.to(dtype), dv.to(dtype), empty)
