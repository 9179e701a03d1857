"""One case on one rank: check, weigh, sample, time, profile. Every rank runs this in step, with the same rows."""

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blockshock_lib.comm import Group, local
from blockshock_lib.engine import memory, power, profile, roofline
from blockshock_lib.engine.case_run import NOT_WEIGHED, CaseRun, Refused
from blockshock_lib.engine.study import Problem, Runner, Study
from blockshock_lib.engine.timing import TURNS, LeadIn, Timer, Work, copies_past_cache
from blockshock_lib.report.axes import TWIN

Row = dict[str, Any]

_ceilings: dict[torch.dtype, roofline.Ceilings] = {}


def measure(
    problem: Problem,
    params: Any,
    study: Study,
    traces: Path | None = None,
    emit: Callable[[list[Row]], None] | None = None,
    done: Sequence[Row] = (),
) -> list[Row]:
    """Runs every method of `problem.case` and returns the rows of the case, the same on every rank. A method that
    cannot run, does not fit or fails its check gets a row that says so, and no time. `emit` takes the rows of samples
    as they come, on rank 0; `done`: those of a case that was cut off: samples go on behind them, without what failed.
    """

    def ranked(group: Group) -> list[Row]:
        own = copy.copy(problem)
        own.group = group
        run = CaseRun(own, study.metrics)
        timing = params.timing if study.phases[problem.case.phase].timed else None
        with torch.no_grad():
            Session(run, timing, study.twin, traces, emit if group.rank == 0 else None, done).whole()
        return run.rows

    if not problem.case.emulated:
        return ranked(problem.group)
    return local.run(problem.case.world_size, ranked)[0]


