"""The process that searches, with planted crashes; real children of real parents, no GPU. See faulty_tuner.py."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from blockshock_lib.sparse24.small import Config
from blockshock_lib.sparse24.tuner import Tuner
from blockshock_lib.sparse24.tuning import Setting

CPU = torch.device("cpu")
FIRST = {"product": "cslt", "alg_id": 1, "split_k": 1, "split_k_mode": -1}
HANG_SECONDS = 2.0


def command(faults, log):
    return sys.executable, "-m", "tests.sparse24.faulty_tuner", json.dumps(faults), str(log)


def search(tuner):
    return tuner.search((128, 192), 16, torch.bfloat16, CPU)


def checks(log):
    """[(process id, algorithm, config or "mm_search")] in the order of trying; see faulty_tuner.py for the names."""
    return [(int(pid), step) for pid, step in (line.split(" ", 1) for line in Path(log).read_text().splitlines())]


def ended(pid, seconds=10.0):
    """Whether the process ends within so many seconds; it may be anybody's child."""
    end = time.monotonic() + seconds
    while True:
        try:
            # A process that has ended but was not waited for stays as a zombie where no init process reaps it.
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """The package must be found from any working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture
def start(tmp_path):
    """(faults, options of Tuner) -> a tuner, whose child is ended afterwards."""
    with contextlib.ExitStack() as stack:

        def make(faults, **options):
            tuner = Tuner(command(faults, tmp_path / "log"), **options)
            stack.callback(tuner.close)
            return tuner

        yield make


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """One search in which the faster a way is, the worse it behaves; the fourth algorithm is the fastest right one, and
    of two configs the slower.
    """
    faults = {"mm_search": "exit", "7": "killed", "6": "hang", "5": "broken", "4": "wrong", "small 4": "killed"}
    log = tmp_path_factory.mktemp("story") / "log"
    tuner = Tuner(command(faults, log), silence=HANG_SECONDS)
    found = search(tuner)
    last = tuner.process.pid
    tuner.close()
    return SimpleNamespace(found=found, checks=checks(log), last=last)


def test_the_fastest_right_candidate_of_each_kind_wins_over_those_that_crash_or_hang(story):
    assert story.found.best().way == story.found.best(Setting).way == Setting(3) and not story.found.failed
    assert story.found.best(Config).way == Config(1, 1, 1, 3, 1)


def test_each_crash_is_told_with_its_culprit_and_how_it_ended(story):
    assert sorted(story.found.crashes) == [
        "cslt alg_id 5 split_k 1 split_k_mode -1 (an illegal instruction was encountered)",
        f"cslt alg_id 6 split_k 1 split_k_mode -1 ({HANG_SECONDS:g} s without a word)",
        "cslt alg_id 7 split_k 1 split_k_mode -1 (SIGILL)",
        "mm_search (exit status 7)",
        "small tiles 1 warpgroups 1 unroll 1 depth 4 split 1 (SIGILL)",
    ]
    crashed = {trial.way for trial in story.found.trials if trial.crashed}
    assert crashed == {Setting(5), Setting(6), Setting(7), Config(1, 1, 1, 4, 1)} and story.found.wrong == 1


def test_no_culprit_is_met_twice(story):
    met = [step for _, step in story.checks]
    assert [met.count(step) for step in ("mm_search", "5", "6", "7", "small 4")] == [1, 1, 1, 1, 1]


def test_trials_made_before_a_crash_are_carried_over(story):
    met = [step for _, step in story.checks]
    assert [met.count(step) for step in "0124"] == [1, 1, 1, 1]
    assert [met.count(step) for step in ("3", "small 3")] == [3, 3]  # and twice more as the finalist


def test_a_child_ends_with_its_crash_and_the_last_one_when_it_is_closed(story):
    pids = {pid for pid, _ in story.checks}
    assert len(pids) == 6 and story.last in pids
    assert all(ended(pid, 0) for pid in pids)


def test_the_child_is_kept_for_the_next_search_and_strange_output_is_no_message(start, tmp_path, capfd):
    tuner = start({"1": "noise", "mm_search": "noise"})
    found = [search(tuner) for _ in range(2)]
    assert found[0].best().way == Setting(7) and found[0].library == Setting(2) and not found[0].crashes
    assert found[1] == found[0]
    assert len({pid for pid, _ in checks(tmp_path / "log")}) == 1
    assert "written by a compiler" in capfd.readouterr().err


def test_after_the_last_restart_only_what_has_run_well_is_considered(start, tmp_path):
    tuner = start({"2": "exit", "3": "exit", "4": "exit"}, restarts=1)
    found = search(tuner)
    assert found.best().way == Setting(1) and len(found.crashes) == 1
    assert {step for _, step in checks(tmp_path / "log")} == {"mm_search", "small 3", "small 4", "0", "1", "2"}


def test_a_search_that_goes_on_crashing_is_given_up(start, tmp_path):
    tuner = start({"small 3": "exit", "small 4": "exit"}, restarts=1)
    found = search(tuner)
    assert found.best() is None and found.failed == "given up after 1 crashes"
    assert found.trial(Config(1, 1, 1, 3, 1)).crashed == "exit status 7"
    tuner = start({"1": "exit"}, restarts=0)
    found = search(tuner)
    assert found.best() is None and found.failed == "given up after 1 crashes" and tuner.process is None


def test_an_error_of_the_search_itself_is_told_and_not_taken_for_a_crash(start, tmp_path):
    found = search(start({"1": "bug"}))
    assert found.best() is None and found.failed == "TypeError: a mistake" and not found.crashes
    assert len({pid for pid, _ in checks(tmp_path / "log")}) == 1


def test_a_child_that_does_not_start_is_a_failure_and_no_exception():
    found = search(Tuner((sys.executable, "-c", "raise SystemExit(3)")))
    assert found.best() is None and found.failed == "the process that searches did not start: exit status 3"


def test_an_interrupted_search_leaves_no_child(start, monkeypatch):
    tuner = start({"1": "hang"})
    hear = tuner._hear

    def interrupted(seconds):
        word = hear(seconds)
        if word.get("trying") == FIRST:
            pids.append(tuner.process.pid)
            raise KeyboardInterrupt
        return word

    pids = []
    monkeypatch.setattr(tuner, "_hear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search(tuner)
    assert tuner.process is None and ended(pids[0], 0)


def test_an_idle_child_ends_by_itself_and_the_next_search_starts_another(start):
    tuner = start({"idle": 1})
    search(tuner)
    first = tuner.process.pid
    assert tuner.process.wait(10) == -signal.SIGALRM
    found = search(tuner)
    assert found.best().way == Setting(7) and not found.crashes and tuner.process.pid != first


PARENT = f"""
import sys, torch
from blockshock_lib.sparse24 import tuner
one = tuner.Tuner(sys.argv[1:])
hear = one._hear
def tell(seconds):
    word = hear(seconds)
    if word.get("trying") == {FIRST} or "done" in word:
        print(one.process.pid, flush=True)
    return word
one._hear = tell
one.search((128, 192), 16, torch.bfloat16, torch.device("cpu"))
sys.stdin.read()
"""


@pytest.mark.parametrize("fault", ["none", "hang", "stuck"])
def test_a_parent_killed_with_sigkill_leaves_no_child(tmp_path, fault):
    faults = {"1": fault, "alarm": 3 if fault == "stuck" else 600}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *command(faults, tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as parent:
        try:
            child = int(parent.stdout.readline())
            assert not ended(child, 0.5)
        finally:
            parent.send_signal(signal.SIGKILL)
    assert ended(child)


def test_the_real_child_runs_from_anywhere_and_answers(capfd):
    tuner = Tuner()
    found = search(tuner)
    tuner.close()
    assert found.failed.startswith("UnsupportedError: 2:4 product 'cslt' cannot run") and not found.crashes
    assert "RuntimeWarning" not in capfd.readouterr().err
