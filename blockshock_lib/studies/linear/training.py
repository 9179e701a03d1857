"""A training step of a layer, on its pieces; and the loss curve."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockshock_lib.engine.case_run import CaseRun
from blockshock_lib.engine.study import Problem, Runner, Sample
from blockshock_lib.layers.sharded import ShardedLinear
from blockshock_lib.studies.linear.methods.method import FORMULAS

# So small that no weight moves: a timed step changes nothing, so its outputs can be checked; its time is any rate's.
NEGLIGIBLE_LR = 1e-12
# A gradient near zero differs by rounding between two right methods, in its sign too. Below this size AdamW's step
# shrinks with the gradient; with torch's 1e-8 such an entry would take a whole step in either direction.
EPS = 1e-6


def make_optimizer(name: str, parameters: list[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """Torch's own, the same for every method: "sgd" (no momentum, so no state) or "adamw" (two moments). On CUDA one
    fused kernel, which a graph can capture; on a CPU PyTorch 2.13's fused SGD leaves a bf16 weight as it was.
    """
    cuda = parameters[0].is_cuda
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=learning_rate, fused=cuda)
    return torch.optim.AdamW(parameters, lr=learning_rate, eps=EPS, fused=cuda, capturable=cuda)


class Trainer:
    """A layer and the optimizer of its weight and bias. A rank that stands by has nothing to train."""

    def __init__(self, layer: ShardedLinear, optimizer: str, learning_rate: float):
        self.layer = layer
        self.parameters = [p for p in (layer.weight, layer.bias) if p is not None] if layer.active else []
        self.optimizer = make_optimizer(optimizer, self.parameters, learning_rate) if layer.active else None

    def backward(self, dy: Tensor, x: Tensor) -> tuple:
        """(dX, dW, db), the last two as gradients; the old ones are dropped first, or both would be held at once."""
        self.drop_gradients()
        dx, *gradients = self.layer.backward(dy, x)
        self.assign(*gradients)
        return dx, *gradients

    def assign(self, dw: Tensor, db: Tensor | None) -> None:
        for parameter, gradient in zip(self.parameters, (dw, db), strict=False):
            parameter.grad = gradient

    def update(self) -> None:
        """The optimizer's step, and the stages that it makes necessary. Communicates nothing."""
        self.optimizer.step()
        self.layer.refresh()

    def step(self, x: Tensor, dy: Tensor) -> tuple:
        """(y, dX, dW, db) of one whole step with a given dy."""
        made = self.layer.multiply(x), *self.backward(dy, x)
        self.update()
        return made

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def reset(self, weight: Tensor, bias: Tensor | None) -> None:
        """Gives the layer the dense `weight` [N, K] and `bias` again, and no gradients."""
        if self.layer.active:
            for parameter, value in zip(self.parameters, (self.layer.from_dense(weight), bias), strict=False):
                parameter.copy_(value)
            self.drop_gradients()
            self.layer.refresh()

    def held(self, activations: int) -> dict[str, float]:
        """Bytes that a training step holds on this rank, by metric; after a backward, so that gradients are there."""
        if not self.layer.active:
            return dict.fromkeys(FORMULAS, 0.0)
        own, weight = self.layer.hold_bytes(), self.layer.weight
        moments = [one.nbytes for one in self.optimizer.state.get(weight, {}).values() if isinstance(one, Tensor)]
        held = (own["weights"], own["copies"] + own["pattern"], weight.grad.nbytes, sum(moments), activations)
        return dict(zip(FORMULAS, held, strict=True))


def eager_step(layer: ShardedLinear, optimizer: torch.optim.Optimizer, x: Tensor, dy: Tensor) -> None:
    """One step as a user writes it: autograd, torch's optimizer; the layer sees by itself that its weight changed."""
    with torch.enable_grad():
        layer(x).backward(dy)
    optimizer.step()
    optimizer.zero_grad()
    x.grad = None


def losses(runner: Runner, run: CaseRun, done: int) -> Iterator[Sample]:
    """The loss curve from step `done` on: the layer learns a teacher's weights by batches that are the same for every
    method, and has its first weights again afterwards. Refused where a number is not finite.
    """
    problem = runner.problem
    trainer = Trainer(runner.layer, problem.case.optimizer, problem.learning_rate)
    for step in range(problem.params.loss_steps):
        loss, fault = one_step(problem, trainer, step) if runner.active else (0.0, "")
        run.refuse(fault)
        if step >= done:
            yield Sample("loss", loss, step)
    trainer.reset(problem.weight, problem.bias)


def one_step(problem: Problem, trainer: Trainer, step: int) -> tuple[float, str]:
    """(loss before the step, what was not finite or ""). The loss is the mean of (y - x W*^T)^2, summed in float32. The
    gradient is that of half the sum of squares over B + K: the largest eigenvalue of x^T x is about
    (sqrt B + sqrt K)^2, at most twice that, so SGD is stable for any size below a rate of 1.
    """
    x = problem.batch(step)
    y = trainer.layer.multiply(x)
    off = (y - F.linear(x, problem.teacher)).float()
    loss, seen = off.square().mean(), {}
    if loss.isfinite() or not _finite(y):
        dy = (off / (x.shape[0] + x.shape[1])).to(y.dtype)
        dx, dw, db = trainer.backward(dy, x)
        trainer.update()
        seen = {"x": x, "y": y, "dy": dy, "dx": dx, "dw": dw, "db": db, "weight": trainer.layer.weight}
    for what, value in (seen | {"loss": loss}).items():
        if value is not None and not _finite(value):
            fault = f"loss is {'NaN' if value.isnan().any() else 'infinite'} at step {step} (tensor {what})"
            return loss.item(), fault
    return loss.item(), ""


def _finite(x: Tensor) -> bool:
    """By both ends, to which a NaN comes through: of 16-bit floats on a CPU 25 times as fast as entry by entry."""
    return bool(torch.stack(x.aminmax()).isfinite().all())
