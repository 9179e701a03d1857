"""A worker that fails or hangs is named, in time, with what it can still tell, and nothing of its group is left."""

import itertools
import re

import pytest

from blockshock_lib.errors import DeadlineError, RankError
from blockshock_lib.ranks import WorkerGroup
from blockshock_lib.ranks import group as parent
from tests.faults import failing
from tests.processes import living, pids_of

# (how, ranks, the rank that fails): most in a pair, whose other rank waits in a collective for the one that failed.
PLACES = ((2, 0), (2, 1), (1, 0))
FAULTS = list(itertools.islice(itertools.cycle(itertools.product(failing.HOWS, PLACES)), 100))


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKSHOCK_SCRATCH", str(tmp_path))
    yield
    assert not list(tmp_path.glob("blockshock-*"))


def assert_named(group, how, rank):
    """One rank fails: it is named in time, with what it could still tell, and all of the group is gone."""
    in_vain, wait = [], parent.wait

    def waited(sources, seconds):
        in_vain.append(0 if (found := wait(sources, seconds)) else seconds)
        return found

    # Not how late it is, which other work on the machine decides: how long the parent waited while nothing came.
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RankError) as caught:
        patch.setattr(parent, "wait", waited)
        group.call(failing.fails_on, rank, how, seconds=600)
    _, kind, message, told = failing.HOWS[how]
    error, where = caught.value, f"{how} on rank {rank}, after {sum(in_vain):.2f} s"
    assert error.rank == rank and re.fullmatch(kind, error.kind) and message in error.message, where
    assert re.search(told, error.traceback), f"{where}:\n{error}"
    assert sum(in_vain) < 2 and not living(pids_of(group)), where


@pytest.mark.parametrize("how", ["raise", "SIGKILL", "exit", "no pickle"])
def test_a_rank_that_fails_is_named(how, tmp_path, light):
    assert_named(WorkerGroup(3, logs=tmp_path), how, 1)


@pytest.mark.long
def test_a_hundred_workers_that_raise_exit_or_are_killed(tmp_path):
    """100 faults in 100 groups of ranks with torch and gloo."""
    for number, (how, (ranks, rank)) in enumerate(FAULTS):
        assert_named(WorkerGroup(ranks, logs=tmp_path / str(number)), how, rank)


def assert_stacks(task, seen, logs):
    group = WorkerGroup(2, logs=logs)
    with pytest.raises(DeadlineError) as caught:
        group.call(task, seconds=3)  # in which they come to where they wait
    assert caught.value.stacks.keys() == {0, 1}
    for rank, words in enumerate(seen):
        assert re.search(words, caught.value.stacks[rank]), str(caught.value)
    assert not living(pids_of(group)) and not group.alive


def test_hang(tmp_path, light):
    assert_stacks(failing.hangs_in_python, ("recv_bytes", "in hangs_in_python"), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "seen"),
    [
        (failing.only_rank_zero_reduces, (r"all_reduce[\s\S]*in only_rank_zero_reduces", "recv_bytes")),
        (failing.mismatched, (r"all_reduce[\s\S]*in mismatched", r"in mismatched")),
    ],
    ids=["collective of one rank", "mismatched collective"],
)
def test_hang_in_a_collective(task, seen, tmp_path):
    assert_stacks(task, seen, tmp_path)
