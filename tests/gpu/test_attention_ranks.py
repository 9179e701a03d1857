"""Attention over ranks that read each other's memory on real GPUs: rows, values, races, and captured graphs.

A rank whose peer never comes waits without end; the deadline of each call ends its processes.
"""

import pytest

from tests.gpu import attention_tasks as tasks


def test_rows_of_peers_are_right_whichever_rank_is_late(ranks):
    assert not any(ranks.call(tasks.rows, seconds=180))


@pytest.mark.parametrize("strategy", ["pull", "send", "gather", "ring", "heads"])
def test_out_and_gradients_are_those_of_one_gpu(ranks, strategy):
    assert not any(ranks.call(tasks.values, strategy, seconds=180))


@pytest.mark.parametrize("strategy", ["pull", "gather", "ring", "heads"])
def test_a_captured_step_replayed_with_other_inputs_gives_the_bits_of_ranks_that_send(ranks, strategy):
    assert not any(ranks.call(tasks.graphs, strategy, seconds=180))