class Session:
    """`twin`: of which the one in the case is built, checked and timed a second time, as the method TWIN."""

    def __init__(
        self, run: CaseRun, timing: Any, twin: tuple, traces: Path | None, emit: Callable | None, done: Sequence[Row]
    ):
        self.run, self.timing, self.traces, self.emit, self.done = run, timing, traces, emit, done
        self.problem, self.device = run.problem, run.device
        gone = {row["method"] for row in done if (row["metric"], row["status"]) == ("check", "failed")}
        self.names = [name for name in self.problem.case.methods if name not in gone]
        again = [name for name in self.names if timing and name in twin][:1]
        self.names += [TWIN] * len(again)
        self.methods = {name: name for name in self.names} | dict.fromkeys([TWIN], *again)  # by the names of their rows
        self.checked: dict[str, bool] = {}  # name -> whether it may be timed

    def whole(self) -> None:
        for names in self.turns():
            runners = {}
            for name in names:
                if self.checked.get(name, True):
                    make = self.admit if name not in self.checked else self.build
                    runners[name] = self.run.attempt(name, partial(make, name))
                    self.checked[name] = runners[name] is not None
            runners = {name: runner for name, runner in runners.items() if runner is not None}
            self.problem.forget()
            for name in list(runners):
                if self.run.attempt(name, partial(self.sample, name, runners[name])) is None:
                    self.checked[name] = False
                    del runners[name]
            if self.timing and runners:
                self.time(runners)
            del runners

    def turns(self) -> Iterator[list[str]]:
        """The methods measured beside each other: all, or where they do not fit, one, with the first between them."""
        names = self.names
        needed = [float(self.problem.needed(self.methods[name])) for name in names]
        free = memory.free(self.device)
        if self.device.type == "cpu":
            free /= self.problem.case.world_size  # the ranks share it
        *needed, short = self.max([*needed, -free])
        if len(names) == 1 or sum(needed) <= -short or not self.timing:
            yield names
            return
        detail = f"{names[0]} repeated between: {sum(needed):.4g} B needed, {-short:.4g} B free"
        self.run.add("machine", "one_at_a_time", 1.0, detail=detail)
        for name in names[1:]:
            yield names[:1]
            release_cache(self.device)
            yield [name]
            release_cache(self.device)

    def max(self, values: list[float]) -> list[float]:
        return self.run.group.max_over_ranks(values, self.device)

    def build(self, name: str) -> Runner:
        runner = self.run.agree(partial(self.problem.build, self.methods[name]))
        self.run.tune(runner)
        return runner

    def admit(self, name: str) -> Runner:
        """A method that was checked and weighed; Refused where it may not go on."""
        run = self.run
        if reason := self.problem.unsupported(self.methods[name]):
            raise Refused("unsupported", reason)
        run.agree(partial(self.problem.prepare, self.methods[name]))
        run.meter, run.peak = memory.Peak(self.device), NOT_WEIGHED
        runner = self.build(name)
        checked = 0.0
        for check in runner.checks(run):
            run.gate(name, check)
            checked += check.made is not None
        if not self.max([checked])[0]:
            raise Refused("failed", "nothing of it was checked")
        run.add(name, "check", 1.0)
        if name == TWIN:
            return runner
        held = runner.weigh()
        for metric, value in zip(held, self.max(list(held.values())), strict=True):
            run.add(name, metric, value)
        if run.peak is None:
            why = "the ranks are threads of one process" if self.problem.case.emulated else "the CPU's allocator"
            run.miss(name, "unsupported", f"{why} keeps no peak", "peak_bytes")
        elif run.peak >= 0:
            run.add(name, "peak_bytes", self.max([run.peak])[0])
        return runner

    def sample(self, name: str, runner: Runner) -> bool:
        if name != TWIN and self.run.once("samples", name):
            done = [row for row in self.done if row["method"] == name]
            self.run.rows += done
            for one in runner.samples(self.run, done):
                self.run.add(name, one.metric, self.max([one.value])[0], repeat=one.step, detail=one.detail)
                if self.emit is not None:
                    self.emit(self.run.rows[-1:])
        return True

    def time(self, runners: dict[str, Runner]) -> None:
        run = self.run
        run.begin("")  # the ceilings are no method's
        release_cache(self.device)
        timing, emulated = self.timing, self.problem.case.emulated
        meter = None if emulated or self.device.type == "cpu" else power.meter(self.device.index or 0)
        bounds = timing.lead_in_s, timing.lead_in_most_s
        run.timer = Timer(self.device, run.group, timing.min_sample_ms, not emulated, bounds, meter)
        ceilings = self.ceilings()
        works: dict[str, list[Work]] = {}
        for name, runner in runners.items():
            works[name] = self.works(name, runner)
            for work in works[name]:  # before the next method's: what a work reads may lie in a workspace of all
                run.timer.ready(work)
        every = [work for mine in works.values() for work in mine]
        # A fresh group of processes goes on where the last one stopped.
        first = self.problem.repeat * TURNS
        turns = {name: mine for name, mine in works.items() if mine}
        times = run.timer.interleave(list(turns.values()), timing.warmup, timing.samples, first)
        for place, name in enumerate(turns):
            self.numbered(name, "turn", (place - first) % len(turns), f"of {len(turns)}")
        for name, mine in works.items():
            # What was timed is checked too: a graph that replays stale inputs or outputs gives no number.
            own = [work for work in mine if not work.aside]
            if own and run.attempt(name, partial(self.recheck, name, own)):
                lines = (work for work in mine if work.aside)
                own += [work for work in lines if run.attempt(name, partial(self.recheck, name, [work]), work.metric)]
                self.report(name, own, times, runners[name].facts(ceilings))
        run.begin("")  # nor is what is left to do
        for work in every:
            run.timer.release(work)
            if work.release is not None:
                work.release()
        for runner in runners.values():
            runner.finish()
        if self.traces is not None:
            self.trace(works, self.traces)

    def ceilings(self) -> roofline.Ceilings:
        dtype, group = self.problem.dtype, self.run.group
        if dtype not in _ceilings:
            _ceilings[dtype] = roofline.measure(self.run.timer, dtype)
        if self.run.once("ceilings"):
            for metric, value in _ceilings[dtype]._asdict().items():
                if value:
                    self.run.add("ceiling", metric, value)
            if shared := group.shared_bytes(self.device):
                for rank in range(group.world_size):  # of one size on every rank
                    self.run.add("machine", "shared_bytes", shared, rank=rank)
        return _ceilings[dtype]

    def works(self, name: str, runner: Runner) -> list[Work]:
        # Over enough copies to miss the L2 cache at every call; nothing where they do not fit. What one rank alone
        # cannot do is found out by `agree`; an error past that point ends the case.
        count = int(self.max([copies_past_cache(runner.operand_bytes(), self.device)])[0])
        more = partial(self.run.agree, lambda: [runner] + [self.tuned(self.methods[name]) for _ in range(count - 1)])
        copies = self.run.attempt(name, more)
        works = runner.works(self.run, copies) if copies else []
        for work in works[:1]:
            work.begin = partial(self.run.begin, name)
        for work in works:
            work.active = runner.active
        return works

    def tuned(self, method: str) -> Runner:
        runner = self.problem.build(method)
        if runner.active:
            runner.tune()
        return runner

    def recheck(self, name: str, works: list[Work]) -> bool:
        for work in works:
            if work.recheck is not None:
                for check in work.recheck(self.run.timer.output(work)):
                    self.run.gate(name, check, record=False)
        return True

    def report(self, name: str, works: list[Work], times: dict[Work, list[float]], facts: dict[str, float]) -> None:
        if name != TWIN and self.run.once("facts", name):
            for metric, value in facts.items():
                self.run.add(name, metric, value)
        for work in works:
            for metric in (work.metric, *work.also):
                for ms in times[work]:
                    self.numbered(name, metric, ms, work.detail)
            for lead in work.led:
                self.led(name, f"{work.metric} {work.detail}".strip(), lead)

    def led(self, name: str, slot: str, lead: LeadIn) -> None:
        """A lead-in, and what the GPUs drew at its end: each rank's that worked, and the energy of all for one call."""
        self.numbered(name, "lead_in", lead.seconds, f"{slot}: {lead.state}")
        working = {rank: drawn for rank, drawn in enumerate(lead.drawn) if drawn[2]}
        for rank, (watts, mhz, _) in working.items():
            self.numbered(name, "power", watts, slot, rank)
            self.numbered(name, "sm_clock", mhz, slot, rank)
        if working:
            self.numbered(name, "energy", sum(joules for *_, joules in working.values()), slot)

    def numbered(self, name: str, metric: str, value: float, detail: str = "", rank: int = -1) -> None:
        """A row whose `repeat` goes on from the last one of its kind."""
        key = name, metric, detail, rank
        self.run.add(name, metric, value, repeat=self.run.taken[key], detail=detail, rank=rank)
        self.run.taken[key] += 1

    def trace(self, works: dict[str, list[Work]], folder: Path) -> None:
        release_cache(self.device)
        rank = self.run.group.rank
        for name, mine in works.items():
            call = next((work.calls[0] for work in mine if work.traced and work.active), None)
            if call is None or name == TWIN or not self.run.once("trace", name):
                continue
            if rank and self.problem.case.emulated:  # a process has one profiler: this thread only keeps step
                for _ in range(profile.CALLS + 1):
                    call()
                continue
            path = folder / f"{self.problem.case.id}-{name}-rank{rank}.json.gz"
            for kernel, ms in profile.trace(call, self.device, path):
                self.run.add(name, "kernel_time", ms, detail=kernel)


def release_cache(device: torch.device) -> None:
    """Graphs have memory of their own: what the checks left in the allocator's cache would be missing there."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
