"""What is timed, and its samples: interleaved, the same counts on every rank, the slowest rank is the sample."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from blockshock_lib.comm import Group
from blockshock_lib.engine.study import Check
from blockshock_lib.kernels.graph import Graph, Pool

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
GRAPH_MS = 2.0  # a captured graph runs about this long, so that the few microseconds of its launch do not count
CERTAIN = 4  # calls one by one may take so many times as long as in a graph, for the host's part in them
CHOICE_SAMPLES = 12  # of each way that a work can run, to choose by

Call = Callable[[], Any]
Key = TypeVar("Key")


@dataclass(eq=False)
class Work:
    """One thing to time. Set by the timer: `fn` runs it `inner` times, a sample runs `fn` `count` times."""

    metric: str
    calls: list[Call]  # one for each copy of the method, whose operands the calls rotate over; as many on every rank
    detail: str = ""
    also: str = ""  # another metric whose rows its samples are, too
    eager: bool = False  # timed as an eager user calls it, not as a CUDA graph
    host: bool = False  # timed is only the host's part of such calls, made one after another without waiting
    before: Call | None = None  # run before each sample, outside the timed region
    heavy: bool = False  # whether it multiplies, and leads a method's turn: a long one needs its lead-in
    recheck: Callable[[Any], Iterable[Check]] | None = None  # output (None on a rank that stands by) -> checks of it
    traced: bool = False
    owners: list[Any] = field(default_factory=list)  # objects whose attributes are put back after a capture
    release: Call | None = None  # frees what the calls made for themselves, once all is timed
    active: bool = True
    fn: Call | None = None
    inner: int = 1
    count: int = 1

    def restore(self) -> Call:
        # A layer may make its packed copies anew while a graph is captured, and drop those that the graph reads.
        held = [(vars(own), dict(vars(own))) for own in self.owners]

        def restore() -> None:
            for mine, had in held:
                mine.update(had)

        return restore


class Timer:
    """Times works on one rank, in step with the others. A sample makes as many calls as take `min_sample_ms`, at most
    MAX_CALLS. `capture`: whether kernels are timed in CUDA graphs; ranks that are threads cannot be captured.
    """

    def __init__(self, device: torch.device, group: Group, min_sample_ms: float = 0.0, capture: bool = True):
        self.device, self.group, self.min_sample_ms = device, group, min_sample_ms
        self.cuda = device.type == "cuda"
        self.token = torch.zeros(1, device=device)
        self.pool = Pool(device) if self.cuda and capture else None
        self.longest_ms = 0.0  # a call of the heavy works that were made ready so far

    def ready(self, work: Work) -> None:
        if work.eager:
            turn = itertools.cycle(work.calls)
            work.fn = lambda: next(turn)()
            return
        if self.pool is not None and self._lasts(work):
            return self._capture(work, 1)
        self._capture(work, 1)
        # One round of the rotation says how many make a graph of GRAPH_MS; all ranks must agree on it.
        ms = self._slowest(work, 3)
        if work.heavy:
            self.longest_ms = max(self.longest_ms, ms)
        count = len(work.calls)
        rounds = max(1, min(MAX_CALLS // count, round(GRAPH_MS / (ms * count))))
        if rounds > 1:
            self.release(work)
            self._capture(work, rounds)

    def _lasts(self, work: Work) -> bool:
        # Whether one round, called one by one, is so long that its graph needs no more: to capture twice takes long.
        plain = Work("", [], fn=lambda: [call() for call in work.calls], active=work.active)
        if work.active and work.before is not None:
            work.before()
        ms = self._slowest(plain, 2)
        if work.heavy:
            self.longest_ms = max(self.longest_ms, ms / len(work.calls))
        return ms >= CERTAIN * GRAPH_MS

    def _slowest(self, work: Work, samples: int) -> float:
        return self.group.max_over_ranks([min(self.sample(work) for _ in range(samples))], self.device)[0]

    def _capture(self, work: Work, rounds: int) -> None:
        calls = list(work.calls) * rounds
        work.inner = len(calls)
        if work.active:
            if work.before is not None:
                work.before()
            device = self.device if self.pool is not None else torch.device("cpu")  # where nothing is captured
            work.fn = Graph(calls, device, self.pool, work.recheck is not None, work.restore())

    def release(self, work: Work) -> None:
        if isinstance(work.fn, Graph):
            work.fn.release()
        work.fn = None

    def output(self, work: Work) -> object:
        if not work.active:
            return None
        return work.fn.fresh() if isinstance(work.fn, Graph) else work.fn()

    def sample(self, work: Work) -> float:
        """Milliseconds a call, on this rank; 0 where the rank stands by."""
        if work.before is not None and work.active:
            work.before()
        self.group.barrier(self.token)
        if self.cuda:
            torch.cuda.synchronize(self.device)
        if not work.active:
            return 0.0
        calls = work.count * work.inner
        if self.cuda and not work.host:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(work.count):
                work.fn()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / calls
        start = time.perf_counter()
        for _ in range(work.count):
            work.fn()
        return (time.perf_counter() - start) * 1e3 / calls

    def interleave(self, works: Sequence[Work], warmup: int, samples: int, blocks: bool = False) -> list[list[float]]:
        """Samples of all works in turns (A B C A B C), so that drift cancels; ms a call, of the slowest rank.

        With `blocks`, the turns are longer: each heavy work leads in untimed, then gives BLOCK samples. The warm-up's
        time decides how many calls make a sample of at least `min_sample_ms`; the ranks agree on it, for a collective
        that one rank calls more often than the others would hang.
        """
        if not works:
            return []
        guess = [min([self.sample(work) for _ in range(warmup)]) for work in works]
        slow = self.group.max_over_ranks(guess, self.device)
        for work, ms in zip(works, slow, strict=True):
            needed = calls_for(ms * work.inner, self.min_sample_ms, MAX_CALLS // work.inner)
            work.count = HOST_CALLS if work.host else needed
        block = BLOCK if blocks else 1
        mine: list[list[float]] = [[] for _ in works]
        for done in range(0, samples, block):
            for work, ms, times in zip(works, slow, mine, strict=True):
                if blocks and work.heavy:  # untimed, as many calls on every rank
                    for _ in range(calls_for(ms * work.inner * work.count, LEAD_IN_MS, 1000)):
                        self.sample(work)
                times += [self.sample(work) for _ in range(min(block, samples - done))]
        flat = iter(self.group.max_over_ranks([ms for times in mine for ms in times], self.device))
        return [[next(flat) for _ in times] for times in mine]

    def fastest(self, works: Mapping[Key, Work]) -> Key:
        """The key of the work with the least median; the same on all ranks."""
        for work in works.values():
            self._capture(work, 1)
            work.heavy = True  # led in, so that each is timed at its own clocks: the ways differ by less
        taken = self.interleave(list(works.values()), warmup=1, samples=CHOICE_SAMPLES, blocks=self.cuda)
        for work in works.values():
            self.release(work)
        medians = map(statistics.median, taken)
        return min(zip(medians, range(len(works)), works, strict=True))[2]


def calls_for(ms: float, min_ms: float, most: int) -> int:
    return max(1, min(most, math.ceil(min_ms / ms) if ms > 0 else 1))


def copies_past_cache(operand_bytes: int, device: torch.device) -> int:
    """Copies of an operand to rotate over, so that none is found in L2: three caches full, for it is no strict LRU."""
    if device.type != "cuda" or not operand_bytes:
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_CALLS, math.ceil(3 * cache / operand_bytes))
