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
from blockshock_lib.engine.power import Meter, Reading
from blockshock_lib.engine.study import Check
from blockshock_lib.kernels.graph import Graph, Pool

# A sample never repeats its call more often: an all-reduce timed in place multiplies its tensor by the number of ranks
# each time, and bf16 holds 127 doublings. (Beyond, and in fp16, it times Inf: as fast, and reset before each sample.)
MAX_CALLS = 64

# Every method is timed at its own clocks, not at those that the one before it left: at each of its turns its work runs
# untimed until the power that it draws in a window is the same, within LEVEL, as in the window before it, or as that at
# which it levelled at its last turn; then its share of the samples follows. An H200 renews its energy counter ten times
# a second only: a window holds two changes of it. A read may take milliseconds: the GPU has several times as much to do
# meanwhile, or it would idle and be measured idle. On H200s the medians of two turns of one graph lie 3 to 7% apart,
# while the samples within a turn agree far better: the number of turns, not of samples, narrows what a run can claim.
TURNS = 4
WINDOW_S = 0.18
LEVEL = 0.03
PIECE_MS, PIECE_READS = 2.0, 5  # calls between two looks at the clock: at least so long, and so many reads

GRAPH_MS = 2.0  # a captured graph runs about this long, so that the few microseconds of its launch do not count
CHOICE_SAMPLES = 12  # of each way that a work can run, to choose by

Call = Callable[[], Any]
Key = TypeVar("Key")


@dataclass(frozen=True)
class LeadIn:
    """How long a work ran untimed before its samples, how that ended, and what each rank's GPU drew in the end: watts,
    SM clock in MHz and joules a call; empty without a reading on every rank.
    """

    seconds: float
    state: str
    drawn: tuple[tuple[float, float, float], ...] = ()


@dataclass(eq=False)
class Work:
    """One thing to time. Set by the timer: `fn` runs it `inner` times, a sample runs `fn` `count` times."""

    metric: str
    calls: list[Call]  # one for each copy of the method, whose operands the calls rotate over; as many on every rank
    detail: str = ""
    also: tuple[str, ...] = ()  # other metrics whose rows its samples are, too
    eager: bool = False  # timed as an eager user calls it, not as a CUDA graph
    before: Call | None = None  # run before each sample, outside the timed region
    heavy: bool = False  # whether it leads in for itself and for what follows it in the method's turn
    recheck: Callable[[Any], Iterable[Check]] | None = None  # output (None on a rank that stands by) -> checks of it
    traced: bool = False
    aside: bool = False  # a line beside the method's own: where it is wrong, it alone has no time
    owners: list[Any] = field(default_factory=list)  # objects whose attributes are put back after a capture
    kept: list[dict] = field(default_factory=list)  # of an eager one what its owners had: graphs read it to the end
    release: Call | None = None  # frees what the calls made for themselves, once all is timed
    begin: Call = lambda: None  # of a method's first: says that it is the method's turn, before it leads in
    active: bool = True
    fn: Call | None = None
    inner: int = 1
    count: int = 1
    led: list[LeadIn] = field(default_factory=list)  # one a turn, of a heavy one
    level: float = 0.0  # watts at which its power levelled on this rank


