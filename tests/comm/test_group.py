"""Collectives between two real gloo ranks, and what a lone or unjoined rank does."""

import pytest
import torch

from blockshock_lib import launch
from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError
from tests.comm import tasks


def test_collectives_between_two_ranks(tmp_path):
    for rank, seen in enumerate(launch.call(tasks.collectives, processes=2, logs=tmp_path, seconds=60)):
        assert seen["sum"] == [3.0, 3.0]
        assert seen["gathered"] == [[1.0, 1.0], [2.0, 2.0]]
        assert seen["largest"] == [1.0, 5.0]
        assert seen["word"] == (1, "oom: 3 GiB") and seen["no word"] == (-1, "")
        assert seen["rank"] == rank


def test_a_group_does_not_outlive_its_destruction(tmp_path):
    for before, said in launch.call(tasks.use_after_destroy, processes=2, logs=tmp_path, seconds=60):
        assert before == 2.0 and "has been destroyed" in said


def test_a_rank_without_its_process_group_refuses_to_reduce():
    with pytest.raises(UnsupportedError, match="no process group"):
        Group(rank=0, world_size=2).all_reduce(torch.ones(2))


def test_a_collective_refuses_a_tensor_that_wants_a_gradient():
    with pytest.raises(UnsupportedError, match="no backward"):
        Group().all_reduce(torch.ones(2, requires_grad=True))


def test_a_lone_rank_is_its_own_sum_and_gather():
    x = torch.ones(2)
    assert torch.equal(Group().all_reduce(x), x) and torch.equal(Group().all_gather(x), x)
    assert Group().largest([1.0, 2.0], torch.device("cpu")) == [1.0, 2.0]


def test_pairs_swap_and_started_collectives_give_what_the_plain_ones_do(tmp_path):
    for rank, seen in enumerate(launch.call(tasks.exchanged, processes=4, logs=tmp_path, seconds=60)):
        into_out, theirs, total, parts = seen
        assert into_out and theirs == float(rank ^ 1)
        assert total == 6.0
        assert parts == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]] * 3


def test_a_lone_rank_waits_for_nothing():
    x = torch.ones(2, 3)
    assert Group().start_all_reduce(x).wait() is x
    assert Group().start_all_gather(x, torch.t).wait().shape == (3, 2)
    assert torch.equal(Group().exchange(x, 0), x)
