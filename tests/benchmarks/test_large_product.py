"""The benchmark of large products: its check, its rounds, what it reads from ncu, its words. Its times need a GPU."""

import itertools
import json
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import large_product
from benchmarks.large_product import LEAD_IN, PRODUCTS, Row, check, counted, measure, products, read_counters

TABLE = """==PROF== Connected to process 7
a line of the program's own
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","gemm","gpu__time_duration.sum","ns","8,302,240"
"0","7","gemm","sm__cycles_elapsed.max","cycle","13,147,676"
"0","7","gemm","SM Busy","%","98.18"
"0","7","gemm","L1/TEX Cache Throughput","%","75.63"
"0","7","gemm","L2 Hit Rate","%","57.95"
"1","7","sparse_gemm","gpu__time_duration.sum","ns","11,152,416"
"1","7","sparse_gemm","dram__bytes_read.sum","byte","17,051,739,904"
"1","7","sparse_gemm","lts__t_bytes.sum","byte","96,706,007,296"
"""


def test_counters_of_each_launch_in_order_and_in_our_units():
    first, second = read_counters(TABLE)
    assert first == {
        "ms": pytest.approx(8.30224),
        "million_cycles": pytest.approx(13.147676),
        "tensor_busy_percent": 98.18,
        "shared_memory_busy_percent": 75.63,
    }
    assert second == {
        "ms": pytest.approx(11.152416),
        "memory_read_gb": pytest.approx(17.051739904),
        "l2_gb": pytest.approx(96.706007296),
    }


def test_no_table_no_counters():
    assert read_counters("==ERROR== no permission\n") == []


def ncu(monkeypatch, stdout, code=0):
    seen = []

    def run(command, **options):
        seen.append(command)
        return SimpleNamespace(returncode=code, stdout=stdout)

    monkeypatch.setattr(large_product.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_ncu_looks_at_one_launch_of_each_product(monkeypatch):
    seen = ncu(monkeypatch, TABLE)
    assert len(counted(40960, [1024])) == 2
    assert seen[0][0] == "/bin/ncu"
    assert seen[0][-5:] == ["--once", "--n", "40960", "--b", "1024"]


@pytest.mark.parametrize(("stdout", "code"), [(TABLE, 1), (TABLE.split('"1"')[0], 0), ("", 0)])
def test_launches_that_were_not_counted_are_an_error(monkeypatch, stdout, code):
    ncu(monkeypatch, stdout, code)
    with pytest.raises(RuntimeError, match="not 2"):
        counted(40960, [1024])


def test_without_ncu_there_are_none(monkeypatch):
    monkeypatch.setattr(large_product.shutil, "which", lambda name: None)
    assert counted(40960, [1024]) == []


def test_a_line_says_spread_state_and_reason():
    row = Row(
        40960, 1024, "2:4", [3.3, 3.2, 3.5], [690.0, 700.0, 695.0], [1350.0, 1365.0, 1335.0], ["", "power", "power"]
    )
    row.counters = {"tensor_busy_percent": 79.2}
    assert (
        row.line
        == " 40960  1024  2:4                3.300 [3.200, 3.500]       695  1350  power  tensor_busy_percent 79.2"
    )


def test_not_throttled_is_said_only_of_what_was_read():
    unread, read = Row(64, 8, "2:4", [1.0]), Row(64, 8, "2:4", [1.0], [300.0], [1980.0], [""])
    assert unread.line.split()[-3:] == ["-", "-", "-"]
    assert read.line.split()[-4:] == ["300", "1980", "not", "throttled"]


@pytest.mark.parametrize("wrong", [0.5, -0.5, float("nan")])
def test_one_wrong_value_is_an_error(wrong):
    right = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, -1.0]])
    y = torch.cat((right + 0.05, torch.full((2, 5), 100.0)), 1)  # columns beyond the right ones are not compared
    check("2:4", y.bfloat16(), right)
    y[1, 2] += wrong
    with pytest.raises(RuntimeError, match="2:4 is off by"):
        check("2:4", y.bfloat16(), right)


def test_the_products_are_right_and_those_of_zeros_are_zero():
    calls = products(64, [8, 16], torch.device("cpu"))
    assert set(calls) == set(itertools.product((8, 16), PRODUCTS))
    for (b, what), call in calls.items():
        assert call().shape == (b, 64)
        assert bool(call().any()) == ("x = 0" not in what)


def test_a_wrong_product_is_not_timed(monkeypatch):
    right = large_product.product.choose("auto", "cpu")
    wrong = replace(right, linear=lambda x, packed, out: right.linear(x, packed, out).mul_(1.5))
    monkeypatch.setattr(large_product.product, "choose", lambda *_: wrong)
    with pytest.raises(RuntimeError, match="2:4 of 64x64, B=8, is off by"):
        products(64, [8], torch.device("cpu"))


