"""The benchmark of large products: its check, and what it reads from ncu. Its times need a GPU."""

import itertools
from dataclasses import replace

import pytest
import torch

from benchmarks import large_product
from benchmarks.large_product import PRODUCTS, products, read_counters

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
