"""All ranks of a method on one device, one after the other: what a single GPU can check and time, marked `emulated`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from blockshock_lib.comm import Pending, Reduction
from blockshock_lib.layers import autograd
from blockshock_lib.layers.sharded import ShardedLinear


class Emulated(nn.Module):
    """The working ranks' layers in one process: the pieces of `ShardedLinear` over lists, one entry a rank.

    `reduce`, `start_dx` and `finish_dw` add, join or swap what the ranks made. All ranks share one bias.
    """

    active = True
    overlap = True  # there is nothing to overlap with: the ranks' collectives are sums in one process
    chunks = 1
    joined = ""

    def __init__(self, layers: list[ShardedLinear]):
        super().__init__()
        self.layers = nn.ModuleList(layer for layer in layers if layer.active)
        first = self.layers[0]
        self.in_features, self.out_features = first.in_features, first.out_features
        for layer in self.layers:
            layer.bias = first.bias

    @property
    def bias(self) -> nn.Parameter | None:
        return self.layers[0].bias

    @property
    def owners(self) -> list[ShardedLinear]:
        return list(self.layers)

    @property
    def weights(self) -> list[nn.Parameter]:
        return [layer.weight for layer in self.layers]

    @property
    def dx_by(self) -> str:
        return self.layers[0].dx_by

    @property
    def dw_by(self) -> str:
        return self.layers[0].dw_by

    def dw_strategies(self) -> tuple[str, ...]:
        return self.layers[0].dw_strategies()

    def weight_bytes(self) -> int:
        return sum(layer.weight_bytes() for layer in self.layers)

    def hold_bytes(self) -> dict[str, int]:
        held = [layer.hold_bytes() for layer in self.layers]
        return {name: sum(one[name] for one in held) for name in held[0]}

    def tune(self, x: torch.Tensor) -> None:
        for layer in self.layers:
            layer.tune(x)

    def tune_reduce(self, x: torch.Tensor) -> None:
        """There is one way to add up in one process."""

    def tune_dx(self, dy: torch.Tensor) -> None:
        for layer in self.layers:
            layer.tune_dx(dy)

    def reductions(self, x: torch.Tensor) -> dict[str, Reduction]:
        return {}

    def product_by(self, x: torch.Tensor) -> str:
        return self.layers[0].product_by(x)

    def products(self, x: torch.Tensor) -> dict[str, Callable[[], list[torch.Tensor]]]:
        every = [layer.products(x) for layer in self.layers]
        return {name: lambda name=name: [products[name]() for products in every] for name in every[0]}

    def prepare(self, always: bool = False) -> None:
        for layer in self.layers:
            layer.prepare(always)

    def refresh(self) -> None:
        for layer in self.layers:
            layer.refresh()

    def stages(self) -> dict[str, Callable[[], None]]:
        every = [layer.stages() for layer in self.layers]
        return {name: lambda name=name: [stages[name]() for stages in every] for name in every[0]}

    def local(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer.local(x) for layer in self.layers]

    def reduce(self, partials: list[torch.Tensor]) -> torch.Tensor:
        return self.layers[0].combine(partials)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.reduce(self.local(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return autograd.linear(self, x)

    def local_dx(self, dy: torch.Tensor) -> list[torch.Tensor]:
        return [layer.local_dx(dy) for layer in self.layers]

    def start_dx(self, partials: list[torch.Tensor]) -> Pending:
        return Pending(self.layers[0].combine_dx(partials))

    def local_dw(self, dy: torch.Tensor, x: torch.Tensor, by: str | None = None) -> list:
        return [layer.local_dw(dy, x, by) for layer in self.layers]

    def finish_dw(self, partials: list, by: str | None = None) -> list[torch.Tensor]:
        swapped = self.layers[0].combine_dw(partials, by)
        return [layer.in_layout(values) for layer, values in zip(self.layers, swapped, strict=True)]

    backward = ShardedLinear.backward

    def to_dense(self, tensors: list[torch.Tensor] | None = None) -> torch.Tensor:
        """W [N, K] of all ranks' parts; or of tensors in their layouts."""
        tensors = self.weights if tensors is None else tensors
        dense = tensors[0].new_zeros(self.out_features, self.in_features)
        for layer, tensor in zip(self.layers, tensors, strict=True):
            dense[layer.rows, layer.cols] += layer.part_dense(tensor.detach())
        return dense

    def from_dense(self, dense: torch.Tensor) -> list[torch.Tensor]:
        return [layer.from_dense(dense) for layer in self.layers]
