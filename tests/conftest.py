"""Fixtures of the tests that make whole runs, and the order of the files."""

import multiprocessing
import subprocess
import tempfile
from pathlib import Path

import pytest

from blockshock_lib import workbook

# The files that take longest come first, so that no worker is left alone with one of them at the end.
LONG = (
    "notebooks/phase3_training.ipynb",
    "tests/faults/test_workers.py",
    "notebooks/phase2_backward.ipynb",
    "notebooks/phase1_forward.ipynb",
    "tests/layers/test_training.py",
    "tests/test_joined.py",
    "tests/test_workbook.py",
    "tests/test_run.py",
    "notebooks/findings.ipynb",
    "tests/tools/test_offline.py",
    "tests/faults/test_two_runs.py",
    "tests/faults/test_training_survives.py",
    "tests/faults/test_interrupts.py",
    "tests/sparse24/test_tuner.py",
    "tests/engine/test_admission.py",
)


def pytest_collection_modifyitems(items):
    places = {workbook.ROOT / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


@pytest.fixture(scope="module")
def outputs():
    """A folder for runs inside the project, as outputs/ is, but which `make list` does not show; removed afterwards."""
    place = workbook.ROOT / ".cache" / "tests"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


@pytest.fixture
def nothing_starts(monkeypatch):
    """Any process that is started, by whatever means, fails the test."""

    def refuse(*args, **_):
        raise AssertionError(f"a process was started: {args[1:]}")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
