"""A run has one owner; what an owner that was killed leaves behind is seen by the next reader and swept by the next."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from blockshock_lib import files
from blockshock_lib.errors import LaunchError
from blockshock_lib.runs import lock, manifest

OWNER = """
import sys
from pathlib import Path
from blockshock_lib.runs import lock
lock.hold(Path(sys.argv[1]))
with lock.scratch() as scratch:
    print(scratch, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """This process as it is when it owns nothing, with a folder for temporary files of its own."""
    monkeypatch.setattr(lock, "_held", {})
    monkeypatch.setattr(lock, "_scratch", [])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()


@pytest.fixture
def folder(tmp_path):
    """The folder of a run that is `running`, with a half-written record."""
    place = tmp_path / "run"
    facts = dict(run="run", phase="phase0", status="running", params={}, machine={"title": "x"}, started="2030")
    manifest.note(place, **facts)
    (place / "records").mkdir()
    (place / "records" / ".x.json.7.tmp").write_text("{")
    return place


@pytest.fixture
def owner(folder, alone, tmp_path):
    """A process that owns the run, and its scratch folder."""
    line = [sys.executable, "-c", OWNER, str(folder)]
    env = os.environ | {"PYTHONPATH": str(files.ROOT), "TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_run_whose_owner_was_killed_is_read_as_interrupted_swept_and_can_be_owned_again(owner, folder):
    process, scratch = owner
    assert manifest.read(folder)["status"] == "running" and lock.state(folder) == "held"
    with pytest.raises(LaunchError, match="this run is still going on"):
        lock.hold(folder)
    lock.sweep_stale()
    assert scratch.is_dir(), "its maker lives"
    process.kill()
    process.wait()
    ((where, noted),) = manifest.every(folder.parent)
    assert where == folder and noted["started"] == "2030"
    assert noted["verdict"] == "phase0 interrupted: the process that ran it ended before the run did"
    with lock.scratch():
        assert not scratch.exists()
    lock.hold(folder)
    lock.hold(folder)  # the cell that opens it may be run again
    assert manifest.read(folder)["status"] == "running", "its owner knows better"
    assert not list(folder.rglob("*.tmp"))
    lock.release(folder)


def test_an_owner_that_ends_in_order_sweeps_its_own_scratch(owner, folder):
    process, scratch = owner
    process.stdin.close()
    assert process.wait(120) == 0 and not scratch.exists()
    assert manifest.read(folder)["status"] == "interrupted", "it owned the run and never said how it ended"


def test_where_a_folder_cannot_be_locked_nobody_knows_and_nothing_is_swept(folder, alone, monkeypatch):
    def refuse(*_):
        raise OSError("Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    noted = manifest.read(folder)
    assert noted["status"] == "unknown" and "cannot lock a folder" in noted["verdict"]
    scratch = Path(tempfile.mkdtemp(prefix=lock.PREFIX))
    lock.sweep_stale()
    assert scratch.is_dir()
    lock.hold(folder)
    assert manifest.read(folder)["status"] == "running"
    lock.release(folder)
