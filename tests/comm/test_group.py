"""Collectives between real gloo ranks and between threads, and what a lone or unjoined rank does."""

import threading
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from blockshock_lib.comm import Group, local
from blockshock_lib.errors import UnsupportedError

CPU = torch.device("cpu")


def every_collective(group: Group) -> None:
    rank, mine = group.rank, torch.full((2,), float(group.rank + 1))
    wide = torch.full((2, 3), float(rank), dtype=torch.bfloat16)
    out = torch.empty_like(wide)
    group.barrier(torch.zeros(1))
    assert group.exchange(wide, rank ^ 1, out=out) is out and out.tolist() == [[float(rank ^ 1)] * 3] * 2
    assert wide.tolist() == [[float(rank)] * 3] * 2
    assert group.start_all_reduce(wide.clone()).wait().tolist() == [[6.0] * 3] * 2
    assert group.all_reduce(mine.clone()).tolist() == [10.0] * 2
    assert group.all_reduce(mine.clone(), bias=torch.ones(2)).tolist() == [11.0] * 2
    assert group.all_gather(mine[None]).tolist() == [[1.0] * 2, [2.0] * 2, [3.0] * 2, [4.0] * 2]
    gathered = group.start_all_gather(wide, torch.t).wait().tolist()
    assert gathered == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]] * 3
    give = [torch.full((peer,), 10.0 * rank + peer) for peer in range(4)]  # rank 0 is given nothing
    take = [torch.empty(rank) for _ in range(4)]
    group.start_all_to_all(give, take)()
    assert [x.tolist() for x in take] == [[10.0 * peer + rank] * rank for peer in range(4)]
    assert group.max_over_ranks([float(rank), 5.0 - rank], CPU) == [3.0, 5.0]
    assert group.first_error("oom: 3 GiB" if rank >= 1 else "", CPU) == (1, "oom: 3 GiB")
    assert group.first_error("", CPU) == (-1, "")
    assert group.gather_objects({"rank": rank}) == [{"rank": r} for r in range(4)]


def of_processes(ctx):
    every_collective(Group.of())


def test_collectives_between_four_processes(four):
    four.call(of_processes, seconds=600)


def test_collectives_between_four_threads():
    local.run(4, every_collective)


def outside_and_after_destroy(ctx):
    handle, first = dist.new_group(), dist.new_group([0])
    with pytest.raises(UnsupportedError, match="not in that process group") if ctx.rank else nullcontext():
        Group.of(first)
    group = Group.of(handle)
    assert group.all_reduce(torch.ones(1)).item() == 2.0
    dist.destroy_process_group(handle)
    del handle
    with pytest.raises(UnsupportedError, match="has been destroyed"):
        group.all_reduce(torch.ones(1))
    assert group.reference() is None and {group.reference: 1}  # it still is a key


def test_a_rank_outside_a_group_is_told_so_and_a_group_does_not_outlive_its_destruction(pair):
    pair.call(outside_and_after_destroy, seconds=600)


def test_a_lone_rank_communicates_nothing_and_one_without_its_group_refuses():
    x = torch.ones(2, 3)
    assert Group().all_reduce(x) is x and Group().all_gather(x) is x
    assert Group().start_all_reduce(x).wait() is x
    assert Group().start_all_gather(x, torch.t).wait().shape == (3, 2)
    assert torch.equal(Group().exchange(x, 0), x)
    assert Group().max_over_ranks([1.0, 2.0], CPU) == [1.0, 2.0]
    assert Group().first_error("oom", CPU) == (0, "oom")
    with pytest.raises(UnsupportedError, match="no backward"):
        Group().all_reduce(x.requires_grad_())
    with pytest.raises(UnsupportedError, match="no process group"):
        Group(rank=0, world_size=2).all_reduce(torch.ones(2))


def test_a_sum_of_threads_in_16_bits_is_rounded_once():
    def total(group: Group) -> float:
        return group.all_reduce(torch.tensor([256.0 if group.rank == 0 else 1.0], dtype=torch.bfloat16)).item()

    assert local.run(3, total) == [258.0] * 3  # 256 + 1 is 256 in bf16


@pytest.mark.parametrize("failing", [0, 2])
def test_the_error_of_one_thread_ends_all(failing):
    def rank(group: Group) -> None:
        if group.rank == failing:
            raise ValueError("planted")
        group.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="planted") as caught:
        local.run(3, rank)
    assert caught.value.__notes__ == [f"on rank {failing} of 3"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


DIFFERENT = {
    "one leaves early": lambda group: group.rank and group.all_reduce(torch.ones(1)),
    "another call": lambda group: (group.all_gather if group.rank else group.all_reduce)(torch.ones(1)),
    "another shape": lambda group: group.all_reduce(torch.ones(1 + group.rank)),
}


@pytest.mark.parametrize("rank", DIFFERENT.values(), ids=DIFFERENT)
def test_ranks_in_different_calls_are_told_so_instead_of_waiting_for_ever(rank):
    with pytest.raises(RuntimeError, match=r"the ranks wait in different calls: 0 .*, 1 all_"):
        local.run(2, rank)


def test_the_callers_modes_hold_in_each_thread():
    with torch.no_grad():
        assert local.run(2, lambda group: torch.is_grad_enabled()) == [False, False]
    assert local.run(2, lambda group: torch.is_grad_enabled()) == [True, True]
