"""One training step of a runner, on its pieces: forward, gradients, optimizer, and what must follow it."""

from __future__ import annotations

from typing import Any

import torch

from blockshock_lib.engine import optimizers
from blockshock_lib.engine.protocol import Runner

# So small that no weight moves by it: a step that is timed changes nothing, and its outputs can be checked afterwards.
# The arithmetic is the same for any rate, and so is its time.
STANDSTILL = 1e-12


def listed(value: Any) -> list:
    """What one rank holds, as emulated ranks do: a list, one entry a rank."""
    return list(value) if isinstance(value, list | tuple) else [value]


class Trainer:
    """A runner and the optimizer of its weights and bias. A rank that stands by has nothing to train.

    Attributes:
        weights: the runner's weights, one, or one for each emulated rank.
        parameters: those, and the bias.
    """

    def __init__(self, runner: Runner, optimizer: str, learning_rate: float):
        self.runner = runner
        self.weights = list(runner.weights)
        self.biases = [] if runner.bias is None or not runner.active else [runner.bias]
        self.parameters = [*self.weights, *self.biases]
        self.optimizer = optimizers.make(optimizer, self.parameters, learning_rate) if runner.active else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.runner.multiply(x)

    def backward(self, dy: torch.Tensor, x: torch.Tensor) -> tuple:
        """(dX, dW, db), and the parameters' gradients set to the last two.

        The old gradients are let go first, or two of them would be held at once.
        """
        self.drop_gradients()
        dx, dw, db = self.runner.backward(dy, x)
        self.assign(dw, db)
        return dx, dw, db

    def assign(self, dw: Any, db: torch.Tensor | None) -> None:
        for weight, gradient in zip(self.weights, listed(dw), strict=True):
            weight.grad = gradient
        for bias in self.biases:
            bias.grad = db

    def update(self) -> None:
        """The optimizer's step, and the stages that it makes necessary. Communicates nothing."""
        self.optimizer.step()
        for stage in self.runner.stages().values():
            stage()

    def step(self, x: torch.Tensor, dy: torch.Tensor) -> tuple:
        """(y, dX, dW, db) of one whole step with a given dy."""
        y = self.forward(x)
        gradients = self.backward(dy, x)
        self.update()
        return y, *gradients

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state_bytes(self) -> int:
        """Bytes of what the optimizer keeps for the weights."""
        return sum(
            value.nbytes
            for weight in self.weights
            for value in self.optimizer.state.get(weight, {}).values()
            if isinstance(value, torch.Tensor)
        )

    def gradient_bytes(self) -> int:
        return sum(weight.grad.nbytes for weight in self.weights if weight.grad is not None)


def eager_step(runner: Runner, optimizer: torch.optim.Optimizer, x: torch.Tensor, dy: torch.Tensor) -> None:
    """One step as a user writes it: autograd, torch's optimizer, and the layer sees by itself that its weight changed.

    The gradients are dropped and not filled with zeros, which is torch's own default and spares a pass over them.
    """
    with torch.enable_grad():
        runner(x).backward(dy)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    x.grad = None


def reset(runner: Runner, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Gives a runner the dense `weight` [N, K] and `bias` again, and no gradients."""
    if not runner.active:
        return
    for mine, part in zip(runner.weights, listed(runner.from_dense(weight)), strict=True):
        mine.copy_(part)
        mine.grad = None
    if bias is not None:
        runner.bias.copy_(bias)
        runner.bias.grad = None
    for stage in runner.stages().values():
        stage()
