"""Which ranks can share memory; the kernels themselves are tried in tests/gpu/test_all_reduce.py."""

import os

import pytest
import torch

from blockshock_lib.comm import symm

PAIR = [{"why": "", "host": "a", "device": 0, "reaches": [1]}, {"why": "", "host": "a", "device": 1, "reaches": [0]}]


def changed(**second):
    return [PAIR[0], PAIR[1] | second]


def test_ranks_of_one_host_that_reach_each_other_share_memory():
    assert symm.reason(PAIR) == ""


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (changed(why="no compiler"), "no compiler"),
        (changed(host="b"), "several hosts"),
        (changed(device=0, reaches=[1]), "each must see all GPUs"),
        (changed(reaches=[]), "ranks 0 and 1 cannot read each other's memory"),
    ],
)
def test_what_stands_against_it_is_said(ranks, said):
    assert said in symm.reason(ranks)


@pytest.mark.parametrize("world", [1, 3, 6, 16])
def test_the_kernels_add_up_two_four_or_eight_ranks(world):
    assert f"not {world}" in symm.impossible(world, torch.device("cuda", 0))


def test_a_cpu_has_no_kernels_and_shares_nothing():
    facts = symm.facts(2, torch.device("cpu"))
    assert "device type 'cpu'" in facts["why"] and facts["reaches"] == []


@pytest.mark.parametrize("before", [None, "0"])
def test_multicast_is_off_while_memory_is_shared_and_then_as_it_was(before, monkeypatch):
    monkeypatch.delenv(symm.NO_MULTICAST, raising=False)
    if before is not None:
        monkeypatch.setenv(symm.NO_MULTICAST, before)
    with symm._without_multicast():
        assert os.environ[symm.NO_MULTICAST] == "1"
    assert os.environ.get(symm.NO_MULTICAST) == before
