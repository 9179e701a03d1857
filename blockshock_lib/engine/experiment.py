"""One case on one rank: build, check, weigh, time, profile. Every rank runs this in step; the rows are all
ranks' own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from blockshock_lib import records
from blockshock_lib.comm import Group
from blockshock_lib.engine import correctness, profile, roofline
from blockshock_lib.engine.memory import Peak
from blockshock_lib.engine.phases import PHASES
from blockshock_lib.engine.protocol import Problem, Runner
from blockshock_lib.engine.timing import LONG_CALL_MS, MAX_CALLS, Clock, Graph, Task, copies_past_cache
from blockshock_lib.errors import UnsupportedError, first_line
from blockshock_lib.params import Params

# A captured graph runs about this long, so that the few microseconds of its launch do not count.
GRAPH_MS = 2.0

_ceilings: dict[torch.dtype, roofline.Ceilings] = {}


@dataclass
class Rows:
    """The rows of one case, as records.write takes them."""

    rows: list[dict] = field(default_factory=list)

    def add(self, method: str, metric: str, value: float, repeat: int = 0, detail: str = "") -> None:
        self.rows.append(records.row(method, metric, value, repeat=repeat, detail=detail))

    def miss(self, method: str, status: str, reason: str, metric: str = "check") -> None:
        """A row without a number: why there is none."""
        self.rows.append(records.row(method, metric, math.nan, status=status, reason=reason))


def measure(problem: Problem, params: Params, *, group_index: int, traces: Path, last: bool) -> list[dict]:
    """Runs every method of `problem.case` and returns the rows of the case, the same on every rank.

    A method that cannot run, does not fit or fails its check gets a row that says so, and no time.

    Args:
        problem: the case, its truth and its methods, on this rank's device.
        group_index: which fresh group of processes this is; traces are written by the first.
        traces: folder for the Chrome traces.
        last: whether this is the plan's last case, the one that `profile: last` traces.
    """
    trial = Trial(problem, Group.of(), Rows())
    with torch.no_grad():
        runners = {name: runner for name in problem.case.methods if (runner := trial.admit(name)) is not None}
        if PHASES[problem.case.phase].time and runners:
            trial.time(runners, params)
            if group_index == 0 and (params.profile == "all" or (params.profile == "last" and last)):
                trial.profile(runners, traces)
    return trial.rows.rows


@dataclass
class Trial:
    """The stages of one case; `rows` grows as they pass."""

    problem: Problem
    group: Group
    rows: Rows

    def __post_init__(self) -> None:
        self.device = self.problem.device
        self.clock = Clock(self.device, self.group)
        self.longest_ms = 0.0

    def admit(self, name: str) -> Runner | None:
        """Builds, tunes, weighs and checks one method alone; None when it may not be timed, and the rows say why."""
        problem, rows = self.problem, self.rows
        if reason := problem.unsupported(name):
            rows.miss(name, "unsupported", reason)
            return None
        meter = Peak(self.device)
        runner = self.agree(name, lambda: problem.build(name, self.group))
        if runner is None:
            return None
        if not self.tune(name, runner):
            return None
        meter.restart()
        poison(problem)
        partial = self.agree(name, lambda: runner.local(problem.x) if runner.active else ())
        if partial is None:
            return None
        y = runner.reduce(partial) if runner.active else None
        peak = meter.read()
        if not self.check(name, y):
            return None
        cost = problem.cost(name)
        weights, peak = self.group.largest([runner.weight_bytes(), -1.0 if peak is None else peak], self.device)
        rows.add(name, "weight_bytes", weights)
        rows.add(name, "weight_bytes_formula", cost.weights)
        rows.add(name, "peak_bytes_formula", cost.peak)
        if peak < 0:
            rows.miss(name, "unsupported", "the CPU's allocator keeps no peak", metric="peak_bytes")
        else:
            rows.add(name, "peak_bytes", peak)
        return runner

    def agree(self, name: str, fn: Callable[[], Any]) -> Any:
        """fn()'s result, or None on all ranks when it failed on any: no rank may then enter a collective."""
        result, word = attempt(fn)
        rank, word = self.group.first_word(word, self.device)
        if not word:
            return result
        status, reason = word.split(": ", 1)
        self.rows.miss(name, status, f"rank {rank}: {reason}")
        return None

    def tune(self, name: str, runner: Runner) -> bool:
        """Rank 0 searches first and keeps its choice in a file; the other ranks then read the same choice."""

        def search(turn: bool) -> bool:
            if turn and runner.active:
                runner.tune(self.problem.x)
            return True

        turns = (self.group.rank == 0, self.group.rank != 0)
        return all(self.agree(name, lambda turn=turn: search(turn)) for turn in turns)

    def check(self, name: str, y: torch.Tensor | None, *, record: bool = True) -> bool:
        """The gate, on every working rank; the worst rank counts. `y` is None on a rank that stands by."""
        nothing = correctness.Check(correctness.Errors(0, 0), 0, 0, "")
        found = nothing if y is None else correctness.gate(y, self.problem.expected(name), self.problem.truth)
        if y is not None and record and (fault := self.problem.sharding_fault(name)):
            found = found._replace(reason=fault)
        rank, reason = self.group.first_word(found.reason, self.device)
        numbers = [found.max_ratio, found.rms_ratio, found.errors.max, found.errors.rms]
        worst = self.group.largest(numbers, self.device)
        if record:
            for metric, value in zip(
                ("error_max_ratio", "error_rms_ratio", "error_max", "error_rms"), worst, strict=True
            ):
                if value < float("inf"):
                    self.rows.add(name, metric, value)
        if reason:
            self.rows.miss(name, "failed", f"rank {rank}: {reason}")
        elif record:
            self.rows.add(name, "check", 1.0)
        return not reason

    def time(self, runners: dict[str, Runner], params: Params) -> None:
        """Call time, kernel time, compute and reduce apart, all methods interleaved; then the graphs' outputs
        checked.
        """
        dtype = self.problem.dtype
        if dtype not in _ceilings:
            _ceilings[dtype] = roofline.measure(self.device, dtype, self.group)
        ceilings = _ceilings[dtype]
        for metric, value in ceilings._asdict().items():
            if value:
                self.rows.add("ceiling", metric, value)

        tasks: dict[tuple[str, str], Task] = {}
        pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        for name, runner in runners.items():
            for metric, task in self.prepare(name, runner, pool).items():
                tasks[name, metric] = task
        timing = params.timing
        taken = self.clock.interleave(
            tasks,
            warmup=timing.warmup,
            samples=timing.samples,
            min_sample_ms=timing.min_sample_ms,
            blocks=self.device.type == "cuda" and self.longest_ms >= LONG_CALL_MS,
        )
        for name in runners:
            graph = tasks.get((name, "forward_kernel"))
            # What was timed is checked too: a graph that replays stale inputs or outputs gives no number.
            if graph is None or not self.check(name, graph.fn.fresh() if graph.fn else None, record=False):
                continue
            for (who, metric), values in taken.items():
                if who == name:
                    for repeat, ms in enumerate(values):
                        self.rows.add(name, metric, ms, repeat)
            cost = self.problem.cost(name)
            for metric, value in roofline.floors(cost, ceilings).items():
                self.rows.add(name, metric, value)
            for metric in ("flops", "read", "written", "sent"):
                self.rows.add(name, metric if metric == "flops" else f"bytes_{metric}", getattr(cost, metric))
        for task in tasks.values():
            if isinstance(task.fn, Graph):
                task.fn.release()

    def prepare(self, name: str, runner: Runner, pool) -> dict[str, Task]:
        """The tasks of one method; none where its copies do not fit, and the rows say so.

        Its weights are rotated over enough copies to miss the L2 cache at every call. What one rank alone cannot do is
        found out by `agree`; an error past that point ends the case, for the other ranks are inside a collective.
        """
        problem, x = self.problem, self.problem.x
        reduces = problem.cost(name).sent > 0
        metrics = ["forward_call", "forward_kernel", "compute_kernel"] + ["reduce_kernel"] * reduces
        count = int(self.group.largest([copies_past_cache(runner.weight_bytes(), self.device)], self.device)[0])
        copies = self.agree(name, lambda: [runner] + [self.copy(name) for _ in range(count - 1)])
        if copies is None:
            return {}

        def forward(one: Runner) -> torch.Tensor:
            return one.reduce(one.local(x))

        def task(calls: Sequence[Callable[[], object]], rounds: int = 1) -> Task:
            graph = Graph(list(calls) * rounds, self.device, pool) if runner.active else None
            return Task(graph, inner=len(calls) * rounds)

        # One round of the rotation says how many make a graph of GRAPH_MS; all ranks must agree on it.
        once = task([lambda one=one: forward(one) for one in copies])
        ms = self.group.largest([min(self.clock.sample(once) for _ in range(3))], self.device)[0]
        self.longest_ms = max(self.longest_ms, ms)
        rounds = max(1, min(MAX_CALLS // count, round(GRAPH_MS / (ms * count))))
        if once.fn is not None:
            once.fn.release()
        if not runner.active:
            return {
                m: Task(None, inner=1 if m == "forward_call" else count * rounds, heavy=m != "reduce_kernel")
                for m in metrics
            }

        turn = itertools.cycle(copies)
        found = {
            "forward_call": Task(lambda: forward(next(turn))),
            "forward_kernel": task([lambda one=one: forward(one) for one in copies], rounds),
            "compute_kernel": task([lambda one=one: one.local(x) for one in copies], rounds),
        }
        if reduces:
            start = runner.local(x)
            partial = start.clone()
            found["reduce_kernel"] = task([lambda: runner.reduce(partial)] * count, rounds)
            # The all-reduce adds in place: without a fresh start the numbers would grow to infinity.
            found["reduce_kernel"].before = lambda: partial.copy_(start)
            found["reduce_kernel"].heavy = False
        return found

    def copy(self, name: str) -> Runner:
        """One more of a method that is already tuned; it finds the choice that the first one made."""
        one = self.problem.build(name, self.group)
        if one.active:
            one.tune(self.problem.x)
        return one

    def profile(self, runners: dict[str, Runner], folder: Path) -> None:
        """One Chrome trace a method and rank, and rank 0's top kernels as rows."""
        for name, runner in runners.items():
            if not runner.active:
                continue
            path = folder / f"{self.problem.case.id}-{name}-rank{self.group.rank}.json.gz"

            def forward(runner: Runner = runner) -> torch.Tensor:
                return runner.reduce(runner.local(self.problem.x))

            top = profile.trace(forward, self.device, path)
            for kernel, ms in top:
                self.rows.add(name, "kernel_time", ms, detail=kernel)


def attempt(fn: Callable[[], Any]) -> tuple[Any, str]:
    """(result, "") or (None, "status: reason") when memory ran out or the machine cannot do it; other errors rise."""
    try:
        return fn(), ""
    except torch.OutOfMemoryError as error:
        return None, f"oom: {first_line(error)}"
    except UnsupportedError as error:
        return None, f"unsupported: {first_line(error)}"
    except RuntimeError as error:
        # The CPU allocator has no exception class of its own.
        if "can't allocate memory" not in str(error):
            raise
        return None, f"oom: {first_line(error)}"


def poison(problem: Problem) -> None:
    """Leaves NaN in the memory that the next output will likely be given, so that an entry never written shows."""
    if problem.device.type == "cuda":
        torch.full(problem.truth.shape, float("nan"), dtype=problem.dtype, device=problem.device)
