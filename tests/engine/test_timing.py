"""Methods take turns and lead in by measured power; samples are counted alike and never zero."""

import math
import time
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from blockshock_lib.comm import Group, local
from blockshock_lib.engine.power import Meter
from blockshock_lib.engine.timing import MAX_CALLS, Timer, Work

CPU, LONE = torch.device("cpu"), Group()


def work(fn, **how):
    return Work("ms", [], fn=fn, **how)


def test_methods_take_turns_whose_order_rotates():
    seen = []
    turns = [[work(lambda name=name: seen.append(name))] for name in "ABC"]
    taken = Timer(CPU, Group()).interleave(turns, warmup=1, samples=10)
    assert "".join(seen) == "ABC" + "AAABBBCCC" + "BBBCCCAAA" + "CCCAAABBB" + "ABC"
    assert [len(taken[one]) for (one,) in turns] == [10] * 3
    seen.clear()
    Timer(CPU, Group()).interleave(turns, warmup=1, samples=4, first=5, each=2)
    assert "".join(seen) == "ABC" + "CCAABB" + "AABBCC"


class Gpu:
    """A GPU that works off its queue while the clock moves, which a read of NVML does by `read_ms`: the power of its
    work nears `level` W, an idle one's is 80 W, and the counter is renewed ten times a second only.
    """

    NVML_CLOCK_SM = 1
    NVMLError = ValueError

    def __init__(self, ms, level=500.0, tau=0.3, read_ms=0.05):
        self.now, self.end, self.ms, self.level, self.tau, self.read_ms = 0.0, 0.0, ms, level, tau, read_ms
        self.idle, self.renewed, self.shown = 0.0, 0.0, 0.0

    def call(self):
        self.idle += max(0.0, self.now - self.end)
        self.end = max(self.now, self.end) + self.ms / 1e3

    def Event(self):
        event = SimpleNamespace(query=lambda: self.now >= event.at)
        event.record = lambda: vars(event).update(at=self.end)
        return event

    def nvmlDeviceGetTotalEnergyConsumption(self, _):
        self.now += self.read_ms / 1e3
        if (at := int(self.now * 10) / 10) > self.renewed:
            rest = self.tau * (1 - math.exp(-at / self.tau)) + self.idle
            self.renewed, self.shown = at, 1e3 * (self.level * at - (self.level - 80) * rest)
        return self.shown

    def nvmlDeviceGetClockInfo(self, *_):
        return 1500

    def timer(self, monkeypatch, bounds=(0.5, 3.0), metered=True, group=LONE):
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "Event", self.Event)
        timer = Timer(CPU, group, lead_in=bounds, meter=Meter(self, None) if metered else None)
        timer.cuda = True
        return timer


def led(monkeypatch, gpu, **how):
    return gpu.timer(monkeypatch, **how).lead_in(work(gpu.call), gpu.ms)


@pytest.mark.parametrize("ms", [0.01, 1.0, 13.0, 150.0])
@pytest.mark.parametrize("read_ms", [0.05, 3.5])
def test_a_lead_in_lasts_until_the_power_has_levelled_and_says_what_a_call_takes(monkeypatch, ms, read_ms):
    gpu = Gpu(ms, read_ms=read_ms)
    found = led(monkeypatch, gpu)
    assert found.state == "power levelled"
    assert 0.9 < found.seconds < 2.5, "as the power needs: after 1 s it is within 3% of what it will be"
    ((power, clock, joules),) = found.drawn
    assert power == pytest.approx(500, rel=0.06) and clock == 1500
    assert joules == pytest.approx(500 * ms / 1e3, rel=0.08)
    assert gpu.idle < 0.05 * found.seconds, "the GPU has work while the counter is read"


def test_where_the_power_is_level_at_once_a_lead_in_is_short_and_at_the_next_turn_shorter(monkeypatch):
    gpu = Gpu(1.0, tau=1e-3)
    timer, one = gpu.timer(monkeypatch), work(gpu.call)
    assert 0.4 < timer.lead_in(one, 1.0).seconds < 0.65
    assert 0.2 < timer.lead_in(one, 1.0).seconds < 0.45, "one window as at the last turn is enough"
    one.level = 300.0
    assert 0.4 < timer.lead_in(one, 1.0).seconds < 0.65 and one.level == pytest.approx(500, rel=0.03)


def test_a_lead_in_that_does_not_level_ends_and_one_without_power_takes_a_fixed_time(monkeypatch):
    slow = led(monkeypatch, Gpu(1.0, tau=5.0))
    assert slow.state == "power did not level" and 3.0 <= slow.seconds < 3.3
    monkeypatch.setattr(Gpu, "Event", lambda self: mock.Mock(query=lambda: vars(self).update(now=self.end) or True))
    blind = led(monkeypatch, Gpu(1.0), metered=False)
    assert blind.state == "a fixed time, for no power was read" and 0.5 <= blind.seconds < 0.76 and not blind.drawn
    assert led(monkeypatch, Gpu(1.0), bounds=(0.0, 0.0)).seconds == 0


