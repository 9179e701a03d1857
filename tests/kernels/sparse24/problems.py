"""A weight with its mask and an input, for the tests of this folder."""

import torch

from blockshock_lib.kernels.sparse24 import masks
from blockshock_lib.kernels.sparse24.mask import MASKS


def problem(b=16, n=128, k=192, dtype=torch.bfloat16, seed=0):
    """x [B, K], a weight [N, K] and a random mask of it."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    return torch.randn(b, k, generator=generator).to(dtype), weight, masks.make(MASKS["random"], (n, k), seed=seed)
