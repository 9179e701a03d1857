"""Attention over parts of the keys, merged: exact, for each part's logsumexp tells its share of the whole softmax."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from blockshock_lib.kernels.attention.triton import installed


def wide(x: Tensor) -> Tensor:
    """In fp32 or wider, to be added to and rounded once, at the end."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def absorb(out: Tensor, lse: Tensor, found: Tensor, level: Tensor) -> Tensor:
    """Merges one more part, `found` [..., D] and its `level` [...], into `out`, which is fp32 or wider, in place and
    without a gradient; returns the logsumexp of both. Where no part saw a key they stay 0 and -inf.
    """
    return (_compiled() if out.is_cuda else _absorb)(out, lse, found, level)


def _absorb(out: Tensor, lse: Tensor, found: Tensor, level: Tensor) -> Tensor:
    both = torch.logaddexp(lse, level)
    most = both.clamp(min=torch.finfo(both.dtype).min)  # -inf less -inf is no number
    out.mul_((lse - most).exp()[..., None]).addcmul_(found.to(out.dtype), (level - most).exp()[..., None])
    return both


def add(whole: Tensor, part: Tensor, weights: Tensor | None = None) -> None:
    """Adds `part` [B, segments, groups, heads, rows, D], each row times its weight [..., rows], to a view of a sum that
    is fp32 or wider.
    """
    if whole.is_cuda and whole.dtype == torch.float32 and whole.stride(-1) == 1 and installed():
        from blockshock_lib.kernels.attention import triton_merge  # Triton is not everywhere

        triton_merge.add(whole, part.contiguous(), weights)
    elif weights is None:
        whole.add_(part)
    else:
        whole.addcmul_(part, weights[..., None])


@cache
def _compiled() -> Callable[..., Tensor]:
    # One pass over memory, where its operators make five. Tuned, its first call would fill a cache's size of memory.
    return torch.compile(_absorb, dynamic=True, options={"triton.autotune_pointwise": False})
