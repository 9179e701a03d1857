"""Products of tracks on one device: what n ranks multiply, without a loop over them.

Where all tracks read the same x [B, S, K], or their results are only summed, a product is the whole model's; where they
differ they are a first dimension, x [n, B, S, K], and the product is batched. A real rank is one track.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def column(x: Tensor, linear: nn.Linear) -> Tensor:
    """A column-parallel product: [B, S, K] -> [B, S, N], or [n, B, S, K] -> [n, B, S, N / n], each with its bias."""
    if x.dim() == 3:
        return linear(x)
    n = x.shape[0]
    weight, bias = linear.weight.unflatten(0, (n, -1)), linear.bias.view(n, 1, -1)
    return torch.baddbmm(bias, x.flatten(1, 2), weight.mT).unflatten(1, x.shape[1:3])


def row(x: Tensor, linear: nn.Linear, tracks: int, apart: bool, out: Tensor | None = None) -> Tensor:
    """A row-parallel product without its bias, of x [B, S, K] or [n, B, S, K / n]: each track's part of the sum, of
    [n, B, S, N], where they are wanted `apart`, else the sum, [B, S, N], in `out` [B S, N] where that is given.
    """
    if out is not None:
        return torch.mm(x.flatten(0, 1), linear.weight.T, out=out).unflatten(0, x.shape[:2])
    if tracks == 1 or not apart:
        return F.linear(x if x.dim() == 3 else x.movedim(0, 2).flatten(2), linear.weight)
    x = x.unflatten(2, (tracks, -1)).movedim(2, 0) if x.dim() == 3 else x
    weight = linear.weight.unflatten(1, (tracks, -1)).permute(1, 2, 0)
    return torch.bmm(x.flatten(1, 2), weight).unflatten(1, x.shape[1:3])
