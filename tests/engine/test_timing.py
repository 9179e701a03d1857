"""Samples are interleaved, counted alike and never zero."""

import time

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.engine.timing import MAX_CALLS, Timer, Work
from blockshock_lib.kernels.graph import Graph

CPU = torch.device("cpu")


def work(fn, **how):
    return Work("ms", [], fn=fn, **how)


def test_methods_are_interleaved_round_by_round():
    seen = []
    works = [work(lambda name=name: seen.append(name)) for name in "ABC"]
    Timer(CPU, Group()).interleave(works, warmup=1, samples=2)
    assert "".join(seen) == "ABC" + "ABC" * 2


def test_in_blocks_each_heavy_work_leads_in_untimed_at_its_own_clocks(monkeypatch):
    timer, seen = Timer(CPU, Group(), 1), []
    monkeypatch.setattr(timer, "sample", lambda work: seen.append(work.fn) or 25.0)
    taken = timer.interleave([work("a", heavy=True), work("b")], warmup=1, samples=6, blocks=True)
    lead_in = "aa"  # of 25 ms each
    assert "".join(seen) == "ab" + lead_in + "aaaa" + "bbbb" + lead_in + "aa" + "bb"
    assert [len(times) for times in taken] == [6, 6]


def test_a_sample_is_per_call(monkeypatch):
    ticks = []
    monkeypatch.setattr(time, "perf_counter", lambda: 0.004 * len(ticks))
    one = work(lambda: ticks.append("tick"), inner=2, count=3)  # three times 4 ms for six calls
    assert Timer(CPU, Group()).sample(one) == pytest.approx(2.0)


def test_the_time_of_the_host_is_that_of_calls_in_a_row_the_first_one_too(monkeypatch):
    made = []
    monkeypatch.setattr("time.perf_counter", lambda: 0.003 * bool(made) + 0.001 * len(made))  # the first takes 4 ms
    assert Timer(CPU, Group()).sample(work(lambda: made.append(1), host=True, count=3)) == pytest.approx(2.0)
    assert len(made) == 3


def test_the_fastest_is_taken_by_its_median():
    works = {n: Work("ms", [lambda n=n: time.sleep(n / 1000)]) for n in (5, 1, 3)}
    assert Timer(CPU, Group()).fastest(works) == 1 and all(work.fn is None for work in works.values())


def test_before_runs_once_a_sample():
    seen = []
    Timer(CPU, Group()).sample(work(lambda: seen.append("call"), before=lambda: seen.append("before"), count=3))
    assert seen == ["before", "call", "call", "call"]


def test_an_in_place_all_reduce_cannot_overflow_bf16_within_a_sample():
    assert torch.finfo(torch.bfloat16).max > 2.0**MAX_CALLS * 1e4


def test_on_a_cpu_a_graph_runs_its_calls_in_order_and_keeps_the_last_result():
    seen = []
    graph = Graph([lambda: seen.append("a") or 1, lambda: seen.append("b") or 2], CPU)
    assert graph() == 2 and seen == ["a", "b"]
    graph.release()
    assert graph.out is None
