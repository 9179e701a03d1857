"""The backends of an all-reduce on two gloo ranks, with a fake of symmetric memory: gloo in place of the kernels."""

import pytest
import torch

from blockshock_lib import launch
from blockshock_lib.comm import Group, symm
from tests.comm import reduce_tasks as tasks


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with launch.WorkerGroup(2, logs=tmp_path_factory.mktemp("logs")) as group:
        yield group


def test_a_cpu_has_gloo_alone_and_says_why(pair):
    for buffer, ways, symmetric, nccl, gloo, table in pair.call(tasks.without_a_table, seconds=60):
        assert buffer is None and ways == ["gloo"] and gloo == "" and table == {}
        assert "not for the device type 'cpu'" in symmetric
        assert nccl == "the process group adds up with gloo on cpu"


def test_what_is_written_into_the_buffer_is_summed_out_of_it_with_the_bias_added_once(pair):
    for seen in pair.call(tasks.through_the_workspace, seconds=60):
        # A bias of another dtype is not the kernel's to add.
        assert seen.pop("sums") == [("one_shot", tasks.SIZE, 16, True), ("one_shot", tasks.SIZE, 16, False)]
        assert seen == dict.fromkeys(seen, True)


def test_a_workspace_made_in_inference_mode_serves_outside_of_it(pair):
    assert pair.call(tasks.in_and_out_of_inference_mode, seconds=60) == [[True] * 6] * 2


def test_a_rank_takes_its_turn_without_the_others(pair):
    assert pair.call(tasks.turns, seconds=60) == [(0, 1)] * 2


def test_only_measured_sizes_of_whole_packets_have_a_buffer(pair):
    for has in pair.call(tasks.refused_shapes, seconds=60):
        assert [name for name, there in has.items() if there] == ["fits", "as large, of 16 bits"]


def test_all_ranks_take_the_first_ones_table(pair):
    assert pair.call(tasks.rank_0_decides, seconds=60) == [True, True]


def test_a_workspace_grows_but_not_in_a_graph_and_one_that_a_graph_reads_is_kept(pair):
    for seen in pair.call(tasks.growing, seconds=60):
        assert seen["made"] == [1 << 20, 4 << 20, 16 << 20]
        assert seen["gone"] and seen["kept"]
        assert "call the layer once before" in seen["said"]
        assert "as it is now" in seen["stale"]
        # None before it is needed; the one that a graph reads counts beside the new one.
        assert seen["shared"] == [0, symm.DATA + (1 << 20), 2 * symm.DATA + (20 << 20)]


def test_a_workspace_that_one_rank_cannot_make_raises_on_all(pair):
    short = ("OutOfMemoryError", "on rank 1: CUDA driver error: out of memory")
    unmapped = ("UnsupportedError", "on rank 1: no such handle")
    assert pair.call(tasks.failing_workspace, seconds=20) == [(short, unmapped)] * 2


def test_a_timed_reduction_starts_anew_from_the_same_numbers(pair):
    # Without a new start a sum in place has grown, and two-shot's input is gone.
    wanted = {"two-shot": (False, True), "gloo": (False, True)}
    assert pair.call(tasks.started_anew, seconds=60) == [wanted] * 2


def test_the_workspace_is_freed_with_its_group(pair):
    assert pair.call(tasks.freed_with_its_group, seconds=60) == [(True, True)] * 2


def test_a_lone_rank_and_an_emulated_one_need_no_buffer():
    for group in (Group(), Group(0, 2)):
        assert group.buffer(8, 64, torch.float32, tasks.CPU) is None and group.reductions(torch.ones(8, 64)) == {}
        group.tune(tasks.SIZE, tasks.CPU)
        assert group.shared_bytes(tasks.CPU) == 0
    assert torch.equal(Group().all_reduce(torch.ones(2, 3), torch.arange(3.0)), torch.tensor([[1.0, 2.0, 3.0]] * 2))
