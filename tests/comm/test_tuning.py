"""The search for the fastest all-reduce: a wrong one is never chosen, what is found is kept and agreed."""

import pytest
import torch

from blockshock_lib import launch
from blockshock_lib.comm import tuning
from blockshock_lib.comm.choices import Way
from tests.comm import reduce_tasks as tasks


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with launch.WorkerGroup(2, logs=tmp_path_factory.mktemp("logs")) as group:
        yield group


def test_a_wrong_candidate_is_never_chosen_and_the_slowest_rank_counts(pair):
    # Rank 1 takes one millisecond longer.
    assert pair.call(tasks.planted, seconds=60) == [{"right": 4.0, "slow": 6.0}] * 2


def test_the_fastest_of_each_backend_is_kept_in_order_and_searched_once(pair, tmp_path):
    for seen in pair.call(tasks.tuned, str(tmp_path), seconds=60):
        assert seen["before"] and seen["now"] and seen["table"] and not seen["captured"]
        assert seen["searches"] == [11] and seen["file"] == 3
        # The ninth of one-shot's five, two-shot's five and gloo is two-shot with 64 blocks.
        assert seen["chosen"] == [Way("two-shot", 64), Way("gloo"), Way("one-shot", 8)]
        assert seen["sums"] == {"two-shot": True, "gloo": True, "one-shot": True}


def test_kernels_that_one_rank_cannot_run_are_used_by_none_and_nothing_is_kept(pair, tmp_path):
    for why, table, buffer, files in pair.call(tasks.failing_kernel, str(tmp_path), seconds=60):
        assert why == "on rank 1: no compiler here" and table == {} and buffer is None and files == []


def test_a_rank_without_memory_for_the_workspace_has_all_go_on_with_the_library(pair, tmp_path):
    for why, table, buffer, files in pair.call(tasks.no_room, str(tmp_path), seconds=20):
        assert why == "on rank 1: CUDA out of memory" and table == {} and buffer is None and files == []


def test_a_candidate_that_fails_on_one_rank_raises_on_all(pair):
    said = ("UnsupportedError", "on rank 1: launch failed")
    assert pair.call(tasks.failing_candidates, seconds=20) == [(said, said)] * 2


@pytest.mark.parametrize("nbytes", [16, 1 << 10, 1 << 16])
def test_sums_of_the_checks_inputs_are_exact_and_every_turn_has_its_own(nbytes):
    cpu = torch.device("cpu")
    parts = [tuning.exact(rank, nbytes, cpu, 0) for rank in range(8)]
    assert parts[0].nbytes == nbytes
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    assert torch.equal(total.double(), sum(part.double() for part in parts))
    assert not torch.equal(parts[0], parts[1]) and not torch.equal(parts[0], tuning.exact(0, nbytes, cpu, 1))


def test_of_each_backend_the_fastest_is_kept():
    times = {Way("one-shot", 8): 2.0, Way("one-shot", 16): 1.0, Way("nccl"): 1.5}
    assert tuning.best_of_each(times) == {Way("one-shot", 16): 1.0, Way("nccl"): 1.5}
