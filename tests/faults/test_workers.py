"""A worker that fails or hangs is named, in time, with what it can still tell, and nothing of its group is left."""

import contextlib
import itertools
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from blockshock_lib import launch
from blockshock_lib.errors import DeadlineError, RankError
from tests.faults import failing
from tests.processes import living

# (how, ranks, the rank that fails): most in a pair, whose other rank waits in a collective for the one that failed.
PLACES = ((2, 0), (2, 1), (1, 0))
FAULTS = list(itertools.islice(itertools.cycle(itertools.product(failing.HOWS, PLACES)), 100))
TOLD = {
    "raise": ("ValueError", "planted", r"in fails_on[\s\S]*in _raise[\s\S]*ValueError: planted"),
    "SIGKILL": ("SIGKILL", "ended by SIGKILL", r"\(last lines of its log\)\nlast words"),
    "SIGSEGV": ("SIGSEGV", "ended by SIGSEGV", r"Fatal Python error[\s\S]*in fails_on"),
    "exit": ("SystemExit", "3", r"in fails_on[\s\S]*SystemExit: 3"),
}


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """A temporary folder of this test's own: whatever is left in it is the test's."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.delenv("BLOCKSHOCK_SCRATCH", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.iterdir())


def test_worker_raises_or_is_sigkilled(tmp_path):
    """100 faults in 100 groups; the next group starts while this one fails."""
    named, pids = 0, []
    with ThreadPoolExecutor(1) as ahead, contextlib.ExitStack() as started:

        def start(number):
            _, (ranks, _) = FAULTS[number]
            return started.enter_context(launch.WorkerGroup(ranks, logs=tmp_path / str(number)))

        waiting = ahead.submit(start, 0)
        try:
            for number, (how, (_, rank)) in enumerate(FAULTS):
                group, waiting = waiting.result(), ahead.submit(start, number + 1) if number < 99 else None
                pids += group.pids
                with pytest.raises(RankError) as caught:
                    group.call(failing.fails_on, rank, how, seconds=60)
                late = time.monotonic() - fault_time(tmp_path / str(number) / f"rank{rank}.log")
                kind, message, told = TOLD[how]
                error, where = caught.value, f"fault {number}, {how} on rank {rank}, after {late:.2f} s"
                assert (error.rank, error.kind) == (rank, kind) and message in error.message, where
                assert re.search(told, error.traceback), f"{where}:\n{error}"
                assert late < 2, where
                named += 1
        finally:
            if waiting is not None:
                waiting.exception()  # a group that is starting is ended too
    assert named == 100 and not living(pids)


def fault_time(log):
    return float(re.search(r"last words at ([\d.]+)", log.read_text())[1])


@pytest.mark.parametrize(
    ("task", "seen"),
    [
        (failing.hangs_in_python, ("recv_bytes", "in hangs_in_python")),
        (failing.only_rank_zero_reduces, (r"all_reduce[\s\S]*in only_rank_zero_reduces", "recv_bytes")),
        (failing.mismatched, (r"all_reduce[\s\S]*in mismatched", r"in mismatched")),
    ],
    ids=["hang", "collective of one rank", "mismatched collective"],
)
def test_hang_or_mismatched_collective(task, seen, tmp_path):
    group = launch.WorkerGroup(2, logs=tmp_path / "logs")
    start = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        group.call(task, seconds=1)
    assert 1 <= time.monotonic() - start < 3
    assert caught.value.stacks.keys() == {0, 1}
    for rank, words in enumerate(seen):
        assert re.search(words, caught.value.stacks[rank]), str(caught.value)
    assert not living(group.pids) and not group.alive
