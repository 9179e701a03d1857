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


def attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, pattern: Pattern, scale: float, wide: torch.dtype) -> Made:
    """Attention and its gradients for `dout`, whole, computed in `wide`: the truth in float64.

    In float32 it is the baseline, what rounding alone allows: as a flash kernel it rounds the weights and the gradients
    of the scores to q's dtype before they are multiplied, and its results.
    """

    def low(x: Tensor) -> Tensor:
        return x if wide == torch.float64 else x.to(q.dtype).to(wide)

    (batch, heads, size), group = q.shape[:3], q.shape[1] // k.shape[1]
    out, dq = torch.zeros_like(q, dtype=wide), torch.zeros_like(q, dtype=wide)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    lse, empty = (
        torch.zeros(q.shape[:3], dtype=wide, device=q.device),
        torch.ones(q.shape[:3], dtype=bool, device=q.device),
    )
    keys = torch.arange(k.shape[2], device=q.device)[None]
    for b in range(batch):
        for h in range(heads):
            mine = b, h // group
            k_, v_ = k[mine].to(wide), v[mine].to(wide)
            for rows in torch.arange(size, device=q.device).split(ROWS):
                seen = pattern.sees(rows[:, None], keys, size, k.shape[2], b, h).expand(len(rows), k.shape[2])
                q_, dout_ = q[b, h, rows].to(wide), dout[b, h, rows].to(wide)
                none = ~seen.any(1)
                scores = (q_ @ k_.T * scale).masked_fill(~seen, -math.inf)
                level = scores.masked_fill(none[:, None], 0).logsumexp(1)
                weights = (scores - level[:, None]).exp()
                made = low(low(weights) @ v_)
                dweights = dout_ @ v_.T
                dscores = weights * (dweights - (dout_ * made).sum(1, keepdim=True)) * scale
                out[b, h, rows], dq[b, h, rows] = made, low(dscores) @ k_
                dk[mine] += low(dscores).T @ q_
                dv[mine] += low(weights).T @ dout_
                lse[b, h, rows], empty[b, h, rows] = level.masked_fill(none, 0), none
    return Made(out, lse, dq, dk, dv, empty)