def test_a_rank_that_stands_by_draws_nothing_for_the_work_and_every_rank_knows_what_each_draws(monkeypatch):
    gpu = Gpu(1.0, tau=1e-3)

    def ranked(group):
        timer, one = gpu.timer(monkeypatch, group=group), work(gpu.call)
        one.active = group.rank == 0
        return timer.lead_in(one, gpu.ms), gpu.timer(monkeypatch, metered=bool(group.rank), group=group).meter

    (first, blind), (second, _) = local.run(2, ranked)
    assert first.drawn == second.drawn and first.drawn[1] == (0.0, 0.0, 0.0) and blind is None
    assert first.drawn[0] == pytest.approx((500, 1500, 0.5), rel=0.05)


@pytest.mark.parametrize("counter", [lambda *_: 7.0, mock.Mock(side_effect=[7.0] * 6 + [ValueError] * 10**4)])
def test_a_counter_that_stands_still_or_stops_answering_gives_no_energy(monkeypatch, counter):
    gpu = Gpu(1.0)

    def read(*_):
        gpu.now += 1e-3
        return counter()

    monkeypatch.setattr(Gpu, "nvmlDeviceGetTotalEnergyConsumption", read)
    found = led(monkeypatch, gpu)
    assert found.seconds >= 3 and found.drawn == ()


def test_only_heavy_works_lead_in_at_each_turn(monkeypatch):
    timer, seen = Timer(CPU, Group(), 1), []
    monkeypatch.setattr(timer, "sample", lambda work: seen.append(work.fn) or 25.0)
    monkeypatch.setattr(timer, "lead_in", lambda work, ms: seen.append(work.fn.upper()) or ms)
    a, b = work("a", heavy=True, begin=lambda: seen.append("(")), work("b")
    taken = timer.interleave([[a, b]], warmup=1, samples=6, each=2)
    assert "".join(seen) == "(ab" + "(Aaaabbb" * 2, "a turn begins before it leads in"
    assert [len(times) for times in taken.values()] == [6, 6] and a.led == [25.0, 25.0] and not b.led


def test_a_sample_is_per_call_and_the_first_one_counts(monkeypatch):
    ticks = []
    monkeypatch.setattr(time, "perf_counter", lambda: 0.004 * len(ticks) + 0.012 * bool(ticks))
    one = work(lambda: ticks.append("tick"), inner=2, count=3)  # three times 4 ms, and 12, for six calls
    assert Timer(CPU, Group()).sample(one) == pytest.approx(4.0) and len(ticks) == 3
    one.before = lambda: ticks.append("before")
    Timer(CPU, Group()).sample(one)
    assert ticks[3:] == ["before", "tick", "tick", "tick"]
    monkeypatch.undo()
    Timer(CPU, Group(), 50).interleave([[short := work(lambda: None)]], warmup=1, samples=1)
    assert short.count == MAX_CALLS, "so often and no more, however short it is"


def test_a_capture_leaves_what_it_found_and_makes_nothing_that_the_first_calls_have_made(monkeypatch):
    class Captured:
        def __init__(self, calls, device, pool, keeps, restore):
            for _ in ("warm up", "capture"):
                for call in calls:
                    call()
                restore()

    def call():
        owner.copy, owner.lazy = object(), owner.lazy or made.append("lazy") or "lazy"

    monkeypatch.setattr("blockshock_lib.engine.timing.Graph", Captured)
    owner, made = SimpleNamespace(copy="its own", lazy=None), []
    Timer(CPU, Group())._capture(Work("ms", [call], owners=[owner]), 2)
    assert vars(owner) == {"copy": "its own", "lazy": "lazy"} and made == ["lazy"]


def test_what_an_eager_call_replaces_lives_on_for_the_graphs_that_read_it():
    owner, timer = SimpleNamespace(packed=torch.ones(1)), Timer(CPU, Group())
    first = weakref.ref(owner.packed)
    timer.ready(step := Work("ms", [lambda: vars(owner).update(packed=torch.ones(1))], eager=True, owners=[owner]))
    timer.sample(step)
    assert first() is not None and first() is not owner.packed
    timer.release(step)
    assert first() is None


def test_the_fastest_is_taken_by_its_median(monkeypatch):
    passed = []
    monkeypatch.setattr(time, "perf_counter", lambda: sum(passed))
    works = {n: Work("ms", [lambda n=n: passed.append(n / 1000)]) for n in (5, 1, 3)}
    assert Timer(CPU, Group()).fastest(works) == 1 and all(work.fn is None for work in works.values())
    assert [len(work.led) for work in works.values()] == [2, 0, 0], "one lead-in a turn"