@pytest.mark.parametrize(("seconds", "count"), [(0.1, 25), (0.001, 2)])
def test_a_sustained_time_is_of_one_call(monkeypatch, seconds, count):
    clock = []  # ms of each call

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = sum(clock)

        def synchronize(self):
            pass

        def elapsed_time(self, stop):
            return stop.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert large_product.sustained(lambda: clock.append(4.0), seconds) == pytest.approx(4.0)
    assert len(clock) == 1 + count  # the first one says how many fill the time


class Machine:
    """Stands in for the GPU: a run's time, power and clock tell the product, and whether it was the lead-in."""

    def __init__(self, monkeypatch, sampled=True):
        self.runs, self.seen, self.sampled = [], [], sampled
        monkeypatch.setattr(large_product, "products", self.products)
        monkeypatch.setattr(large_product, "sustained", self.sustained)
        monkeypatch.setattr(large_product, "Sampler", lambda *_: self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def products(self, n, batches):
        return {(b, what): lambda b=b, what=what: (b, what) for b, what in itertools.product(batches, PRODUCTS)}

    def sustained(self, call, seconds):
        self.runs.append((*call(), seconds))
        self.seen.append(self.value(*self.runs[-1]))
        return self.seen[-1]

    @staticmethod
    def value(b, what, seconds):
        return b + PRODUCTS.index(what) + seconds

    def rows(self):
        seen, self.seen = self.seen, []
        if not self.sampled:
            return []
        power, clock = ({"metric": name, "value": max(seen) + more} for name, more in (("power", 100), ("sm_clock", 1)))
        return [power, clock, {"metric": "throttle", "value": 0.0, "detail": f"{len(seen)} runs"}]


def test_rounds_alternate_in_order_and_each_product_has_its_lead_in(monkeypatch):
    machine = Machine(monkeypatch)
    rows = measure(64, [8, 16], rounds=3, seconds=0.5)
    order = list(itertools.product((8, 16), PRODUCTS))
    assert [(row.b, row.what) for row in rows] == order
    timed = [*order, *order[::-1], *order]
    assert machine.runs == [(*one, seconds) for one in timed for seconds in (LEAD_IN, 0.5)]
    for row in rows:
        value = machine.value(row.b, row.what, 0.5)
        assert (row.ms, row.watts, row.mhz) == ([value] * 3, [value + 100] * 3, [value + 1] * 3)
        assert row.throttle == ["1 runs"] * 3  # nothing of the lead-in is in the samples


def test_where_nothing_is_sampled_there_are_times_alone(monkeypatch):
    Machine(monkeypatch, sampled=False)
    rows = measure(64, [8, 16], rounds=1, seconds=0.5)
    assert [(row.b, row.what) for row in rows] == list(itertools.product((8, 16), PRODUCTS))
    assert all(len(row.ms) == 1 and row.watts == row.mhz == row.throttle == [] for row in rows)


def test_ncu_sees_the_launches_in_the_order_of_the_rows(monkeypatch):
    seen = []
    calls = {(b, what): lambda b=b, what=what: seen.append((b, what)) for what in PRODUCTS for b in (16, 8)}
    monkeypatch.setattr(large_product, "products", lambda n, batches: calls)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    large_product.once(64, [8, 16])
    assert seen == ["start", *itertools.product((8, 16), PRODUCTS[:2]), "stop"]


@pytest.mark.parametrize("installed", [True, False])
def test_counters_are_kept_with_the_product_they_are_of(monkeypatch, tmp_path, installed):
    def counted(n, batches):
        return [{"ms": Machine.value(b, what, n)} for b, what in itertools.product(batches, PRODUCTS[:2]) if installed]

    Machine(monkeypatch)
    monkeypatch.setattr(large_product, "counted", counted)
    monkeypatch.setattr(large_product.product, "choose", lambda *_: SimpleNamespace(unsupported=lambda *_: ""))
    monkeypatch.setattr(large_product.cache, "driver_version", lambda: "580")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    kept = tmp_path / "large.json"
    assert large_product.main(["--n", "64", "32", "--b", "16", "8", "16", "--rounds", "2", "--json", str(kept)]) == 0
    found = json.loads(kept.read_text())
    assert (found["gpu"], found["driver"]) == ("a GPU", "580")
    assert [(r["n"], r["b"], r["what"]) for r in found["rows"]] == list(itertools.product((64, 32), (8, 16), PRODUCTS))
    for row in found["rows"]:
        random = installed and row["what"] in PRODUCTS[:2]
        assert row["counters"] == ({"ms": Machine.value(row["b"], row["what"], row["n"])} if random else {})


def test_ncu_gets_the_same_order(monkeypatch):
    seen = []
    monkeypatch.setattr(large_product, "once", lambda n, batches: seen.append((n, batches)))
    monkeypatch.setattr(large_product.product, "choose", lambda *_: SimpleNamespace(unsupported=lambda *_: ""))
    assert large_product.main(["--once", "--n", "64", "--b", "16", "8"]) == 0
    assert seen == [(64, [8, 16])]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so(capsys):
    assert large_product.main(["--n", "64", "--b", "8"]) == 1
    assert "needs a GPU" in capsys.readouterr().err
