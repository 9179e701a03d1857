"""The process that searches, with planted crashes; real children of real parents, no GPU. See faulty.py."""

import json
import multiprocessing
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockshock_lib.kernels.sparse24 import tune
from tests.kernels.tuning.faulty import SEARCH, Algorithm, Small
from tests.processes import running, wait_for

CPU = torch.device("cpu")
HANG_SECONDS = 5.0


def search(child):
    return child.find({"algorithms": 8}, CPU)


def checks(log):
    """[(process id, what it tried)] in that order, by the names of faulty.py."""
    return [(int(pid), step) for pid, step in (line.split(" ", 1) for line in Path(log).read_text().splitlines())]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """The package must be found from any working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """(faults, options of Search) -> a search, whose child is ended afterwards."""
    made = []

    def make(faults, **options):
        monkeypatch.setenv("FAULTS", json.dumps(faults))
        monkeypatch.setenv("FAULTS_LOG", str(tmp_path / "log"))
        made.append(replace(SEARCH, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_fastest_right_way_of_each_kind_wins_over_those_that_crash_or_hang_and_each_crash_is_named(start, tmp_path):
    # The faster a way is, the worse it behaves: algorithm 3 is the fastest right one.
    faults = {"own search": "exit", "7": "killed", "6": "hang", "5": "broken", "4": "wrong", "small 4": "killed"}
    child = start(faults, silence=HANG_SECONDS)
    found, last, tried = search(child), child.process.pid, checks(tmp_path / "log")
    child.close()
    assert found.best().way == found.best(Algorithm).way == Algorithm(3) and not found.failed
    assert found.best(Small).way == Small(3)
    met = Counter(step for _, step in tried)  # no culprit and no way of an earlier child again but the finalists
    assert met == {
        step: 3 if step in ("3", "small 3") else 1 for step in (*"01234567", "small 3", "small 4", "own search")
    }
    assert sorted(found.crashes) == [
        "algorithm number 5 (an illegal instruction was encountered)",
        f"algorithm number 6 ({HANG_SECONDS:g} s without a word)",
        "algorithm number 7 (SIGILL)",
        "own search (exit status 7)",
        "small depth 4 (SIGILL)",
    ]
    crashed = {trial.way for trial in found.trials if trial.crashed}
    assert crashed == {Algorithm(5), Algorithm(6), Algorithm(7), Small(4)}
    assert sum(trial.wrong for trial in found.trials) == 1
    pids = {pid for pid, _ in tried}  # a child ends with its crash, and the last one when it is closed
    assert len(pids) == 6 and last in pids and not running(pids)


def test_the_child_is_kept_for_the_next_search_and_strange_output_is_no_message(start, tmp_path, capfd):
    child = start({"1": "noise", "own search": "noise"})
    found = [search(child) for _ in range(2)]
    assert found[0].best().way == Algorithm(7) and not found[0].crashes
    assert found[1] == found[0]
    assert len({pid for pid, _ in checks(tmp_path / "log")}) == 1
    assert "written by a compiler" in capfd.readouterr().err


def test_after_the_last_restart_only_what_has_run_well_is_considered(start, tmp_path):
    child = start({"2": "exit", "3": "exit", "4": "exit"}, restarts=1)
    found = search(child)
    assert found.best().way == Algorithm(1) and len(found.crashes) == 1
    assert {step for _, step in checks(tmp_path / "log")} == {"own search", "small 3", "small 4", "0", "1", "2"}


def test_an_error_of_the_search_itself_is_told_and_not_taken_for_a_crash(start, tmp_path):
    found = search(start({"1": "bug"}))
    assert found.best() is None and found.failed == "TypeError: a mistake" and not found.crashes
    assert len({pid for pid, _ in checks(tmp_path / "log")}) == 1


def test_a_child_that_does_not_start_is_a_failure_and_no_exception():
    found = search(replace(SEARCH, command=(sys.executable, "-c", "raise SystemExit(3)")))
    assert found.best() is None and found.failed == "the process that searches did not start: exit status 3"


def test_an_interrupted_search_leaves_no_child(start, tmp_path, monkeypatch):
    child = start({"1": "hang"})
    hear = child._hear

    def interrupted(seconds):
        if (word := hear(seconds)) == ("trying", Algorithm(1)):
            raise KeyboardInterrupt
        return word

    monkeypatch.setattr(child, "_hear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search(child)
    assert child.process is None and not running([checks(tmp_path / "log")[0][0]])


@pytest.mark.parametrize("fault", ["none", "stuck"])
def test_a_parent_killed_with_sigkill_leaves_no_child(start, fault):
    child, (said, tell) = start({"1": fault}), multiprocessing.Pipe(duplex=False)
    hear = child._hear

    def telling(seconds):
        if (word := hear(seconds)) in (("trying", Algorithm(1)), ("done", "")):
            tell.send(child.process.pid)
        return word

    def program():
        child._hear = telling
        search(child)
        time.sleep(600)

    parent = multiprocessing.get_context("fork").Process(target=program)
    parent.start()
    try:
        pid = said.recv()
        assert not wait_for(lambda: not running([pid]), 0.5)
    finally:
        parent.kill()
        parent.join()
    assert wait_for(lambda: not running([pid]))


def test_the_real_child_runs_from_anywhere_and_answers(capfd):
    found = tune.SEARCH.find({"N": 128, "K": 192, "B": 16, "dtype": "bfloat16"}, CPU)
    tune.SEARCH.close()
    assert found.failed.startswith("UnsupportedError: 2:4 product 'cslt' cannot run") and not found.crashes
    assert "RuntimeWarning" not in capfd.readouterr().err
