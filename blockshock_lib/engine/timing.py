"""Samples of time: interleaved, the same counts on every rank, the slowest rank is the sample."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from blockshock_lib.comm import Group

# A sample never repeats its call more often: an all-reduce timed in place multiplies its tensor by the number of ranks
# each time, and bf16 holds 127 doublings. (Beyond, and in fp16, it times Inf: as fast, and reset before each sample.)
MAX_CALLS = 64

# A product this long can drive a GPU to its power limit, whose controller sets the clocks over tens of milliseconds.
# Then a method must be timed at its own clocks, not at those that the one before it left: it runs untimed for
# LEAD_IN_MS, and BLOCK samples follow each other.
LONG_CALL_MS = 2.0
LEAD_IN_MS = 50.0
BLOCK = 4

HOST_CALLS = 16  # of a sample of the host's time: too few to fill the queue of launches, where the host would wait


@dataclass
class Task:
    """One thing to time.

    Attributes:
        fn: runs the thing `inner` times; None on a rank that only stands by.
        inner: how many calls one `fn()` makes (the calls captured in a CUDA graph).
        before: run before each sample, outside the timed region.
        calls: how many `fn()` make a sample; the same on every rank.
        heavy: whether it multiplies, so that a long one needs its lead-in.
        host: only the host's part of its calls is timed, made one after another without waiting for the device.
    """

    fn: Callable[[], object] | None
    inner: int = 1
    before: Callable[[], object] | None = None
    calls: int = 1
    heavy: bool = True
    host: bool = False


class Pool:
    """What the graphs of one case are captured with. What one of them frees serves the next only if both have one pool
    of memory and one stream.
    """

    def __init__(self, device: torch.device):
        self.handle, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)


class Graph:
    """`calls` captured in one CUDA graph: kernel time without the host. On a CPU, which has no graphs, they
    just run.

    Args:
        keeps: whether the last call's output is kept, to be checked. Else its memory serves the graphs that are
            captured next, from the same `pool`.
        restore: called after the calls were made, to warm up and to be captured: puts back what they read and may have
            let go of. Kept as long as the graph, with all that it puts back.
    """

    def __init__(
        self,
        calls: list[Callable[[], object]],
        device: torch.device,
        pool: Pool | None = None,
        keeps: bool = True,
        restore: Callable[[], None] = lambda: None,
    ):
        self.calls, self.keeps, self.restore, self.graph, self.out = calls, keeps, restore, None, None
        if device.type != "cuda":
            return
        pool = pool or Pool(device)
        stream = pool.stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        restore()
        self.graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread queries events while we capture; only this thread's calls may end up in the graph.
        with torch.cuda.graph(self.graph, pool=pool.handle, stream=stream, capture_error_mode="thread_local"):
            # Outputs that are kept lie apart, as those of calls in a row do.
            outs = [call() if keeps else _drop(call()) for call in calls]
        restore()
        self.out = outs[-1] if keeps else None

    def __call__(self) -> object:
        if self.graph is None:
            for call in self.calls:
                self.out = call()
        else:
            self.graph.replay()
        return self.out

    def fresh(self) -> object:
        """Runs it on outputs overwritten with NaN, so that a replay that does nothing shows."""
        if self.graph is not None:
            for tensor in tensors(self.out):
                tensor.fill_(float("nan"))
        return self()

    def release(self) -> None:
        """Frees the graph; NCCL cannot shut down while a captured collective is alive."""
        if self.graph is not None:
            self.graph.reset()
        self.graph = self.out = self.restore = None
        self.calls = []


def _drop(_: object) -> None:
    """Lets an output go at once, so that the next call may have its memory."""


def tensors(value: object) -> list[torch.Tensor]:
    """The tensors of an output: itself, or those in its tuple or list, however deep."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for one in value for t in tensors(one)] if isinstance(value, tuple | list) else []


class Clock:
    """Times tasks on one rank, in step with the other ranks."""

    def __init__(self, device: torch.device, group: Group):
        self.device, self.group = device, group
        self.cuda = device.type == "cuda"
        self.token = torch.zeros(1, device=device)

    def sample(self, task: Task) -> float:
        """Milliseconds a call, on this rank; 0 where the rank stands by."""
        if task.before is not None and task.fn is not None:
            task.before()
        self.group.align(self.token)
        if self.cuda:
            torch.cuda.synchronize(self.device)
        if task.fn is None:
            return 0.0
        if task.host:
            return self._host(task)
        if not self.cuda:
            start = time.perf_counter()
            for _ in range(task.calls):
                task.fn()
            return (time.perf_counter() - start) * 1e3 / (task.calls * task.inner)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(task.calls):
            task.fn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / (task.calls * task.inner)

    def _host(self, task: Task) -> float:
        """ms a call until the host has `task.calls` calls behind it. The device was idle before, by `align`."""
        start = time.perf_counter()
        for _ in range(task.calls):
            task.fn()
        return (time.perf_counter() - start) * 1e3 / task.calls

    def interleave(
        self, tasks: dict[str, Task], *, warmup: int, samples: int, min_sample_ms: float, blocks: bool = False
    ) -> dict[str, list[float]]:
        """Samples of all tasks in turns (A B C A B C), so that drift cancels; ms a call, of the slowest rank.

        With `blocks`, the turns are longer: each heavy task leads in untimed, then gives BLOCK samples.

        The warm-up's time decides how many calls make a sample of at least `min_sample_ms`; the ranks agree on it, for
        a collective that one rank calls more often than the others would hang.
        """
        if not tasks:
            return {}
        guess = {name: [self.sample(task) for _ in range(warmup)] for name, task in tasks.items()}
        slow = self.group.largest([min(times) for times in guess.values()], self.device)
        for task, ms in zip(tasks.values(), slow, strict=True):
            asked = calls_for(ms * task.inner, min_sample_ms, MAX_CALLS // task.inner)
            task.calls = HOST_CALLS if task.host else asked
        block = BLOCK if blocks else 1
        mine: dict[str, list[float]] = {name: [] for name in tasks}
        for done in range(0, samples, block):
            for (name, task), ms in zip(tasks.items(), slow, strict=True):
                if blocks and task.heavy:
                    self.lead_in(task, ms)
                mine[name] += [self.sample(task) for _ in range(min(block, samples - done))]
        flat = iter(self.group.largest([ms for times in mine.values() for ms in times], self.device))
        return {name: [next(flat) for _ in times] for name, times in mine.items()}

    def lead_in(self, task: Task, ms: float) -> None:
        """Runs a task of `ms` a call untimed for LEAD_IN_MS; as many calls on every rank."""
        for _ in range(calls_for(ms * task.inner * task.calls, LEAD_IN_MS, 1000)):
            self.sample(task)


def calls_for(ms: float, min_ms: float, most: int) -> int:
    """How many calls of `ms` make a sample of at least `min_ms`, between 1 and `most`."""
    return max(1, min(most, math.ceil(min_ms / ms) if ms > 0 else 1))


def copies_past_cache(weight_bytes: int, device: torch.device) -> int:
    """How many copies of a weight the calls must rotate over, so that none finds its weight in the L2 cache.

    Three times the cache, for replacement is not strictly least-recently-used.
    """
    if device.type != "cuda" or not weight_bytes:
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_CALLS, math.ceil(3 * cache / weight_bytes))
