"""The benchmark of large products: its check, its rounds, what it reads from ncu, its words. Its times need a GPU."""

import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import large_product
from benchmarks.large_product import LEAD_IN, PRODUCTS, check, measure, products, read_counters

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
    busy = {"tensor_busy_percent": 98.18, "shared_memory_busy_percent": 75.63}
    assert first == pytest.approx({"ms": 8.30224, "million_cycles": 13.147676} | busy)
    assert second == pytest.approx({"ms": 11.152416, "memory_read_gb": 17.051739904, "l2_gb": 96.706007296})


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
    right = large_product.backends.choose("auto", "cpu")
    wrong = replace(right, linear=lambda x, packed, out: right.linear(x, packed, out).mul_(1.5))
    monkeypatch.setattr(large_product.backends, "choose", lambda *_: wrong)
    with pytest.raises(RuntimeError, match="2:4 of 64x64, B=8, is off by"):
        products(64, [8], torch.device("cpu"))


def test_rounds_alternate_in_order_and_each_product_has_its_lead_in(monkeypatch):
    order, runs, seen = list(itertools.product((8, 16), PRODUCTS)), [], []

    def value(b, what, seconds):
        return b + PRODUCTS.index(what) + seconds

    def sustained(call, seconds):
        runs.append((*call(), seconds))
        seen.append(value(*runs[-1]))
        return seen[-1]

    def rows():
        power, clock = ({"metric": name, "value": max(seen) + more} for name, more in (("power", 100), ("sm_clock", 1)))
        throttle = {"metric": "throttle", "value": 0.0, "detail": f"{len(seen)} runs"}
        seen.clear()
        return [power, clock, throttle]

    monkeypatch.setattr(large_product, "products", lambda n, batches: {one: lambda one=one: one for one in order})
    monkeypatch.setattr(large_product, "sustained", sustained)
    monkeypatch.setattr(large_product, "Sampler", lambda *_: contextlib.nullcontext(SimpleNamespace(rows=rows)))
    found = measure(64, [8, 16], rounds=3, seconds=0.5)
    assert [(row.b, row.what) for row in found] == order
    assert runs == [(*one, seconds) for one in [*order, *order[::-1], *order] for seconds in (LEAD_IN, 0.5)]
    for row in found:
        ms = value(row.b, row.what, 0.5)
        assert (row.ms, row.watts, row.mhz) == ([ms] * 3, [ms + 100] * 3, [ms + 1] * 3)
        assert row.throttle == ["1 runs"] * 3  # nothing of the lead-in is in the samples
