"""Which ranks can share memory; the kernels themselves are tried in tests/gpu/test_all_reduce.py."""

import os
import re
import socket
from unittest import mock

import pytest
import torch

from blockshock_lib.comm import Group, symm

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
def test_multicast_is_off_while_memory_is_shared_and_then_as_it_was(before, monkeypatch):
    memory, seen = torch.zeros(symm.DATA + 16, dtype=torch.uint8), []
    made = lambda *_: seen.append(os.environ[symm.NO_MULTICAST]) or memory  # noqa: E731
    joined = mock.Mock(rank=0, buffer_ptrs=[memory.data_ptr()])
    monkeypatch.setattr(symm, "_SymmetricMemory", mock.Mock(empty_strided_p2p=made))
    monkeypatch.setattr(symm.symm_mem, "rendezvous", lambda *_: joined)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    with mock.patch.dict(os.environ, before, clear=True):
        symm.Workspace(Group(), 16, torch.device("cpu"))
        assert seen == ["1"] and dict(os.environ) == before
