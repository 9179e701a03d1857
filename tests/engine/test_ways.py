"""Every way of a piece is timed by its name, on every copy of the weight, and what it made for itself is freed."""

import dataclasses
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from blockshock_lib import launch, params
from blockshock_lib.comm import Group
from blockshock_lib.engine import experiment, ways, work
from blockshock_lib.engine.timing import Clock, Task
from blockshock_lib.engine.work import Work
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers.problem import LinearProblem
from tests.cases import case
from tests.engine import ways_tasks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class FakeGraph:
    def __init__(self, events, name):
        self.events, self.name = events, name

    def __call__(self, x):
        self.events.append(f"{self.name} called")

    def close(self):
        self.events.append(f"{self.name} closed")


class FakeRunner:
    def __init__(self, name, events, names=("cslt", "small"), active=True):
        self.name, self.events, self.names, self.active = name, events, names, active

    def products(self, x):
        return {way: lambda way=way: self.events.append(f"{self.name} {way} of {x}") for way in self.names}

    def graphed(self):
        return FakeGraph(self.events, self.name)


def fake(device, emulated=False):
    return SimpleNamespace(device=device, x="x", case=SimpleNamespace(emulated=emulated))


def test_each_product_is_timed_on_every_copy_of_the_weight():
    events = []
    found = ways.of(fake(CPU), [FakeRunner(name, events) for name in "AB"], "block_shock")
    assert {key: one.detail for key, one in found.items()} == {
        "product_by_kernel cslt": "cslt",
        "product_by_kernel small": "small",
    }
    for call in found["product_by_kernel small"].calls:
        call()
    assert events == ["A small of x", "B small of x"]


def test_a_product_with_one_way_is_timed_once_as_the_product():
    assert ways.of(fake(CPU), [FakeRunner("A", [], names=("dense",))], "row_parallel") == {}


def test_on_gpus_the_host_is_timed_for_each_way_and_the_layers_own_graph_is_captured_before():
    events = []
    found = ways.of(fake(CUDA), [FakeRunner(name, events, names=("dense",)) for name in "AB"], "row_parallel")
    assert set(found) == {"host_us dense", "forward_graph_call"}
    assert found["host_us dense"].host and found["host_us dense"].eager
    assert events == ["A called", "B called"], "a capture would fall into a sample"
    idle = ways.of(fake(CUDA), [FakeRunner("A", [], names=("dense",), active=False)], "dense")
    assert found["forward_graph_call"].heavy and idle["forward_graph_call"].heavy, "every rank leads in, or they hang"
    found["forward_graph_call"].release()
    assert events[2:] == ["A closed", "B closed"]


def test_a_rank_that_stands_by_captures_nothing_but_has_the_same_tasks():
    events = []
    found = ways.of(fake(CUDA), [FakeRunner("A", events, names=("dense",), active=False)], "dense")
    assert set(found) == {"host_us dense", "forward_graph_call"} and not events
    assert "forward_graph_call" not in ways.of(fake(CUDA, emulated=True), [FakeRunner("A", events)], "block_shock")


def test_the_time_of_the_host_is_that_of_calls_in_a_row_the_first_one_too(monkeypatch):
    made = []
    monkeypatch.setattr("time.perf_counter", lambda: 0.003 * bool(made) + 0.001 * len(made))  # the first takes 4 ms
    assert Clock(CPU, Group()).sample(Task(lambda: made.append(1), host=True, calls=3)) == pytest.approx(2.0)
    assert len(made) == 3


def test_the_host_is_asked_a_few_times_however_short_a_call_is():
    task = Task(lambda: None, host=True)
    Clock(CPU, Group()).interleave({"a": task}, warmup=1, samples=1, min_sample_ms=50)
    assert task.calls == 16


def test_each_timed_reduction_starts_anew_before_a_sample():
    events = []

    class FakeReduction:
        def __call__(self):
            events.append("added up")

        def reset(self):
            events.append("reset")

    runner = SimpleNamespace(active=True, reductions=lambda x: {"nccl": FakeReduction()})
    parts = SimpleNamespace(x="x", cost=lambda name: SimpleNamespace(sent=1))
    (one,) = ways.reductions(parts, runner, "block_shock").values()
    one.before()
    one.calls[0]()
    assert events == ["reset", "added up"] and one.detail == "nccl"


def problem(**changes):
    fields = dict(phase="phase1", methods=("row_parallel", "block_shock")) | changes
    return LinearProblem(case(**fields), CPU)


def test_both_orientations_of_a_known_mask_are_packed_as_the_library_would():
    own = problem(mask="transposable_random")
    (call,) = own.compressions("block_shock", Group()).values()
    for rank, (forward, turned) in enumerate(call()):
        keep = own.keep if rank == 0 else ~own.keep
        half = own.weight.shape[1] // 2
        assert torch.equal(forward.view(-1)[: 128 * half], own.weight[keep])
        assert torch.equal(turned.view(-1)[: 256 * 64], own.weight.t()[keep.t()])


def test_only_a_method_that_chooses_how_to_pack_is_asked_for_it():
    assert problem().compressions("row_parallel", Group()) == {}
    assert problem(dtype="fp32").compressions("block_shock", Group()) == {}
    assert problem().cost_compress("row_parallel") is None


def test_a_transposed_copy_is_packed_only_where_the_mask_is_2_4_there():
    for mask, copies in (("random", 1), ("checkerboard", 2)):
        own = problem(mask=mask)
        cost, dense = own.cost_compress("block_shock"), 2 * 128 * 256 * 2  # of both emulated ranks
        assert cost.read == dense and cost.written == copies * dense * 9 / 16


