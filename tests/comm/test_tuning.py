"""The search for the fastest all-reduce: a wrong one is never chosen, what is found is kept and agreed.

A function of `ctx` is a claim that both ranks check (tests/conftest.py).
"""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from blockshock_lib.comm import Group, all_reduce, symm, tuning
from blockshock_lib.comm.all_reduce import Way
from blockshock_lib.errors import UnsupportedError
from tests.comm import fake_symm
from tests.comm.test_all_reduce import CPU, SIZE, buffer, partial


def clock_of(ms):
    """In the place of a CUDA graph: what makes a call for each sample, as long as ms(way) says."""

    def graph(calls, device, keeps):
        time = lambda: len(calls) * ms(calls[0].way) if calls[0]() is not None else None  # noqa: E731
        return mock.Mock(ms=time)

    return mock.patch.object(tuning, "Graph", graph)


def candidate(name, change=lambda total: total):
    """A way to add up x whose sums go through `change`."""

    def make(x):
        return mock.Mock(side_effect=lambda: change(Group.of().all_reduce(x.clone())), way=Way(name))

    return make


def off_by_one(total):
    total[0, 0] += 1
    return total


def a_wrong_candidate_is_never_chosen_and_the_slowest_rank_counts(ctx, _):
    times, timed = {"right": 3.0, "slow": 5.0, "wrong": 1.0, "wrong on rank 1": 1.0}, []
    wrong = ["wrong"] + ["wrong on rank 1"] * ctx.rank
    ways = {Way(name): candidate(name, *[off_by_one] * (name in wrong)) for name in times}
    with clock_of(lambda way: timed.append(way.backend) or times[way.backend] + ctx.rank):
        found = tuning.measure(Group.of(), CPU, ways, 1 << 12)
    assert not {"wrong", "wrong on rank 1"} & set(timed)
    assert found == {Way("right"): 4.0, Way("slow"): 6.0}


def the_fastest_of_each_backend_is_kept_in_order_and_searched_once(ctx, folder):
    group, tried, fastest = Group.of(), [], Way("two-shot", 64)
    clock = clock_of(lambda way: tried.append(way) or (2.0 if way == fastest else 9.0))
    with fake_symm.installed(), clock:
        assert buffer(group) is None
        tuning.tune(group, SIZE, CPU)
        assert len(set(tried)) == 11  # one-shot's five, two-shot's five and gloo
        tried.clear()
        tuning.tune(group, SIZE - 64, CPU)
        assert not tried
        one = all_reduce.reducer(group, CPU)
        chosen = one.ways(SIZE)
        assert chosen == [fastest, Way("gloo"), Way("one-shot", 8)] and not one.captured
        x = partial(ctx.rank)
        for name in group.reductions(x):
            assert torch.equal(group.reductions(x)[name](), partial(0) * 3)
        assert buffer(group) is not None
    dist.barrier()
    kept = all_reduce.measured(2, CPU)
    assert list(kept) == [SIZE] and list(kept[SIZE]) == chosen


class Broken(fake_symm.Workspace):
    def prepare(self, dtype):
        if self.rank == 1:
            raise UnsupportedError("no compiler here")


class Short(fake_symm.Workspace):
    def __init__(self, group, nbytes, device):
        with group.raise_together(device):
            if group.rank == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")


def kernels_that_one_rank_cannot_run_or_has_no_memory_for_are_used_by_none_and_nothing_is_kept(ctx, folder):
    for fails, why in ((Broken, "no compiler here"), (Short, "CUDA out of memory")):
        with fake_symm.installed(), mock.patch.object(symm, "Workspace", fails):
            tuning.tune(Group.of(), SIZE, CPU)
            one = all_reduce.reducer(Group.of(), CPU)
            assert (one.why, one.table) == (f"on rank 1: {why}", {}) and buffer(Group.of()) is None
            assert not os.listdir(folder)


def a_candidate_that_fails_on_one_rank_before_or_in_its_sum_raises_on_all(ctx, _):
    fails = mock.Mock(side_effect=RuntimeError("launch failed")) if ctx.rank == 1 else lambda x: x
    for make in (lambda x: candidate("bad")(fails(x)), candidate("bad", fails)):
        with clock_of(lambda way: 1.0), pytest.raises(UnsupportedError, match="on rank 1: launch failed"):
            tuning.measure(Group.of(), CPU, {Way("bad"): make}, 1 << 12)


def test_on_two_ranks(claim_of_ranks, pair, tmp_path):
    pair.call(in_folder, claim_of_ranks, str(tmp_path), seconds=600)


def in_folder(place, claim, folder):
    with mock.patch.dict(os.environ, BLOCKSHOCK_CACHE=folder):
        claim(place, folder)
