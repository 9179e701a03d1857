"""A rank is lost in training or in a save: the last whole checkpoint loads, and the numbers go on as they were."""

import pytest
import torch

from blockshock_lib import checkpoint
from blockshock_lib.errors import RankError
from blockshock_lib.ranks import WorkerGroup
from tests import training
from tests.processes import call


@pytest.mark.long
def test_training_resumed_after_a_killed_rank_gives_the_same_numbers(tmp_path):
    with pytest.raises(RankError) as caught:
        call(training.train_on, tmp_path / "c", 20, 12, processes=2, seconds=600)
    assert (caught.value.rank, caught.value.kind) == (1, "SIGKILL")
    with WorkerGroup(2) as fresh:
        whole = fresh.call(training.train_on, tmp_path / "whole", 14, seconds=600)
        after = fresh.call(training.train_on, tmp_path / "c", 14, seconds=600)
    for (_, losses, weights), (start, later, found) in zip(whole, after, strict=True):
        assert start == 10 and later == losses[10:]
        assert all(torch.equal(found[key], weights[key]) for key in weights)


@pytest.mark.long
@pytest.mark.parametrize(("moment", "ranks"), [("writing", 2), ("summing", 1), ("renaming", 1)])
def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before_it(tmp_path, moment, ranks):
    folder = tmp_path / "c"
    model = training.mlp()
    optimizer = training.adamw(model)
    checkpoint.save(folder, model, optimizer, step=1)
    with pytest.raises(RankError) as caught:
        call(training.killed_while, folder, moment, processes=ranks, seconds=600)
    assert (caught.value.rank, caught.value.kind) == (0, "SIGKILL")
    assert len(list(tmp_path.iterdir())) == 2, "the killed save left its scratch folder"
    again = training.mlp(seed=9)
    assert checkpoint.load(folder, again) == {"step": 1} and torch.equal(again[0].weight, model[0].weight)
    checkpoint.save(folder, again, step=2)
    assert checkpoint.load(folder, again) == {"step": 2} and [path.name for path in tmp_path.iterdir()] == ["c"]
