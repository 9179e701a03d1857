"""What the engine asks of a study and of a method. A linear layer, attention or a whole GPT joins by these members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from blockshock_lib.comm import Group, Pending


class Cost(Protocol):
    """Least work of one piece on one rank: FLOP, bytes read, written and sent; weight bytes and peak bytes held."""

    flops: float
    read: float
    written: float
    sent: float
    weights: float
    peak: float


class Runner(Protocol):
    """A method as one process runs it: `reduce(local(x))` is its forward; what is `local` communicates nothing.

    Attributes:
        active: False on a rank that only stands by.
        weights, bias: what an optimizer trains; one weight, or one for each emulated rank.
        owners: the layers that hold them.
        dx_by, dw_by: how dX and dW are made.
        overlap: whether dX's collective runs while dW is computed.
    """

    active: bool
    weights: list[nn.Parameter]
    bias: nn.Parameter | None
    owners: list[Any]
    dx_by: str
    dw_by: str
    overlap: bool

    def __call__(self, x: Any) -> torch.Tensor: ...
    def local(self, x: Any) -> Any: ...
    def reduce(self, partial: Any) -> torch.Tensor: ...
    def local_dx(self, dy: torch.Tensor) -> Any: ...
    def start_dx(self, partial: Any) -> Pending: ...
    def local_dw(self, dy: torch.Tensor, x: Any, by: str | None = None) -> Any: ...
    def finish_dw(self, partial: Any, by: str | None = None) -> Any: ...
    def dw_strategies(self) -> tuple[str, ...]: ...
    def backward(self, dy: torch.Tensor, x: Any, *, overlap: bool | None = None) -> tuple: ...
    def stages(self) -> dict[str, Callable[[], None]]: ...
    def tune(self, x: Any) -> None: ...
    def tune_dx(self, dy: torch.Tensor) -> None: ...
    def to_dense(self, values: Any = None) -> torch.Tensor: ...
    def from_dense(self, dense: torch.Tensor) -> Any: ...
    def weight_bytes(self) -> int: ...
    def hold_bytes(self) -> dict[str, int]: ...


class Reference(Protocol):
    """The float64 truths of one set of weights, and the baselines that no sharding changes."""

    steps: int
    weight: torch.Tensor
    exact_weight: torch.Tensor
    y: torch.Tensor
    dx: torch.Tensor
    dw: torch.Tensor
    db: torch.Tensor
    expected_dw: torch.Tensor
    expected_db: torch.Tensor


class Problem(Protocol):
    """One case: its inputs, its truths, what rounding alone allows, the methods that must reach it, and their costs."""

    case: Any
    device: torch.device
    dtype: torch.dtype
    x: Any
    dy: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    teacher: torch.Tensor
    reference: Reference
    trained: Reference

    def train(self, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None: ...
    def forget(self) -> None: ...
    def batch(self, step: int) -> Any: ...
    def sharding_fault(self, name: str) -> str: ...
    def expected(self, name: str, what: str = "y", reference: Reference | None = None) -> torch.Tensor: ...
    def unsupported(self, name: str, features: int | None = None) -> str: ...
    def build(self, name: str, group: Group) -> Runner: ...
    def cost(self, name: str) -> Cost: ...
    def cost_dx(self, name: str) -> Cost: ...
    def cost_dw(self, name: str, by: str) -> Cost: ...
    def dw_by(self, name: str) -> str: ...
    def cost_optimizer(self, name: str) -> Cost: ...
    def cost_stages(self, name: str) -> dict[str, Cost]: ...
    def training_bytes(self, name: str, features: int | None = None) -> Any: ...