class Timer:
    """Times works on one rank, in step with the others. A sample makes as many calls as take `min_sample_ms`, at most
    MAX_CALLS. `capture`: whether kernels are timed in CUDA graphs; ranks that are threads cannot be captured.
    `lead_in`: the seconds of one without a `meter` on every rank, and the most of one that ends by measured power.
    """

    def __init__(
        self,
        device: torch.device,
        group: Group,
        min_sample_ms: float = 0.0,
        capture: bool = True,
        lead_in: tuple[float, float] = (0.0, 0.0),
        meter: Meter | None = None,
    ):
        self.device, self.group, self.min_sample_ms, self.bounds = device, group, min_sample_ms, lead_in
        (read_ms,) = group.max_over_ranks([meter.read_ms if meter else math.inf], device)
        self.meter, self.piece_ms = (meter, max(PIECE_MS, PIECE_READS * read_ms)) if read_ms < math.inf else (None, 1.0)
        self.cuda = device.type == "cuda"
        self.token = torch.zeros(1, device=device)
        self.pool = Pool(device) if self.cuda and capture else None

    def ready(self, work: Work) -> None:
        if work.eager:
            turn = itertools.cycle(work.calls)
            work.fn = lambda: next(turn)()
            return
        self._capture(work, 1)
        # One round of the rotation says how many make a graph of GRAPH_MS; all ranks must agree on it.
        (ms,) = self.group.max_over_ranks([min(self.sample(work) for _ in range(3))], self.device)
        count = len(work.calls)
        rounds = max(1, min(MAX_CALLS // count, round(GRAPH_MS / (ms * count))))
        if rounds > 1:
            self.release(work)
            self._capture(work, rounds)

    def _capture(self, work: Work, rounds: int) -> None:
        calls = list(work.calls) * rounds
        work.inner = len(calls)
        if work.active:
            if work.before is not None:
                work.before()
            device = self.device if self.pool is not None else torch.device("cpu")  # where nothing is captured
            # A layer may make its packed copies anew while a graph is captured, and drop those that the graph reads.
            # What it lacked stays as the first calls made it: a capture could not, or each replay would make it again.
            held, warm = [(vars(own), dict(vars(own))) for own in work.owners], []

            def put_back() -> None:
                for mine, had in held:
                    if not warm:
                        had |= {name: made for name, made in mine.items() if had.get(name) is None}
                    mine.update(had)
                warm.append(True)

            work.fn = Graph(calls, device, self.pool, work.recheck is not None, put_back)

    def release(self, work: Work) -> None:
        if isinstance(work.fn, Graph):
            work.fn.release()
        work.fn, work.kept = None, []

    def output(self, work: Work) -> object:
        if not work.active:
            return None
        return work.fn.fresh() if isinstance(work.fn, Graph) else work.fn()

    def sample(self, work: Work) -> float:
        """Milliseconds a call, on this rank; 0 where the rank stands by."""
        if work.eager and not work.kept:
            # A step packs the weights anew, and would free those that graphs of the same layer were captured with.
            work.kept = [dict(vars(own)) for own in work.owners]
        if work.before is not None and work.active:
            work.before()
        self.group.barrier(self.token)
        if self.cuda:
            torch.cuda.synchronize(self.device)
        if not work.active:
            return 0.0
        calls = work.count * work.inner
        if self.cuda:
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

    def lead_in(self, work: Work, ms: float) -> LeadIn:
        """Runs `work`, of `ms` a call on the slowest rank, as long as the rule says: as often on every rank."""
        (fixed, most), meter = self.bounds, self.meter
        if not fixed:
            return LeadIn(0.0, "none was asked for")
        calls = calls_for(ms * work.inner, self.piece_ms, 10_000)
        pieces = calls_for(ms * work.inner * calls, 1e3 * (WINDOW_S / 2 if meter else fixed), 10_000)
        seen: list[Reading] = []
        if meter:
            meter.change()  # when it came is not known
        ends, off = [time.monotonic()], math.inf
        while True:
            before = None
            for _ in range(pieces):
                piece = self._start(work, calls)
                self._watch(before, seen)  # the GPU has its next piece meanwhile
                before = piece
            self._watch(before, seen)
            ends.append(time.monotonic())
            power = watts(seen)
            known = [level for level in (*power[1:], work.level) if power and level]
            off = min((abs(power[0] / level - 1) for level in known), default=math.inf)
            off = off if work.active else 0.0  # an idle GPU's power says nothing of this work
            seconds, off = self.group.max_over_ranks([ends[-1] - ends[0], off], self.device)
            if seconds >= most or (off <= LEVEL if meter else seconds >= fixed):
                break
        if meter is None:
            return LeadIn(seconds, "a fixed time, for no power was read")
        mine = None if work.active else (0.0, 0.0, 0.0)  # a rank that stands by draws nothing for it
        if work.active and power:
            some, mean = ends[-5:], statistics.mean(power)
            call_s = (some[-1] - some[0]) / (len(some) - 1) / (pieces * calls * work.inner)
            mine = mean, statistics.median(now.mhz for now in seen[-4:]), mean * call_s
            work.level = mean if off <= LEVEL else 0.0
        every = self.group.gather_objects(mine)
        state = f"power {'levelled' if off <= LEVEL else 'did not level'}"
        return LeadIn(seconds, state, () if None in every else tuple(every))

    def _start(self, work: Work, calls: int) -> torch.cuda.Event | None:
        if work.active:
            if work.before is not None:
                work.before()
            for _ in range(calls):
                work.fn()
        if not self.cuda:
            return None
        after = torch.cuda.Event()
        after.record()
        return after

    def _watch(self, until: torch.cuda.Event | None, seen: list[Reading]) -> None:
        # Adds the counter's changes as they come, so that none is seen later than a read takes.
        while True:
            if self.meter and (now := self.meter.change()):
                seen.append(now)
            if until is None or until.query():
                return

    def interleave(
        self, turns: Sequence[Sequence[Work]], warmup: int, samples: int, first: int = 0, each: int = TURNS
    ) -> dict[Work, list[float]]:
        """Samples of all works; ms a call, of the slowest rank. `turns` are the methods': one takes its share of the
        samples of each of its works, then it is the next one's turn (A B C, B C A), `each` so often, from `first` on.

        The warm-up's time decides how many calls make a sample of at least `min_sample_ms`; the ranks agree on it, for
        a collective that one rank calls more often than the others would hang.
        """
        works = [work for turn in turns for work in turn]
        if not works:
            return {}
        guess = [work.begin() or min([self.sample(work) for _ in range(warmup)]) for work in works]
        slow = dict(zip(works, self.group.max_over_ranks(guess, self.device), strict=True))
        for work, ms in slow.items():
            work.count = calls_for(ms * work.inner, self.min_sample_ms, MAX_CALLS // work.inner)
        mine: dict[Work, list[float]] = {work: [] for work in works}
        block = -(-samples // each)
        for number, done in enumerate(range(0, samples, block), first):
            at = number % len(turns)
            for work in itertools.chain(*turns[at:], *turns[:at]):
                work.begin()
                if work.heavy:
                    work.led.append(self.lead_in(work, slow[work]))
                mine[work] += [self.sample(work) for _ in range(min(block, samples - done))]
        flat = iter(self.group.max_over_ranks([ms for times in mine.values() for ms in times], self.device))
        return {work: [next(flat) for _ in times] for work, times in mine.items()}

    def fastest(self, works: Mapping[Key, Work]) -> Key:
        """The key of the work with the least median; the same on all ranks. They are ways of one work and share a turn
        and its lead-in: at its clocks each takes its samples, twice.
        """
        for work in works.values():
            self._capture(work, 1)
        next(iter(works.values())).heavy = True
        taken = self.interleave([[*works.values()]], warmup=1, samples=CHOICE_SAMPLES, each=2)
        for work in works.values():
            self.release(work)
        return min(works, key=lambda key: statistics.median(taken[works[key]]))


def watts(seen: Sequence[Reading]) -> list[float]:
    """The mean power of the last window, and of the one before it, where they are whole; from change to change."""
    found, last = [], len(seen) - 1
    for _ in range(2):
        whole = (i for i in range(last) if seen[last].seconds - seen[i].seconds >= WINDOW_S)
        if (first := max(whole, default=None)) is None:
            break
        found.append((seen[last].joules - seen[first].joules) / (seen[last].seconds - seen[first].seconds))
        last = first
    return found


def calls_for(ms: float, min_ms: float, most: int) -> int:
    return max(1, min(most, math.ceil(min_ms / ms) if ms > 0 else 1))


def copies_past_cache(operand_bytes: int, device: torch.device) -> int:
    """Copies of an operand to rotate over, so that none is found in L2: three caches full, for it is no strict LRU."""
    if device.type != "cuda" or not operand_bytes:
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_CALLS, math.ceil(3 * cache / operand_bytes))
