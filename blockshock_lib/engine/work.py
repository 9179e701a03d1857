"""What is timed of each method: the pieces of its forward, backward or training step, each as calls to make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from blockshock_lib.engine.phases import Phase
from blockshock_lib.engine.protocol import Problem, Runner
from blockshock_lib.engine.training import STANDSTILL, Trainer, eager_step

Call = Callable[[], Any]

ORDERS = {True: "overlapped", False: "in turn"}
"""Whether dX's collective runs while dW is computed."""

CHUNKS = (1, 2)
"""Into how many pieces the batch may be cut, the collective of one beside the product of the next."""
LARGE_BATCH = 1024  # below, no cut has paid: the pieces' products are no shorter than the whole one


@dataclass
class Work:
    """One thing to time.

    Attributes:
        calls: one for each copy of the method, whose weights the calls rotate over.
        eager: timed as an eager user calls it, not as a CUDA graph.
        host: timed is only the host's part of such a call.
        before: run before each sample, outside the timed region.
        heavy: whether it multiplies, and leads a method's turn: a long one needs its lead-in.
        keeps: whether its outputs are checked after it was timed.
        detail: what the row says beside the metric.
        ways: the metric of everything that is timed each way that it can run, where this is the chosen way of several;
            its samples go there too.
        release: frees what the calls made for themselves, once all is timed.
        copies: the method's copies that the calls read.
    """

    calls: list[Call]
    eager: bool = False
    host: bool = False
    before: Call | None = None
    heavy: bool = False
    keeps: bool = False
    detail: str = ""
    ways: str = ""
    release: Call | None = None
    copies: list[Runner] = field(default_factory=list)


def forward(problem: Problem, copies: list[Runner], name: str) -> dict[str, Work]:
    """Call time, kernel time, the product alone and the collective alone."""
    x = problem.x
    found = {
        "forward_call": Work([lambda one=one: one.multiply(x) for one in copies], eager=True, heavy=True),
        "forward_kernel": Work([lambda one=one: one.multiply(x) for one in copies], heavy=True, keeps=True),
        "compute_kernel": Work(
            [lambda one=one: one.local(x) for one in copies], heavy=True, detail=copies[0].product_by(x)
        ),
    }
    if problem.cost(name).sent:
        found["reduce_kernel"] = collective(copies, lambda one: one.local(x), lambda one, partial: one.reduce(partial))
    if has_chunks(problem, copies[0]):
        taken = copies[0].chunks
        found["forward_kernel"].detail, found["forward_kernel"].ways = str(taken), "forward_chunks_kernel"
        for count in CHUNKS:
            if count != taken:
                found[f"forward_chunks_kernel {count}"] = chunked(problem, copies, count)
    return found


def has_chunks(problem: Problem, runner: Runner) -> bool:
    """Whether the forward's batch may be cut: it is large, and there is a collective to run beside the product."""
    return bool(runner.joined) and problem.case.batch >= LARGE_BATCH and not problem.case.emulated


def chunked(problem: Problem, copies: list[Runner], count: int) -> Work:
    """The forward with its batch cut into `count` pieces, whatever the layers take."""

    def call(one: Runner) -> Any:
        taken, one.chunks = one.chunks, count
        try:
            return one.multiply(problem.x)
        finally:
            one.chunks = taken

    return Work([lambda one=one: call(one) for one in copies], heavy=True, keeps=True, detail=str(count))


def collective(copies: list[Runner], make: Callable[[Runner], Any], join: Callable[[Runner, Any], Any]) -> Work:
    """A collective alone, over and over on the partial result of the first copy."""
    runner = copies[0]
    if not runner.active:
        return Work([lambda: None] * len(copies))
    # Where it lies: the collective may take it from a workspace that the ranks share, as it does in the layer.
    partial = make(runner)
    start = partial.clone()
    # The all-reduce may add in place: without a fresh start the numbers would grow to infinity.
    return Work([lambda: join(runner, partial)] * len(copies), before=lambda: partial.copy_(start))


def input_gradient(problem: Problem, copies: list[Runner], name: str) -> dict[str, Work]:
    """dX alone, and its collective alone."""
    dy = problem.dy
    found = {"dx_kernel": Work([lambda one=one: one.local_dx(dy) for one in copies], detail=copies[0].dx_by)}
    if problem.cost_dx(name).sent:
        found["reduce_dx_kernel"] = collective(
            copies, lambda one: one.local_dx(dy), lambda one, partial: one.start_dx(partial).wait()
        )
    return found


def frozen(problem: Problem, copies: list[Runner]) -> dict[str, Work]:
    """dX with its collective; forward and dX, as kernels and as a user's call."""
    x, dy = problem.x, problem.dy
    leaf = x.detach().requires_grad_()

    def dx(one: Runner) -> torch.Tensor:
        return one.start_dx(one.local_dx(dy)).wait()

    def user(one: Runner) -> None:
        with torch.enable_grad():
            one(leaf).backward(dy)
        leaf.grad = None

    return {
        "pass_kernel": Work([lambda one=one: (one.multiply(x), dx(one)) for one in copies], heavy=True, keeps=True),
        "backward_kernel": Work([lambda one=one: dx(one) for one in copies]),
        "pass_call": Work([lambda one=one: user(one) for one in copies], eager=True),
    }


