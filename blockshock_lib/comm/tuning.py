"""The search for the fastest all-reduce of a size: every way is checked, then all that are right are timed in turns.

All ranks make the same search: what a rank sees counts only once the ranks have agreed on it.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from blockshock_lib.comm import all_reduce, symm
from blockshock_lib.comm.all_reduce import BACKENDS, BLOCKS, Way, size_class
from blockshock_lib.comm.ranks import Ranks
from blockshock_lib.errors import BlockShockError, first_line
from blockshock_lib.kernels.graph import Graph
from blockshock_lib.kernels.tuning.search import Error, leaders, search

SAMPLES = 11
SAMPLE_MS = 0.5
MAX_CALLS = 32
COLUMNS = 4096

Candidate = Callable[[Tensor], Callable[[], Tensor]]  # this rank's x -> a call that adds up the ranks', over and over


def tune(group: Ranks, nbytes: int, device: torch.device) -> None:
    """Measures every way for that size, unless it was measured before, and keeps the times. Collective."""
    reducer, size = all_reduce.reducer(group, device), size_class(nbytes)
    if reducer.why or size in reducer.table or size < symm.PACKET:
        return  # where the ranks share no memory there is one way
    captured = reducer.captured
    try:
        reducer.workspace(group, 1, size // 2, torch.bfloat16)
        with group.raise_together(reducer.device):
            reducer.space.prepare(torch.bfloat16)
    except (BlockShockError, RuntimeError) as error:  # the same on all ranks
        reducer.why = first_line(error)
        return
    ways = [Way(reducer.library), *(Way(name, n) for name, kernel in BACKENDS.items() if kernel for n in BLOCKS)]
    candidates = {way: partial(all_reduce.Reduction, reducer, group, way) for way in ways}
    best = measure(group, device, candidates, size)
    reducer.captured = captured  # the graphs of the search are gone
    if best:
        reducer.table[size] = all_reduce.fastest_first(best)
        if group.rank == 0:
            all_reduce.keep(size, group.world_size, device, best)


def measure(group: Ranks, device: torch.device, candidates: dict[Way, Candidate], nbytes: int) -> dict[Way, float]:
    """The fastest way of each backend that gave the exact sum on every rank, before it was timed and after -> ms."""
    turns, token = itertools.count(), torch.zeros(1, device=device)
    x = exact(group.rank, nbytes, device, 0)
    # As long as a sum takes on NVLink, roughly; the same on every rank.
    calls = max(1, min(MAX_CALLS, round(SAMPLE_MS / (0.01 + nbytes / 200e6))))

    def check(way: Way) -> Error:
        turn = next(turns)
        with group.raise_together(device):
            expected = exact(0, nbytes, device, turn)
            for rank in range(1, group.world_size):
                expected += exact(rank, nbytes, device, turn)
            call = candidates[way](exact(group.rank, nbytes, device, turn))
        with group.raise_together(device):
            wrong = not torch.equal(call(), expected)
        off = math.inf if any(group.max_over_ranks([float(wrong)], device)) else 0.0
        return Error(off, off)

    @contextlib.contextmanager
    def timed(way: Way) -> Iterator[Callable[[], float]]:
        # Calls as a CUDA graph, all ranks starting together.
        with group.raise_together(device):
            call = candidates[way](x)
        with group.raise_together(device):
            graph = Graph([call] * calls, device, keeps=False)

        def sample() -> float:
            group.barrier(token)
            with group.raise_together(device):  # a rank that refused alone would go on to another collective
                ms = graph.ms() / calls
            return group.max_over_ranks([ms], device)[0]

        try:
            sample()  # a graph's first replay also uploads it
            yield sample
        finally:
            graph.release()

    found = leaders(search(candidates, check, timed, kind=lambda way: way.backend, samples=SAMPLES))
    best = {trial.way.backend: trial for trial in reversed(found)}
    return {trial.way: trial.ms for trial in best.values()}


def exact(rank: int, nbytes: int, device: torch.device, turn: int) -> Tensor:
    """[rows, columns] of bf16, small integers whose sums over 8 ranks bf16 holds exactly; other ones at each turn."""
    words = nbytes // 2
    columns = min(words, COLUMNS)
    period, rows = 17, words // columns
    column, row = torch.arange(columns, device=device), torch.arange(period, device=device)[:, None]
    tile = (3 * row + 7 * column + 5 * rank + 11 * turn) % period - 8
    return tile.to(torch.bfloat16)[torch.arange(rows, device=device) % period]
