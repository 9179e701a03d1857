"""What is left of a process that owned a run is ended, removed and said, within 2 s of its end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from blockshock_lib import custodian, manifest, ownership, workbook
from blockshock_lib.errors import LaunchError
from tests.faults.killed import until

OWNER = """
import os, subprocess, sys
from pathlib import Path
from blockshock_lib import ownership
ownership.hold(Path(sys.argv[1]))
with ownership.scratch() as scratch:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(ownership._process.pid, child.pid, scratch, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "run"
    facts = dict(run="run", phase="phase0", status="running", params={}, machine={"title": "x"}, started="2030")
    manifest.note(place, **facts)
    (place / "records" / ".x.json.7.tmp").parent.mkdir()
    (place / "records" / ".x.json.7.tmp").write_text("{")
    return place


@pytest.fixture
def owner(folder):
    """A process that owns the run and has a child of its own; and their custodian, and the scratch folder."""
    line = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=workbook.ROOT) as process:
        keeper, child, scratch = process.stdout.readline().split()
        processes = [psutil.Process(int(pid)) for pid in (keeper, child)]
        try:
            yield process, *processes, Path(scratch)
        finally:
            process.kill()
            for one in processes:
                if one.is_running():
                    one.kill()


def alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_killed_owner_leaves_nothing_and_its_run_is_interrupted(owner, folder):
    process, keeper, child, scratch = owner
    assert scratch.is_dir() and alive(child) and os.getsid(keeper.pid) != os.getsid(process.pid)
    keeper.terminate()  # as a job's end would: it has its work still to do
    before = (folder / manifest.FILE).read_bytes()
    process.kill()
    assert until(lambda: not alive(keeper) and not alive(child) and not scratch.exists())
    noted = manifest.read(folder)
    assert (noted["status"], noted["reason"]) == ("interrupted", custodian.REASON) and noted["ended"]
    assert noted["verdict"] == f"phase0 interrupted: {custodian.REASON}" and noted["started"] == "2030"
    assert [path.name for path in folder.rglob("*") if path.is_file()] == [manifest.FILE]
    assert (folder / manifest.FILE).read_text() == json.dumps(noted, indent=1) + "\n" != before.decode()


def test_an_owner_that_ends_in_order_leaves_no_scratch_and_an_interrupted_run(owner, folder):
    process, keeper, child, scratch = owner
    process.stdin.close()
    assert process.wait(10) == 0
    assert until(lambda: not alive(keeper) and not alive(child) and not scratch.exists())
    assert manifest.read(folder)["status"] == "interrupted", "it owned the run and never said how it ended"


def test_a_completed_run_stays_completed(owner, folder):
    process, keeper, *_ = owner
    manifest.note(folder, status="completed")
    process.kill()
    assert until(lambda: not alive(keeper))
    assert manifest.read(folder)["status"] == "completed"


def test_a_run_that_another_process_took_over_is_left_to_it(folder):
    with custodian.locked(folder):
        custodian.conclude(folder)
        assert manifest.read(folder)["status"] == "running"
    custodian.conclude(folder)
    assert manifest.read(folder)["status"] == "interrupted"


def test_a_folder_that_has_gone_is_not_made_again(tmp_path):
    custodian.conclude(tmp_path / "gone")
    custodian.sweep(tmp_path / "gone")
    assert not list(tmp_path.iterdir())


def test_a_run_has_one_owner(owner, folder):
    with pytest.raises(LaunchError, match="this run is still going on"):
        ownership.hold(folder)
    process, keeper, *_ = owner
    process.kill()
    assert until(lambda: not alive(keeper))
    ownership.hold(folder)
    ownership.hold(folder)  # the cell that opens it may be run again
    ownership.release(folder)


@pytest.fixture
def alone(monkeypatch):
    """This process as it is when it owns nothing, whatever other tests have left open."""
    for name, value in (("_held", {}), ("_scratch", []), ("_process", None)):
        monkeypatch.setattr(ownership, name, value)
    yield
    assert ownership._process is None, "with nothing to look after there is no custodian"


def test_the_custodian_leaves_with_the_last_thing_to_look_after(alone, folder):
    ownership.hold(folder)
    keeper = psutil.Process(ownership._process.pid)
    with ownership.scratch() as scratch:
        assert os.environ[custodian.SCRATCH] == str(scratch) and scratch.is_dir()
        with ownership.scratch(EXTRA="1") as inner:
            assert inner == scratch and os.environ["EXTRA"] == "1"
        assert "EXTRA" not in os.environ and scratch.is_dir()
        ownership.release(folder)
        assert alive(keeper)
    assert not keeper.is_running() and not scratch.exists() and custodian.SCRATCH not in os.environ
    assert manifest.read(folder)["status"] == "running", "it was this process's to say"


def test_a_custodian_that_was_killed_is_replaced(alone, folder):
    ownership.hold(folder)
    first = ownership._process
    first.kill()
    first.wait()
    with ownership.scratch():
        assert ownership._process is not first and ownership._process.poll() is None
    ownership.release(folder)


def test_what_is_started_meanwhile_ends_with_the_scratch_folder(alone):
    with ownership.scratch() as scratch:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        assert until(lambda: custodian.started_under(scratch) == [child.pid], 10)
    assert child.wait(5) == -9


def test_it_needs_the_standard_library_only():
    said = "import sys; sys.path[:0] = [sys.argv[1]]; import custodian; assert not {'pandas', 'torch'} & {*sys.modules}"
    place = str(Path(custodian.__file__).parent)
    subprocess.run([sys.executable, "-I", "-S", "-c", said, place], check=True, cwd="/")