class Spares:
    """Tensors that all methods share while they are timed, where only their size matters.

    Args:
        entries: of the largest weight of any method.
    """

    def __init__(self, entries: int, dtype: torch.dtype, device: torch.device):
        self._make = lambda: torch.full((entries,), 1e-3, dtype=dtype, device=device)
        self._flat: dict[str, torch.Tensor] = {}

    def like(self, what: str, weight: torch.Tensor) -> torch.Tensor:
        """A tensor of the weight's shape, on the one storage for `what`."""
        if what not in self._flat:
            self._flat[what] = self._make()
        return self._flat[what][: weight.numel()].view(weight.shape)


def backward(problem: Problem, copies: list[Runner], overlap: bool | None = None) -> Work:
    """dX, dW and db; dX's collective in the order asked for, or else in that of the layers."""
    x, dy = problem.x, problem.dy
    return Work([lambda one=one: one.backward(dy, x, overlap=overlap) for one in copies])


def has_orders(problem: Problem, name: str) -> bool:
    """Whether the method's dX has a collective that can run beside dW: on ranks of their own, not emulated ones."""
    return bool(problem.cost_dx(name).sent) and not problem.case.emulated


def trained(problem: Problem, copies: list[Runner], name: str, spares: Spares | None) -> dict[str, Work]:
    """The whole step as kernels and as a user's call; dX, dW and db, in both orders; dW each way; the optimizer and
    what follows it.

    Every copy has an optimizer of its own, whose rate is so small that no weight moves.

    Args:
        spares: hold the gradients where the optimizer alone is timed (in a step, too, they have just been written) and,
            for weights that no cache holds, the optimizer's state: that of all methods at once would not fit.
    """
    x, dy, first = problem.x, problem.dy, copies[0]
    leaf = x.detach().requires_grad_()
    trainers = [Trainer(one, problem.case.optimizer, STANDSTILL) for one in copies]
    if spares is not None and len(copies) == 1:
        share_state(trainers[0], spares)

    def dw(by: str) -> list[Call]:
        return [lambda one=one: one.finish_dw(one.local_dw(dy, x, by), by) for one in copies]

    def give() -> None:
        for trainer in trainers:
            give_gradients(trainer, spares)

    found = {
        "step_kernel": Work([lambda t=t: t.step(x, dy) for t in trainers], heavy=True, keeps=True),
        "backward_kernel": backward(problem, copies),
        "dw_kernel": Work(dw(first.dw_by), detail=first.dw_by),
    }
    if has_orders(problem, name):
        found["backward_kernel"].detail, other = ORDERS[first.overlap], not first.overlap
        found["backward_kernel"].ways = "backward_order_kernel"
        found[f"backward_order_kernel {ORDERS[other]}"] = backward(problem, copies, other)
        found[f"backward_order_kernel {ORDERS[other]}"].detail = ORDERS[other]
    for by in first.dw_strategies():
        if by != first.dw_by:
            found["dw_kernel"].ways = "dw_strategy_kernel"
            found[f"dw_strategy_kernel {by}"] = Work(dw(by), detail=by)
    found["optimizer_kernel"] = Work([lambda t=t: t.optimizer.step() for t in trainers], before=give)
    for stage in first.stages():
        found[f"{stage}_kernel"] = Work([one.stages()[stage] for one in copies])
    found["step_call"] = Work([lambda t=t: eager_step(t.runner, t.optimizer, leaf, dy) for t in trainers], eager=True)
    return found


def give_gradients(trainer: Trainer, spares: Spares) -> None:
    gradients = [spares.like("gradient", weight) for weight in trainer.weights]
    trainer.assign(gradients, torch.zeros_like(trainer.biases[0]) if trainer.biases else None)


def share_state(trainer: Trainer, spares: Spares) -> None:
    """Has the optimizer make its state, and puts what is as large as a weight on the storage that all share."""
    if trainer.optimizer is None:
        return
    give_gradients(trainer, spares)
    trainer.optimizer.step()
    for weight in trainer.weights:
        state = trainer.optimizer.state[weight]
        for what, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                state[what] = spares.like(what, weight)
    trainer.drop_gradients()


def of(problem: Problem, copies: list[Runner], name: str, phase: Phase, spares: Spares | None) -> dict[str, Work]:
    """All that a phase times of one method, by metric; "metric detail" where a metric comes in several ways."""
    found = forward(problem, copies, name)
    if phase.backward:
        for work in found.values():
            work.heavy = False  # the pass or the step comes first, and leads in for all of them
        found |= input_gradient(problem, copies, name)
        found = (trained(problem, copies, name, spares) if phase.train else frozen(problem, copies)) | found
    for work in found.values():
        work.copies = copies
    return found
