"""The optimizers of the training step: torch's own, the same for every method."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

# A gradient near zero differs by rounding between two right methods, in its sign too. Below this size AdamW's step
# shrinks with the gradient; with torch's 1e-8 such an entry would take a whole step in either direction.
EPS = 1e-6


def make(name: str, parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """ "sgd" (no momentum, so no state) or "adamw" (two moments). On CUDA one fused kernel, which a graph can capture.

    On a CPU not fused: there PyTorch 2.13's fused SGD leaves a bf16 weight as it was.
    """
    parameters = list(parameters)
    cuda = parameters[0].is_cuda
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=learning_rate, fused=cuda)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=learning_rate, eps=EPS, fused=cuda, capturable=cuda)
    raise ValueError(f"no optimizer named {name!r}: sgd or adamw")
