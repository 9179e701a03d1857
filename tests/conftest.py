"""Fixtures of the tests that make whole runs."""

import multiprocessing
import subprocess
import tempfile
from pathlib import Path

import pytest

from blockshock_lib import workbook


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
