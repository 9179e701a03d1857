"""Attention over parts of the keys, merged: exact, for each part's logsumexp tells its share of the whole softmax."""

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """outs [..., D] and lses [...], base e, one of each a part -> (out [..., D] in the parts' dtype, lse [...]).

    In fp32, or fp64 where the parts are. Where no part saw a key, 0 and -inf. Gradients reach outs and lses.
    """
    lse = torch.stack([each.to(torch.promote_types(each.dtype, torch.float32)) for each in lses])
    most = lse.detach().amax(0)
    most = torch.where(most == -torch.inf, 0, most)
    weight = (lse - most).exp()
    total = weight.sum(0)
    none = total == 0
    share = weight / total.masked_fill(none, 1)
    out = sum(each * part[..., None] for each, part in zip(outs, share, strict=True))
    return out.to(outs[0].dtype), (total.masked_fill(none, 1).log() + most).masked_fill(none, -torch.inf)
