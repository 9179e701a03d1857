"""Runs that start together, on a machine where torch's usual port is taken."""

import contextlib
import os
import socket

from blockshock_lib import manifest, records
from tests.faults.killed import command, flags, listening
from tests.runs import TINY


def test_two_runs_at_once_with_port_29500_taken(outputs):
    with socket.socket() as taken, contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # then somebody else has it
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        assert listening(29500)
        # Two that share a folder and a second, and one elsewhere.
        places = [outputs / "shared", outputs / "shared", outputs / "own"]
        runs = [stack.enter_context(command(os.environ, *flags(TINY), "--out", place)) for place in places]
        said = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], said
    folders = [path.parent for path in outputs.rglob(manifest.FILE)]
    assert sorted(folder.parent.parent.name for folder in folders) == ["own", "shared", "shared"]
    for folder in folders:
        assert manifest.read(folder)["status"] == "completed"
        assert set(records.load(folder, strict=True)["run"]) == {manifest.read(folder)["run"]}
