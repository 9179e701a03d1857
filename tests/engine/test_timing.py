"""Samples are interleaved, counted alike and never zero."""

import time

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.engine.timing import MAX_CALLS, Clock, Graph, Task, calls_for, copies_past_cache, tensors

CPU = torch.device("cpu")


def test_methods_are_interleaved_round_by_round():
    seen = []
    tasks = {name: Task(lambda name=name: seen.append(name)) for name in "ABC"}
    Clock(CPU, Group()).interleave(tasks, warmup=1, samples=2, min_sample_ms=0)
    assert "".join(seen) == "ABC" + "ABC" * 2


def test_in_blocks_each_heavy_task_leads_in_untimed_at_its_own_clocks(monkeypatch):
    clock, seen = Clock(CPU, Group()), []
    monkeypatch.setattr(clock, "sample", lambda task: seen.append(task.fn) or 25.0)
    tasks = {"a": Task("a"), "b": Task("b", heavy=False)}
    taken = clock.interleave(tasks, warmup=1, samples=6, min_sample_ms=1, blocks=True)
    lead_in = "aa"  # of 25 ms each
    assert "".join(seen) == "ab" + lead_in + "aaaa" + "bbbb" + lead_in + "aa" + "bb"
    assert {name: len(times) for name, times in taken.items()} == {"a": 6, "b": 6}


def test_nothing_to_time_takes_no_time():
    assert Clock(CPU, Group()).interleave({}, warmup=1, samples=2, min_sample_ms=0) == {}


def test_a_sample_is_per_call(monkeypatch):
    ticks = []
    monkeypatch.setattr(time, "perf_counter", lambda: 0.004 * len(ticks))
    task = Task(lambda: ticks.append("tick"), inner=2, calls=3)  # three times 4 ms for six calls
    assert Clock(CPU, Group()).sample(task) == pytest.approx(2.0)


def test_a_rank_that_stands_by_reports_no_time():
    assert Clock(CPU, Group()).sample(Task(None)) == 0


def test_before_runs_once_a_sample():
    seen = []
    Clock(CPU, Group()).sample(Task(lambda: seen.append("call"), before=lambda: seen.append("before"), calls=3))
    assert seen == ["before", "call", "call", "call"]


@pytest.mark.parametrize(
    "ms, least, most, calls", [(0.1, 1, 64, 10), (0.3, 1, 64, 4), (5, 1, 64, 1), (1e-5, 1, 64, 64), (0, 1, 64, 1)]
)
def test_calls_fill_the_least_sample_within_bounds(ms, least, most, calls):
    assert calls_for(ms, least, most) == calls


def test_an_in_place_all_reduce_cannot_overflow_bf16_within_a_sample():
    assert torch.finfo(torch.bfloat16).max > 2.0**MAX_CALLS * 1e4


def test_on_a_cpu_a_graph_runs_its_calls_in_order_and_keeps_the_last_result():
    seen = []
    graph = Graph([lambda: seen.append("a") or 1, lambda: seen.append("b") or 2], CPU)
    assert graph() == 2 and seen == ["a", "b"]
    graph.release()
    assert graph.out is None


def test_on_a_cpu_one_copy_of_the_weight_is_enough():
    assert copies_past_cache(1 << 20, CPU) == 1


def test_the_tensors_of_an_output_are_found_however_deep():
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    found = tensors((a, None, [b, (c,)]))
    assert [id(t) for t in found] == [id(a), id(b), id(c)] and tensors(None) == []
