"""The kernels over symmetric memory between real GPUs: exact values, races, graphs, streams, and the search.

A kernel whose peer never comes spins without end; the deadline of each call ends its processes.
"""

import pytest

from tests.gpu import reduce_tasks as tasks


@pytest.mark.parametrize(
    "task", [tasks.values, tasks.races, tasks.graphs, tasks.streams], ids=lambda task: task.__name__
)
def test_sums_are_right(ranks, task):
    assert not any(ranks.call(task, seconds=180))


def test_layers_are_right_through_the_workspace_whole_in_chunks_and_captured(ranks, tmp_path):
    assert not any(ranks.call(tasks.tuned, str(tmp_path), seconds=180))


def test_the_search_tries_every_backend_and_agrees_on_all_ranks(ranks, tmp_path):
    first, *others = ranks.call(tasks.searched, str(tmp_path), (128 << 10, 32 << 20), seconds=180)
    assert all(other == first for other in others)
    for ways in first.values():
        assert {way.backend for way in ways} == {"nccl", "one-shot", "two-shot"}


def test_a_workspace_is_given_back_with_its_group(ranks):
    for held, left in ranks.call(tasks.freed, seconds=120):
        assert held >= 200 << 20 and left < 64 << 20
