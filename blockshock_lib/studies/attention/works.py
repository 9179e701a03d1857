"""What is timed: a forward, a backward, both as kernels and as calls; the lists; and the floors of both."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch._functorch import config

from blockshock_lib.engine import memory, roofline
from blockshock_lib.engine.case_run import CaseRun
from blockshock_lib.engine.roofline import Ceilings
from blockshock_lib.engine.study import Problem, Runner, Sample
from blockshock_lib.engine.timing import Work
from blockshock_lib.errors import UnsupportedError, first_line
from blockshock_lib.kernels.attention.lists import BlockLists
from blockshock_lib.studies.attention.methods import Method

BETAS = ("fa4", "cudnn")
REPEATS = 5  # of what is timed once a case
BACKWARD = 2.5  # the products of a backward, of which a forward has two: scores again, dV, dP, dQ and dK


def compile_anew() -> None:
    """Dynamo keeps eight compilations of a function and runs a ninth uncompiled, without a word that a record shows;
    every case needs several. A backward that is run again must keep what it saved.
    """
    torch.compiler.reset()
    config.donated_buffer = False


@contextlib.contextmanager
def beta(method: Method) -> Iterator[None]:
    """What a beta raises of its own is a row that says so, and the other methods go on."""
    try:
        yield
    except Exception as error:
        known = isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError | UnsupportedError)
        if known or method.backend not in BETAS:
            raise
        raise UnsupportedError(f"{method.label} fails: {first_line(error)}") from error


def clocked(device: torch.device, fn: Callable[[], Any]) -> tuple[float, Any]:
    """(ms until the device has done it, what it gave)."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    made = fn()
    wait()
    return (time.perf_counter() - start) * 1e3, made


class Backward:
    """A call of it gives dq, dk and dv, by the graph of one forward. That is made by the first call: autograd runs a
    backward on the stream of its forward, so one that is captured needs a forward on that stream.
    """

    def __init__(self, runner: Runner):
        self.runner, self.out = runner, None

    def __call__(self) -> tuple[torch.Tensor, ...]:
        if self.out is None:
            with torch.enable_grad():
                self.leaves = [x.detach().requires_grad_() for x in self.runner.operands]
                self.out = self.runner.attend(self.leaves)[0]
        return torch.autograd.grad(self.out, self.leaves, self.runner.dout, retain_graph=True)

    def drop(self) -> None:
        self.out = self.leaves = None


def step(runner: Runner) -> Callable:
    """A forward with its backward."""
    return lambda: Backward(runner)()


def of(run: CaseRun, copies: Sequence[Runner], kinds: Sequence[str]) -> list[Work]:
    """The works of a method: kernel time only where its calls can be captured in a CUDA graph. What was timed is
    checked again, as a graph or, where there is none, as a call.
    """
    one = copies[0]
    for copy in copies[1:]:  # so that a call does not find its operands in the cache
        copy.operands, copy.dout = [x.clone() for x in copy.operands], copy.dout.clone()
    found = []
    for name, make in {"forward": _forward, "backward": Backward, "step": step}.items():
        if name not in kinds or (name != "forward" and one.lacks):
            continue
        first = {"recheck": partial(_again, one, name), "heavy": True, "traced": True}
        if run.captured(one.name, f"{name}_kernel", make(one), one.active):
            found.append(_work(f"{name}_kernel", make, copies, **first))
            first = {}
        found.append(_work(f"{name}_call", make, copies, eager=True, **first))
    if one.lacks:
        run.miss(one.name, "unsupported", one.lacks, "backward_kernel")
    return found


def _forward(runner: Runner) -> Callable:
    return lambda: runner.attend(runner.operands)[0]


def _work(metric: str, make: Callable, copies: Sequence[Runner], **how: Any) -> Work:
    calls = [make(copy) for copy in copies]

    def release() -> None:
        for call in calls:
            if isinstance(call, Backward):
                call.drop()

    return Work(metric, calls, release=release, **how)


def _again(one: Runner, name: str, made: Any) -> Iterator:
    names = ("out",) if name == "forward" else ("dq", "dk", "dv")
    made = (made,) if name == "forward" else made
    return one.compared(one.whole(dict(zip(names, made, strict=True))) if one.active else None, names)


def list_times(problem: Problem) -> Iterator[Sample]:
    """The building of a case's lists, whole, and the sorting of found blocks into both directions alone."""
    case, lists, works_here = problem.case, problem.lists, problem.group.rank == 0
    size = case.q_len, case.k_len, case.block, problem.device
    found = [(each[:, 0] * lists.q_blocks + each[:, 1]) * lists.k_blocks + each[:, 2] for each in lists.blocks()]
    rest = {name: getattr(lists, name) for name in ("block", "q_len", "k_len", "tiles", "plane")}

    def build() -> BlockLists:
        return replace(problem.pattern, made={}).lists(*size)

    def sort() -> BlockLists:
        return BlockLists.of(*found, lists.rows.tile.long(), lists.planes, **rest)

    for metric, make in (("list_build", build), ("list_sort", sort)):
        meter = memory.Peak(problem.device)
        meter.restart()
        for step in range(REPEATS):
            yield Sample(metric, clocked(problem.device, make)[0] if works_here else 0.0, step)
        if metric == "list_build" and (peak := meter.read()) is not None:
            yield Sample("list_peak_bytes", peak)


def floors(one: Runner, ceilings: Ceilings) -> dict[str, float]:
    """Of a rank: by the blocks that are visited, and each operand read or written once."""
    case, lists, ranks = one.problem.case, one.lists, one.problem.group.world_size if one.layer is not None else 1
    blocks = lists.block_density * lists.q_blocks * lists.k_blocks
    flops = 4.0 * case.batch * case.heads * case.head_dim * blocks * case.block**2 / ranks
    q, k = one.operands[0].nbytes, one.operands[1].nbytes
    forward = SimpleNamespace(flops=flops, read=q + 2 * k, written=q)
    found = {"flops": flops, "floor_forward": roofline.compute(forward, ceilings)}
    if not one.lacks:
        backward = SimpleNamespace(flops=BACKWARD * flops, read=3 * q + 2 * k, written=q + 2 * k)
        found["floor_backward"] = roofline.compute(backward, ceilings)
        found["floor_step"] = found["floor_forward"] + found["floor_backward"]
    return found
