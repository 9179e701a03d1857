"""All ranks of a method on one device, one after the other: what a single GPU can check and time, marked `emulated`."""

from __future__ import annotations

import torch
from torch import nn

from blockshock_lib.layers.sharded import ShardedLinear


class Emulated(nn.Module):
    """The working ranks' layers in one process. `local` runs them in turn; `reduce` adds (or joins) what they made."""

    active = True

    def __init__(self, layers: list[ShardedLinear]):
        super().__init__()
        self.layers = nn.ModuleList(layer for layer in layers if layer.active)

    def weight_bytes(self) -> int:
        return sum(layer.weight_bytes() for layer in self.layers)

    def tune(self, x: torch.Tensor) -> None:
        for layer in self.layers:
            layer.tune(x)

    def local(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer.local(x) for layer in self.layers]

    def reduce(self, partials: list[torch.Tensor]) -> torch.Tensor:
        return self.layers[0].combine(partials)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reduce(self.local(x))
