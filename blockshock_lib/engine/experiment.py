"""One case on one rank: check, weigh, time, profile. Every rank runs this in step; the rows are all ranks' own."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from blockshock_lib.comm import Group
from blockshock_lib.engine import admission, capacity, correctness, curve, profile, roofline, ways, work
from blockshock_lib.engine.protocol import Problem, Runner
from blockshock_lib.engine.tasks import TaskMaker
from blockshock_lib.engine.timing import LONG_CALL_MS, Clock, Graph, Task, copies_past_cache, tensors
from blockshock_lib.engine.trial import Rows, Trial
from blockshock_lib.engine.work import Work
from blockshock_lib.params import Params
from blockshock_lib.records import METRICS

PER_MS = {"ms": 1.0, "us": 1e3}

_ceilings: dict[torch.dtype, roofline.Ceilings] = {}


def measure(
    problem: Problem,
    params: Params,
    *,
    group_index: int,
    traces: Path,
    last: bool,
    smallest: bool = False,
    first: bool = True,
) -> list[dict]:
    """Runs every method of `problem.case` and returns the rows of the case, the same on every rank.

    A method that cannot run, does not fit or fails its check gets a row that says so, and no time.

    Args:
        problem: the case, its truth and its methods, on this rank's device.
        group_index: which fresh group of processes this is; traces and loss curves are the first one's.
        traces: folder for the Chrome traces.
        last: whether this is the plan's last case, the one that `profile: last` traces.
        smallest: whether this is the optimizer's first case, the one whose loss curve is taken.
        first: whether this is the weight's first case; what no batch changes is timed there.
    """
    trial = Trial(problem, Group.of(), Rows())
    with torch.no_grad():
        admission.prepare(trial, params.learning_rates)
        admitted = {name: admission.admit(trial, name, params.learning_rates) for name in problem.case.methods}
        runners = {name: runner for name, runner in admitted.items() if runner is not None}
        del admitted
        if trial.phase.train:
            problem.forget()
            if group_index == 0 and smallest:
                curve.draw(trial, runners, params)
            if group_index == 0 and last:
                capacity.largest(trial, runners)
        if trial.phase.time and runners:
            release_cache(trial.device)
            session = Session(trial, params, first)
            session.time(runners)
            if group_index == 0 and (params.profile == "all" or (params.profile == "last" and last)):
                session.profile(runners, traces)
    return trial.rows.rows


def release_cache(device: torch.device) -> None:
    """Graphs have memory of their own: what the checks left in the allocator's cache would be missing there."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


