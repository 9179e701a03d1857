"""The one kernel of all strategies, and the parts of a step over ranks, each measured alone: what a rank does itself,
what travels, and the merges.
"""

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from blockshock_lib.comm import Group
from blockshock_lib.comm.pull import Rows, count, row_bytes
from blockshock_lib.engine import memory
from blockshock_lib.engine.case_run import CaseRun
from blockshock_lib.engine.study import Problem, Runner, Sample
from blockshock_lib.engine.timing import Work
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.attention import backends, tune
from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.kernels.attention.merge import absorb
from blockshock_lib.studies.attention import works
from blockshock_lib.studies.attention.works import REPEATS, Backward


def kernel(problem: Problem) -> str:
    """The backend of all strategies and of one rank alone: of those with a backward of their own, that take parts of a
    sequence, which have no pattern, the one that "auto" takes on rank 0 once it has searched. Another rank may not have
    read what was kept. Collective.
    """
    mine = ""
    try:
        problem.tune()
        if not problem.group.rank:
            call = Call(problem.q, problem.k, problem.v, None, problem.lists, problem.scale)
            mine = backends.name_of(backends.explicit("auto", call))
    finally:  # the others wait for it
        first = problem.group.gather_objects(mine)[0]
        tune.forget()
    if not first:
        raise UnsupportedError("rank 0 has found no kernel")
    return first


class Replay:
    """Stands for the group of a layer over ranks. The first run is the real one; in each later one nothing travels: a
    rank finds at once what it was given in the first. `again` moves all of that, and does nothing else.
    """

    connected = False  # no pass of it is counted

    def __init__(self, group: Group):
        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.kept: list[tuple[Callable[[], Sequence[Tensor]], Sequence[Tensor]]] = []  # what moves it again; what came
        self.sent = 0  # bytes that this rank gives to others in a step
        self.whole, self.at = False, 0

    def start_all_to_all(self, give: Sequence[Tensor], take: Sequence[Tensor]) -> Callable[[], None]:
        if not self.whole:
            self.kept.append((lambda: self.group.start_all_to_all(give, take)() or take, take))
            self.sent += sum(x.nbytes for peer, x in enumerate(give) if peer != self.rank)
            return self.group.start_all_to_all(give, take)
        for mine, then in zip(take, self._then([x.shape for x in take]), strict=True):
            if mine._base is None:
                mine.set_(then)  # as if it had come there: not even a copy
            else:
                mine.copy_(then)
        return lambda: None

    def start_pull(self, x: Tensor, give: Sequence[Rows], want: Sequence[Rows], *how: Any) -> Callable[[], Tensor]:
        if self.whole:
            (then,) = self._then([torch.Size((sum(map(count, want)), *x.shape[1:]))])
            return lambda: then
        x = x.detach()  # which moves again where gradients are on

        def move() -> list[Tensor]:
            return [self.group.start_pull(x, give, want, *how)()]

        self.kept.append((move, made := move()))
        self.sent += row_bytes(x) * sum(count(rows) for peer, rows in enumerate(give) if peer != self.rank)
        return lambda: made[0]

    def shared(self, *size: Any) -> None:
        """What travels again must lie in memory of its own."""

    def _then(self, shapes: list[torch.Size]) -> Sequence[Tensor]:
        _, then = self.kept[self.at % len(self.kept)]
        if shapes != (had := [x.shape for x in then]):
            raise RuntimeError(f"{shapes} was asked of a step whose first run had {had}")
        self.at += 1
        return then

    def again(self) -> None:
        for move, _ in self.kept:
            move()


def quiet(runner: Runner) -> Runner:
    """`runner` with the communication left out, after one real step. Collective."""
    if not hasattr(runner, "silent"):
        runner.silent, group = copy.copy(runner), Replay(runner.layer.group)
        runner.silent.layer = copy.copy(runner.layer)
        runner.silent.layer.group = group
        Backward(runner.silent)()
        group.whole = True
    return runner.silent


def samples(runner: Runner) -> Iterator[Sample]:
    """Of a method over ranks how its own work is balanced, and the bytes that a rank sends; of each the peak memory by
    rank of the step that was checked.
    """
    group = runner.problem.group
    if runner.layer is not None:
        own = quiet(runner)
        step = [works.clocked(runner.problem.device, works.step(own))[0] for _ in range(REPEATS + 1)]
        every = group.gather_objects(statistics.median(step[1:]))
        yield Sample("balance", statistics.mean(every) / max(every))
        why = (
            group.unshared(runner.problem.device) if runner.method.strategy in ("pull", "gather") else "by NCCL or gloo"
        )
        yield Sample("sent_bytes", own.layer.group.sent, detail=f"sent: {why}" if why else "read")
    told = group.gather_objects(runner.peaks)
    # Of a rank's own GPU, or all it used.
    every = told[0] if len(told[0]) > 1 else [peak for one in told for peak in one]
    for rank, peak in enumerate(every):
        if peak is not None:
            yield Sample("rank_peak_bytes", peak, rank, f"rank {rank}")
    if runner.problem.device.type == "cuda":
        yield Sample("memory_bytes", memory.total(runner.problem.device))


def sent(ranks: int, fn: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """What fn gives, and the bytes that this rank's collectives of `ranks` send for it, by the algorithm of a ring. On
    all threads: with gloo a hook's later collectives start on another, when the first are done.
    """
    found = []

    def counted(real: Callable, place: int, share: float, *args: Any, **options: Any) -> Any:
        found.append(args[place].nbytes * share * (ranks - 1))
        return real(*args, **options)

    reduce, gather = partial(counted, dist.all_reduce, 0, 2 / ranks), partial(counted, dist.all_gather, 1, 1.0)
    with mock.patch.multiple(dist, all_reduce=reduce, all_gather=gather):
        return fn(), sum(found)


def parts(run: CaseRun, copies: Sequence[Runner]) -> list[Work]:
    """The works of the parts of a step, as an eager user pays them; over copies that do not fit in the cache, as the
    step itself.
    """
    runner, own = copies[0], [run.agree(partial(quiet, one)) for one in copies]

    def drop() -> None:
        for one in copies:
            del one.silent

    found = [Work("own_call", [works.step(one) for one in own], eager=True, release=drop)]
    found.append(Work("moved_call", [one.layer.group.again for one in own], eager=True))
    group, method = runner.problem.group, runner.method
    if sources := {"ring": range(group.world_size), "gather": (group.rank, "needed")}.get(method.strategy):
        seen = [runner.layer.part(source, *runner.operands, 1.0) is not None for source in sources]
        out = torch.zeros_like(runner.dout, dtype=torch.float32)
        lse, level = (torch.zeros_like(out[..., 0]) for _ in range(2))

        def merges() -> None:
            for _ in range(sum(seen) - 1):  # of each part with those before it
                absorb(out, lse, runner.dout, level)

        found.append(Work("merged_call", [merges], eager=True))
    return found