@pytest.fixture(scope="module")
def quick():
    asked = {"timing.samples": 2, "timing.warmup": 1, "profile": "none"}
    return params.load("phase1", asked, choose={"hardware": "cpu"})


def run(own, quick, tmp_path, **how):
    return experiment.measure(own, quick, group_index=0, traces=tmp_path, last=False, **how)


def test_compression_is_timed_with_the_weights_first_case_alone(quick, tmp_path):
    for first in (True, False):
        rows = [row for row in run(problem(), quick, tmp_path, first=first) if row["metric"] == "compress_by_kernel"]
        assert [(row["method"], row["detail"]) for row in rows] == [("block_shock", "by mask")] * 2 * first


def test_a_compression_that_does_not_fit_says_so_and_condemns_no_method(quick, tmp_path, monkeypatch):
    def large(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LinearProblem, "compressions", large)
    rows = [row for row in run(problem(), quick, tmp_path) if row["method"] == "block_shock"]
    (missing,) = [row for row in rows if row["metric"] == "compress_by_kernel"]
    assert missing["status"] == "oom"
    assert [row["status"] for row in rows if row["metric"] == "check"] == ["ok"]
    assert [row for row in rows if row["metric"] == "forward_kernel"]


def test_the_product_that_was_taken_is_named(quick, tmp_path):
    rows = run(problem(), quick, tmp_path)
    named = {(row["method"], row["detail"]) for row in rows if row["metric"] == "compute_kernel"}
    assert named == {("row_parallel", "dense"), ("block_shock", "reference")}


def test_an_unsupported_way_ends_no_other(quick, tmp_path, monkeypatch):
    def refuse(*_):
        raise UnsupportedError("no compiler")

    monkeypatch.setattr(LinearProblem, "compressions", refuse)
    rows = run(problem(methods=("row_parallel",)), quick, tmp_path)
    assert [row["reason"] for row in rows if row["metric"] == "compress_by_kernel"] == ["rank 0: no compiler"]
    assert [row for row in rows if row["metric"] == "forward_kernel"]


def test_host_times_are_microseconds_and_what_a_work_made_is_freed(quick, tmp_path, monkeypatch):
    events = []

    def of(*_):
        freed = partial(events.append, "freed")
        return {
            "host_us dense": Work([partial(time.sleep, 0.002)], eager=True, host=True, detail="dense", release=freed)
        }

    monkeypatch.setattr(ways, "of", of)
    rows = [row for row in run(problem(methods=("row_parallel",)), quick, tmp_path) if row["metric"] == "host_us"]
    assert [(row["unit"], row["detail"]) for row in rows] == [("us", "dense")] * 2
    assert all(2000 <= row["value"] < 1e6 for row in rows)
    assert events == ["freed"]


def test_a_chunked_forward_leaves_the_layers_own_choice():
    own = problem()
    seen = []
    one = SimpleNamespace(chunks=4, multiply=lambda x: seen.append(one.chunks))
    for call in work.chunked(own, [one], 2).calls:
        call()
    assert seen == [2] and one.chunks == 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    logs = tmp_path_factory.mktemp("ranks")
    return launch.call(ways_tasks.measured, processes=2, logs=logs, seconds=120)


def test_memory_that_the_sums_share_is_told_of_each_rank(tmp_path):
    said = launch.call(ways_tasks.shared, processes=2, logs=tmp_path, seconds=120)
    assert said == [[(0, 4096), (1, 4096)]] * 2


def details(rows, metric, method):
    return [row["detail"] for row in rows if (row["metric"], row["method"]) == (metric, method)]


def test_a_large_batch_is_timed_cut_each_way_and_the_one_that_was_taken_is_named(ranks):
    for rows in ranks:
        for method in ("row_parallel", "block_shock"):
            (taken,) = set(details(rows, "forward_kernel", method))
            assert taken in ("1", "2", "4")
            assert sorted(details(rows, "forward_chunks_kernel", method)) == sorted(["1", "2"] * 2)
        assert details(rows, "forward_chunks_kernel", "dense") == []
        assert set(details(rows, "forward_kernel", "dense")) == {""}


def test_the_ways_to_add_up_are_timed_once_a_case(ranks):
    for rows in ranks:
        found = [(row["method"], row["detail"]) for row in rows if row["metric"] == "reduce_by_kernel"]
        assert found == [("row_parallel", "gloo")] * 2
        assert set(details(rows, "reduce_kernel", "row_parallel")) == {"gloo"}


def test_a_cut_batch_has_the_floor_of_what_cannot_hide(ranks):
    rows = {(row["method"], row["metric"]): row for row in ranks[0]}
    product, link, whole = (rows["row_parallel", f"floor_{name}"]["value"] for name in ("compute", "reduce", "forward"))
    chunks = int(rows["row_parallel", "forward_kernel"]["detail"])
    assert whole == pytest.approx(max(product, link) + min(product, link) / chunks)


def test_a_small_batch_is_not_cut():
    runner = SimpleNamespace(joined="all-reduce")
    large = SimpleNamespace(case=dataclasses.replace(case(batch=1024), emulated=False))
    small = SimpleNamespace(case=dataclasses.replace(case(batch=256), emulated=False))
    assert work.has_chunks(large, runner) and not work.has_chunks(small, runner)
    assert not work.has_chunks(large, SimpleNamespace(joined=""))
    assert not work.has_chunks(SimpleNamespace(case=case(batch=1024)), runner), "emulated ranks have no collective"
