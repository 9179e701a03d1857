"""The search for the fastest all-reduce of a size: every way is checked, then all that are right are timed in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockshock_lib.comm import all_reduce, choices, symm
from blockshock_lib.comm.all_reduce import BACKENDS, Reducer
from blockshock_lib.comm.choices import Key, Way, size_class
from blockshock_lib.errors import BlockShockError, first_line

if TYPE_CHECKING:
    from blockshock_lib.comm.group import Group

SAMPLES = 11
SAMPLE_MS = 0.5
MAX_CALLS = 32
COLUMNS = 4096

# This rank's x [rows, columns] of bf16 -> a call that adds up the ranks', over and over.
Candidate = Callable[[Tensor], Callable[[], Tensor]]
# (calls, how many of each make a sample) -> the samples of each in milliseconds a call, taken in turns.
Clock = Callable[[list[Callable[[], Tensor]], int], list[list[float]]]


def tune(group: Group, nbytes: int, device: torch.device, clock: Clock | None = None) -> None:
    """Measures every way for that size, unless it was measured before, and keeps the times. Collective.

    Nothing to do where the ranks share no memory: then there is one way.
    """
    one, size = all_reduce.reducer(group, device), size_class(nbytes)
    if one.why or size in one.table or size < symm.PACKET:
        return
    captured = one.captured
    candidates = {way: partial(all_reduce.call, one, group, way) for way in _ways(one, group, size)}
    best = best_of_each(measure(group, device, candidates, size, clock or _graphs(group, device)))
    one.captured = captured  # the graphs of the search are gone
    if one.why or not best:
        return
    one.table[size] = choices.ordered(best)
    if group.rank == 0:
        choices.keep(Key.of(size, group.world_size, device), best)


def measure(
    group: Group, device: torch.device, candidates: dict[Way, Candidate], nbytes: int, clock: Clock
) -> dict[Way, float]:
    """Milliseconds of each candidate that gave the exact sum on every rank, before it was timed and after."""
    good = [way for way, make in candidates.items() if _right(group, device, make, nbytes, turn=0)]
    x = exact(group.rank, nbytes, device, 0)
    # As long as a sum takes on NVLink, roughly; the same on every rank.
    guess_ms = 0.01 + nbytes / 200e6
    with group.together(device):
        calls = [candidates[way](x) for way in good]
    samples = clock(calls, max(1, min(MAX_CALLS, round(SAMPLE_MS / guess_ms))))
    slowest = iter(group.largest([ms for one in samples for ms in one], device))
    times = {way: statistics.median([next(slowest) for _ in one]) for way, one in zip(good, samples, strict=True)}
    return {way: ms for way, ms in times.items() if _right(group, device, candidates[way], nbytes, turn=1)}


def best_of_each(times: dict[Way, float]) -> dict[Way, float]:
    """Of each backend the fastest way."""
    best: dict[str, Way] = {}
    for way in choices.ordered(times):
        best.setdefault(way.backend, way)
    return {way: times[way] for way in best.values()}


def exact(rank: int, nbytes: int, device: torch.device, turn: int) -> Tensor:
    """[rows, columns] of bf16, small integers whose sums over 8 ranks bf16 holds exactly; other ones at each turn."""
    words = nbytes // 2
    columns = min(words, COLUMNS)
    period, rows = 17, words // columns
    column, row = torch.arange(columns, device=device), torch.arange(period, device=device)[:, None]
    tile = (3 * row + 7 * column + 5 * rank + 11 * turn) % period - 8
    return tile.to(torch.bfloat16)[torch.arange(rows, device=device) % period]


def _right(group: Group, device: torch.device, make: Candidate, nbytes: int, turn: int) -> bool:
    with group.together(device):
        expected = exact(0, nbytes, device, turn)
        for rank in range(1, group.world_size):
            expected += exact(rank, nbytes, device, turn)
        call = make(exact(group.rank, nbytes, device, turn))
    with group.together(device):
        wrong = not torch.equal(call(), expected)
    return not any(group.largest([float(wrong)], device))


def _ways(one: Reducer, group: Group, size: int) -> list[Way]:
    """What can run; where our kernels do not on any rank, the library alone."""
    try:
        one.room(group, 1, size // 2, torch.bfloat16)
        with group.together(one.device):
            one.space.prepare(torch.bfloat16)
    except (BlockShockError, RuntimeError) as error:  # the same on all ranks
        one.why = first_line(error)
    return [Way(name, n) for name, backend in BACKENDS.items() if not one.unsupported(name) for n in backend.blocks]


def _graphs(group: Group, device: torch.device) -> Clock:
    """Times calls as CUDA graphs, all ranks starting together."""

    def clock(calls: list[Callable[[], Tensor]], repeats: int) -> list[list[float]]:
        token, stream, pool = torch.zeros(1, device=device), torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graphs, taken = [], [[] for _ in calls]
        for call in calls:
            call()
        torch.cuda.synchronize(device)
        try:
            with group.together(device):
                for call in calls:
                    graphs.append(torch.cuda.CUDAGraph())
                    # NCCL's watchdog thread queries events while we capture; only this thread's calls are captured.
                    with torch.cuda.graph(graphs[-1], pool=pool, stream=stream, capture_error_mode="thread_local"):
                        for _ in range(repeats):
                            call()
            for _ in range(1 + SAMPLES):
                for graph, mine in zip(graphs, taken, strict=True):
                    group.align(token)
                    start.record()
                    graph.replay()
                    end.record()
                    end.synchronize()
                    mine.append(start.elapsed_time(end) / repeats)
            return [mine[1:] for mine in taken]
        finally:
            for graph in graphs:  # NCCL cannot shut down while a captured collective is alive
                graph.reset()

    return clock
