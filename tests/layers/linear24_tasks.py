"""A function that the ranks of a test run; a spawned process imports it by name."""

import torch
from torch import nn

from blockshock_lib.layers import Linear24


def apart(ctx):
    """Whether rank 1, calling alone, gets its own layer's product and state."""
    torch.manual_seed(ctx.rank)
    layer = Linear24.from_linear(nn.Linear(128, 64), mask="magnitude")
    if ctx.rank == 0:
        return True
    plain, x = layer.to_linear(), torch.randn(2, 128)
    return torch.allclose(layer(x), plain(x), rtol=1e-5, atol=1e-5)
