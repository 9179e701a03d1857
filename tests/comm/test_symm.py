"""Which ranks can share memory; the kernels themselves are tried in tests/gpu/test_all_reduce.py."""

import os
import re
import socket
from unittest import mock

import pytest
import torch

from blockshock_lib.comm import symm

PAIR = [{"why": "", "host": "a", "device": 0, "reaches": [1]}, {"why": "", "host": "a", "device": 1, "reaches": [0]}]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({}, "^$"),
        ({"why": "no compiler"}, "no compiler"),
        ({"host": "b"}, "several hosts"),
        ({"device": 0, "reaches": [1]}, "each must see all GPUs"),
        ({"reaches": []}, "ranks 0 and 1 cannot read each other's memory"),
    ],
)
def test_what_stands_against_sharing_memory_is_said(second, said):
    assert re.search(said, symm.reason([PAIR[0], PAIR[1] | second]))


def test_hosts_of_one_name_are_told_apart(tmp_path, monkeypatch):
    hosts = []
    for boot in ("one", "another", None):
        monkeypatch.setattr(symm, "BOOT", tmp_path / str(boot))
        if boot:
            symm.BOOT.write_text(boot + "\n")
        hosts.append(symm.facts(2, torch.device("cpu"))["host"])
    assert len(set(hosts)) == 3 and hosts[0] == f"{socket.gethostname()} one"


@pytest.mark.parametrize("before", [{}, {symm.NO_MULTICAST: "0"}])
def test_multicast_is_off_while_memory_is_shared_and_then_as_it_was(before):
    with mock.patch.dict(os.environ, before, clear=True):
        with symm._without_multicast():
            assert os.environ[symm.NO_MULTICAST] == "1"
        assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("name", "rows", "asked", "blocks"),
    # A row is 8 packets, a block takes 512; of two-shot's packets a rank sums a quarter.
    [("one_shot", 256, 64, 4), ("two_shot", 256, 64, 1), ("one_shot", 256, 2, 2), ("two_shot", 257, 64, 2)],
)
def test_a_sum_tells_the_kernel_where_its_part_lies_and_how_large_it_is(monkeypatch, name, rows, asked, blocks):
    launched = []
    monkeypatch.setattr(
        symm.compiled, "kernel", lambda path, name, **defines: lambda *args: launched.append((name, defines, args))
    )
    space = object.__new__(symm.Workspace)
    space.rank, space.world, space.nbytes, space.peers, space._kernels = 2, 4, 1 << 20, [10, 20, 30, 40], {}
    space.memory = torch.zeros(symm.DATA + space.nbytes, dtype=torch.uint8)
    space.begin = space.memory.data_ptr() + symm.DATA
    x = space.view(rows + 8, 64, torch.bfloat16)[8:]
    out, bias = torch.empty(rows, 64), torch.empty(64)
    assert space.holds(x) and not space.holds(out) and space.sum(name, x, bias, out, asked) is out
    ((kernel, defines, args),) = launched
    assert kernel == f"all_reduce_{name}" and f" {kernel}(" in symm.SOURCE.read_text()
    assert (defines["WORLD"], defines["ELEMENT"]) == (4, 0)
    assert args[:3] == ((blocks, 1, 1), symm.THREADS, 0)
    assert args[3:] == (10, 20, 30, 40, out, bias, 8 * 128, rows * 8, 8, 2)
