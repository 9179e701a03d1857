"""The benchmark of large products: what it reads from ncu, and its words. Its times need a GPU."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from benchmarks import large_product
from benchmarks.large_product import Row, counted, read_counters

TABLE = """==PROF== Connected to process 7
a line of the program's own
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","gemm","gpu__time_duration.sum","ns","8,302,240"
"0","7","gemm","SM Busy","%","98.18"
"0","7","gemm","L2 Hit Rate","%","57.95"
"1","7","sparse_gemm","gpu__time_duration.sum","ns","11,152,416"
"1","7","sparse_gemm","dram__bytes_read.sum","byte","17,051,739,904"
"""


def test_counters_of_each_launch_in_order_and_in_our_units():
    first, second = read_counters(TABLE)
    assert first == {"ms": pytest.approx(8.30224), "tensor_busy_percent": 98.18}
    assert second == {"ms": pytest.approx(11.152416), "memory_read_gb": pytest.approx(17.051739904)}


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
    assert "not throttled" in Row(64, 8, "2:4", [1.0]).line


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so(capsys):
    assert large_product.main(["--n", "64", "--b", "8"]) == 1
    assert "needs a GPU" in capsys.readouterr().err