class Session:
    """The timed part of a case: its tasks, their samples, and the check of what was timed."""

    def __init__(self, trial: Trial, params: Params, first: bool):
        self.trial, self.timing, self.first = trial, params.timing, first
        self.problem, self.group, self.device, self.rows = trial.problem, trial.group, trial.device, trial.rows
        self.clock = Clock(self.device, self.group)
        self.maker = TaskMaker(self.clock, self.timing.min_sample_ms)
        self.reduced: str | None = None  # the method with which each way to add up is timed

    def time(self, runners: dict[str, Runner]) -> None:
        """Everything that the phase times, all methods interleaved; then the graphs' outputs checked."""
        dtype = self.problem.dtype
        if dtype not in _ceilings:
            _ceilings[dtype] = roofline.measure(self.device, dtype, self.group)
        for metric, value in _ceilings[dtype]._asdict().items():
            if value:
                self.rows.add("ceiling", metric, value)
        if shared := self.group.shared_bytes(self.device):
            for rank in range(self.group.world_size):  # of one size on every rank
                self.rows.add("machine", "shared_bytes", shared, rank=rank)
        spares = self.spares(runners)
        works: dict[tuple[str, str], Work] = {}
        tasks: dict[tuple[str, str], Task] = {}
        for name, runner in runners.items():
            found = self.works(name, runner, spares)
            works |= {(name, key): one for key, one in found.items()}
            tasks |= {(name, key): self.maker.task(runner, one) for key, one in found.items()}
        taken = self.clock.interleave(
            tasks,
            warmup=self.timing.warmup,
            samples=self.timing.samples,
            min_sample_ms=self.timing.min_sample_ms,
            blocks=self.device.type == "cuda" and self.maker.longest_ms >= LONG_CALL_MS,
        )
        for name, runner in runners.items():
            mine = {key: task for (who, key), task in tasks.items() if who == name}
            # What was timed is checked too: a graph that replays stale inputs or outputs gives no number.
            if mine and self.still_right(name, runner, mine, works):
                self.report(name, runner, {key: taken[name, key] for key in mine}, works)
        for task in tasks.values():
            if isinstance(task.fn, Graph):
                task.fn.release()
        for one in works.values():
            if one.release is not None:
                one.release()
        for runner in runners.values():
            for weight in runner.weights:
                weight.grad = None

    def spares(self, runners: dict[str, Runner]) -> work.Spares | None:
        if not self.trial.phase.train:
            return None
        most = max((weight.numel() for one in runners.values() for weight in one.weights), default=1)
        return work.Spares(most, self.problem.dtype, self.device)

    def works(self, name: str, runner: Runner, spares: work.Spares | None) -> dict[str, Work]:
        """What is timed of one method; nothing where its copies do not fit, and the rows say so.

        Its weights are rotated over enough copies to miss the L2 cache at every call. What one rank alone cannot do is
        found out by `agree`; an error past that point ends the case, for the other ranks are inside a collective.
        """
        sizes = [copies_past_cache(runner.weight_bytes(), self.device)]
        count = int(self.group.largest(sizes, self.device)[0])
        copies = self.trial.agree(name, lambda: [runner] + [self.copy(name) for _ in range(count - 1)])
        if copies is None:
            return {}
        if work.has_chunks(self.problem, runner):
            self.choose_chunks(name, runner, copies)
        if self.trial.phase.train and work.has_orders(self.problem, name):
            self.choose_order(runner, copies)
        found = work.of(self.problem, copies, name, self.trial.phase, spares)
        if self.trial.phase.backward:
            return found
        found |= ways.of(self.problem, copies, name)
        if self.reduced is None and (each := ways.reductions(self.problem, runner, name)):
            self.reduced, found = name, found | each  # as large in every method that adds up: timed once
            found["reduce_kernel"].detail = next(iter(each.values())).detail
        if self.first:
            pack = partial(ways.compressions, self.problem, name, self.group)
            found |= self.trial.agree(name, pack, "compress_by_kernel") or {}
        return found

    def choose_order(self, runner: Runner, copies: list[Runner]) -> None:
        """Has dX's collective overlap dW where a few samples of the backward say that it is faster; on all ranks alike.

        What is then reported of both orders is measured anew: the samples that chose are not those that are shown.
        """
        orders = {order: work.backward(self.problem, copies, order) for order in work.ORDERS}
        order = self.maker.fastest(runner, orders)
        for one in copies:
            one.overlap = order

    def choose_chunks(self, name: str, runner: Runner, copies: list[Runner]) -> None:
        """Has the forward cut its batch as a few samples say is fastest, on all ranks alike; chosen and reported as
        `choose_order` does. A piece has its own fastest product, and its own fastest way to be added up.
        """
        for count in sorted(work.CHUNKS, reverse=True):  # uncut in the end
            for one in copies:
                one.chunks = count
            if not admission.tune(self.trial, name, runner, "forward_chunks_kernel"):
                for one in copies:
                    one.chunks = 1
                return
            for one in copies:
                if one.active:
                    one.tune(self.problem.x)  # finds the choice that the first one made
        count = self.maker.fastest(runner, {n: work.chunked(self.problem, copies, n) for n in work.CHUNKS})
        for one in copies:
            one.chunks = count

    def copy(self, name: str) -> Runner:
        """One more of a method that is already tuned; it finds the choice that the first one made."""
        one = self.problem.build(name, self.group)
        if one.active:
            one.tune(self.problem.x)
            if self.trial.phase.backward:
                one.tune_dx(self.problem.dy)
        return one

    def still_right(self, name: str, runner: Runner, mine: dict[str, Task], works: dict) -> bool:
        """The outputs of the graphs that keep them: y and dX by the gate, gradients as they were when admitted."""
        for key, task in mine.items():
            if not works[name, key].keeps:
                continue
            out = task.fn.fresh() if task.fn is not None else None
            found = out if isinstance(out, tuple) else (out,)
            made = dict(itertools.zip_longest(("y", "dx")[: 1 + (not key.startswith("forward"))], found[:2]))
            if not admission.check_outputs(self.trial, name, made, record=False):
                return False
            if self.trial.phase.train and key == "step_kernel":
                again = runner.backward(self.problem.dy, self.problem.x)[1:] if runner.active else ()
                pairs = zip(tensors(found[2:]), tensors(again), strict=True) if runner.active else ()
                said = next(filter(None, itertools.starmap(correctness.strays, pairs)), "")
                if not self.trial.accept(name, said and f"a gradient of the timed step {said}"):
                    return False
        return True

    def report(self, name: str, runner: Runner, taken: dict[str, list[float]], works: dict) -> None:
        """Samples, floors and the forward's least work, as rows."""
        phase, cost = self.trial.phase, self.problem.cost(name)
        for key, values in taken.items():
            one = works[name, key]
            for metric, (repeat, ms) in itertools.product(filter(None, (key.split()[0], one.ways)), enumerate(values)):
                self.rows.add(name, metric, ms * PER_MS[METRICS[metric]], repeat, one.detail)
        floors = roofline.phase_floors(self.problem, name, phase, _ceilings[self.problem.dtype], runner.chunks)
        for metric, value in floors.items():
            self.rows.add(name, metric, value)
        for metric in ("flops", "read", "written", "sent"):
            self.rows.add(name, metric if metric == "flops" else f"bytes_{metric}", getattr(cost, metric))

    def profile(self, runners: dict[str, Runner], folder: Path) -> None:
        """One Chrome trace a method and rank of the forward, pass or step, and rank 0's top kernels as rows."""
        release_cache(self.device)
        for name, runner in runners.items():
            if not runner.active:
                continue
            path = folder / f"{self.problem.case.id}-{name}-rank{self.group.rank}.json.gz"
            for kernel, ms in profile.trace(self.whole(name, runner), self.device, path):
                self.rows.add(name, "kernel_time", ms, detail=kernel)

    def whole(self, name: str, runner: Runner) -> Callable[[], object]:
        """What a trace shows: all that the phase does once."""
        phase = self.trial.phase
        found = work.of(self.problem, [runner], name, phase, None)
        key = "step_kernel" if phase.train else "pass_kernel" if phase.backward else "forward_kernel"
        return found[key].calls[0]
