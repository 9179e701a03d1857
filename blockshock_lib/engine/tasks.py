"""A work as the clock takes it: a call, or a CUDA graph that runs long enough to be timed."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

from blockshock_lib.engine.protocol import Runner
from blockshock_lib.engine.timing import MAX_CALLS, Clock, Graph, Pool, Task
from blockshock_lib.engine.work import Work

# A captured graph runs about this long, so that the few microseconds of its launch do not count.
GRAPH_MS = 2.0
# Calls one by one may take a few times as long as in a graph, for the host's part in them.
CERTAIN = 4
# Samples of each way that a forward or backward can run, to choose by.
CHOICE_SAMPLES = 12


class TaskMaker:
    """Makes tasks, on every rank alike.

    Attributes:
        longest_ms: the longest call of a heavy work so far.
    """

    def __init__(self, clock: Clock, min_sample_ms: float):
        self.clock, self.device, self.group, self.min_sample_ms = clock, clock.device, clock.group, min_sample_ms
        self.pool = Pool(self.device) if self.device.type == "cuda" else None
        self.longest_ms = 0.0

    def task(self, runner: Runner, one: Work) -> Task:
        """A work as the clock takes it: a call, or a graph that makes enough calls to run about GRAPH_MS."""
        count = len(one.calls)
        if one.eager:
            turn = itertools.cycle(one.calls)
            fn = (lambda: next(turn)()) if runner.active else None
            return Task(fn, before=one.before, heavy=one.heavy, host=one.host)
        if self.lasts(runner, one):
            return self.graph(runner, one, 1)
        once = self.graph(runner, one, 1)
        # One round of the rotation says how many make a graph of GRAPH_MS; all ranks must agree on it.
        ms = self.group.largest([min(self.clock.sample(once) for _ in range(3))], self.device)[0]
        if one.heavy:
            self.longest_ms = max(self.longest_ms, ms)
        rounds = max(1, min(MAX_CALLS // count, round(GRAPH_MS / (ms * count))))
        if rounds == 1:
            return once
        if once.fn is not None:
            once.fn.release()
        return self.graph(runner, one, rounds)

    def lasts(self, runner: Runner, one: Work) -> bool:
        """Whether one round runs so long, called one by one, that its graph needs no more rounds for sure.

        Half of the graphs need then not be captured twice, which takes longer than timing them.
        """
        if self.device.type != "cuda":
            return False
        if runner.active and one.before is not None:
            one.before()
        task = Task((lambda: [call() for call in one.calls]) if runner.active else None)
        ms = self.group.largest([min(self.clock.sample(task) for _ in range(2))], self.device)[0]
        if one.heavy:
            self.longest_ms = max(self.longest_ms, ms / len(one.calls))
        return ms >= CERTAIN * GRAPH_MS

    def graph(self, runner: Runner, one: Work, rounds: int) -> Task:
        calls = list(one.calls) * rounds
        fn = None
        if runner.active:
            if one.before is not None:
                one.before()
            fn = Graph(calls, self.device, self.pool, one.keeps, standing(one.copies))
        return Task(fn, inner=len(calls), before=one.before, heavy=one.heavy)

    def fastest(self, runner: Runner, found: dict[Any, Work]) -> Any:
        """The key of the work whose graph has the least median; the same on all ranks."""
        tasks = {}
        for key, one in found.items():
            tasks[key] = self.graph(runner, one, 1)
            tasks[key].heavy = True  # led in, so that each is timed at its own clocks: the ways differ by less
        taken = self.clock.interleave(
            tasks,
            warmup=1,
            samples=CHOICE_SAMPLES,
            min_sample_ms=self.min_sample_ms,
            blocks=self.device.type == "cuda",
        )
        for task in tasks.values():
            if task.fn is not None:
                task.fn.release()
        return min(taken, key=lambda key: statistics.median(taken[key]))


def standing(copies: list[Runner]) -> Callable[[], None]:
    """What gives the layers back what they hold now.

    A layer may make its packed copies anew and let go of those that a graph reads; and what it makes while a graph is
    captured holds nothing before that graph is replayed.
    """
    held = [(vars(own), dict(vars(own))) for copy in copies for own in copy.owners]

    def restore() -> None:
        for mine, had in held:
            mine.update(had)

    return restore
