"""What attention must give: float64 from the rule of a pattern, and by how much rounding alone may miss it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from blockshock_lib.layers.attention import Pattern

ENTRIES = 2**26  # of a matrix of scores that is made at once
WHOLE = 4096  # queries up to which all is compared; beyond, what is sampled
SAMPLED, HEADS = 256, 1  # queries of each head, and as many keys of so many heads of keys


class Places(NamedTuple):
    """What is compared: queries `rows` of every head, keys `keys` of the heads of keys `heads`; int64 [n]."""

    rows: Tensor
    keys: Tensor
    heads: Tensor
    sampled: bool = False


class Made(NamedTuple):
    out: Tensor  # [B, H, rows, D]
    lse: Tensor  # [B, H, rows], base e; -inf where a query sees nothing
    dq: Tensor
    dk: Tensor  # [B, heads, keys, D]
    dv: Tensor


def places(q_len: int, k_len: int, kv_heads: int, draw: torch.Generator, device: torch.device) -> Places:
    """Everything of a short sequence. Of a long one a place in each of SAMPLED equal stretches, drawn anew for each
    fresh group of processes, and HEADS heads of keys: a key's gradient takes the scores of all queries that see it.
    """
    if q_len <= WHOLE:
        return Places(*(torch.arange(count, device=device) for count in (q_len, k_len, kv_heads)))

    def stretches(count: int) -> Tensor:
        start = torch.arange(SAMPLED) * count // SAMPLED
        drawn = start + (torch.rand(SAMPLED, generator=draw) * (count // SAMPLED)).long()
        return torch.cat((drawn, torch.tensor([0, count - 1]))).unique().to(device)

    heads = torch.randperm(kv_heads, generator=draw)[:HEADS].sort().values
    return Places(stretches(q_len), stretches(k_len), heads.to(device), True)


def attention(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, pattern: Pattern, scale: float, dtype: torch.dtype, at: Places
) -> Made:
    """Attention and its gradients for `dout` at the places `at`, from whole rows of scores in `dtype`: float64 is the
    truth. Without `dout` the gradients are 0.

    A `pattern` may count how often a query sees a key: so often the key stands in the softmax.

    In q's own dtype it is the baseline: plain PyTorch with each product rounded, but the gradients of the weights, and
    their mean from the rounded output, as flash kernels have them: where a query sees one key both are equal, and of a
    rounded difference of 0 the first query of a long causal sequence would be all error.
    """
    (batch, heads, size, width), group, device = q.shape, q.shape[1] // k.shape[1], q.device
    sums = torch.promote_types(dtype, torch.float32)
    out, dq = (torch.zeros(batch, heads, len(at.rows), width, dtype=dtype, device=device) for _ in range(2))
    dk, dv = (torch.zeros(batch, len(at.heads), len(at.keys), width, dtype=sums, device=device) for _ in range(2))
    lse = torch.full(out.shape[:3], -math.inf, dtype=sums, device=device)
    keys, whole = torch.arange(k.shape[2], device=device)[None], torch.arange(size, device=device)
    place = {int(head): number for number, head in enumerate(at.heads)}
    for b in range(batch):
        for h in range(heads):
            of = place.get(h // group)
            keys_, values = k[b, h // group].to(dtype), v[b, h // group].to(dtype)
            for rows in (at.rows if of is None else whole).split(max(1, ENTRIES // k.shape[2])):
                times = pattern.sees(rows[:, None], keys, size, k.shape[2], b, h).expand(len(rows), k.shape[2])
                seen = times.bool()
                queries = q[b, h, rows].to(dtype)
                none = ~seen.any(1)
                scores = queries @ keys_.T * scale
                scores = scores if times.dtype == torch.bool else scores + times.to(sums).log().to(dtype)
                scores = scores.masked_fill(~seen, -math.inf).masked_fill(none[:, None], 0)
                weights = scores.softmax(1).masked_fill(none[:, None], 0)
                made = weights @ values
                # Of these rows those that are compared: here, and among all that are.
                mine = torch.isin(rows, at.rows)
                to = b, h, torch.searchsorted(at.rows, rows[mine])
                lse[to] = scores[mine].to(sums).logsumexp(1).masked_fill(none[mine], -math.inf)
                out[to] = made[mine]
                if dout is None:
                    continue
                upstream = dout[b, h, rows].to(dtype)
                delta = (upstream.to(sums) * made.to(sums)).sum(1, keepdim=True)
                dweights = upstream.to(sums) @ values.to(sums).T
                dscores = (weights.to(sums) * (dweights - delta) * scale).to(dtype)
                if of is not None:
                    dk[b, of] += dscores[:, at.keys].T @ queries
                    dv[b, of] += weights[:, at.keys].T @ upstream
                dq[to] = dscores[mine] @ keys_
    return Made(out, lse, dq, dk.to(dtype), dv.to(dtype))
