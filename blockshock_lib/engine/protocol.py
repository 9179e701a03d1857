"""What the engine asks of a study and of a method. A linear layer, attention or a whole GPT joins by these members."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from blockshock_lib.comm import Group


class Cost(Protocol):
    """Least work of one forward on one rank: FLOP, bytes read, written and sent; weight bytes and peak bytes held."""

    flops: float
    read: float
    written: float
    sent: float
    weights: float
    peak: float


class Runner(Protocol):
    """A method as one process runs it: `reduce(local(x))` is its forward; `local` communicates nothing."""

    active: bool

    def local(self, x: Any) -> Any: ...
    def reduce(self, partial: Any) -> torch.Tensor: ...
    def tune(self, x: Any) -> None: ...
    def weight_bytes(self) -> int: ...


class Problem(Protocol):
    """One case: its inputs, its float64 truth, what rounding alone allows, and the methods that must reach it."""

    case: Any
    device: torch.device
    dtype: torch.dtype
    x: Any

    @property
    def truth(self) -> torch.Tensor: ...
    def sharding_fault(self, name: str) -> str: ...
    def expected(self, name: str) -> torch.Tensor: ...
    def unsupported(self, name: str) -> str: ...
    def build(self, name: str, group: Group) -> Runner: ...
    def cost(self, name: str) -> Cost: ...
