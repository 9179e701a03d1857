"""A run that is at work, to be killed or interrupted; and what is still there of it afterwards."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from blockshock_lib import manifest, workbook

LONG = {"sweep.n": [256, 512]}  # 70 cases of phase 0: some seconds of work after the first record
SECONDS = 2.0  # the deadline


def until(condition, seconds=SECONDS):
    """What `condition` gives once it is true, or at the end of the time."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def private(tmp_path: Path) -> dict[str, str]:
    """An environment whose temporary files, and whose processes, can be told from all others."""
    (tmp_path / "tmp").mkdir()
    return os.environ | {
        "TMPDIR": str(tmp_path / "tmp"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "tmp" / "runtime"),
        "PYTHONPATH": str(workbook.ROOT),
    }


def command(env, *args) -> subprocess.Popen:
    line = [sys.executable, "-m", "blockshock_lib", "run", "phase0", *map(str, args)]
    quiet = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(line, cwd=workbook.ROOT, env=env, **quiet)


def flags(settings) -> list[str]:
    return ["--hardware", "cpu", *(part for k, v in settings.items() for part in ("--set", f"{k}={v}"))]


class Traces:
    """All that a run in a private environment could leave: looked at while it works, and again when it should be gone.

    Attributes:
        folder: the run's folder, once it has written a record.
    """

    def __init__(self, tmp_path: Path, spared: int = 0):
        self.tmp, self.out, self.spared = tmp_path / "tmp", tmp_path / "out", spared
        self.folder, self.ports = None, []

    def wait_for_work(self, seconds: float = 60) -> None:
        assert until(lambda: list(self.out.rglob("records/*.json")), seconds), "no record was written"
        (self.folder,) = (path.parent for path in self.out.rglob(manifest.FILE))
        # A write that was cut short leaves this; the real ones are too quick to be caught.
        (self.folder / "records" / ".cut-0.json.1.tmp").write_text("{")
        family = self.processes()
        self.ports = [c.laddr.port for p in family for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
        assert sum("spawn_main" in name for name in family.values()) == 2, "two ranks are at work"
        assert any("custodian" in name for name in family.values())
        assert self.scratch(), "the ranks meet in a folder of the run's scratch"

    def processes(self) -> dict[psutil.Process, str]:
        """All living ones that were started in the private environment, but for the one to be spared; and what they
        run.
        """
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it may end meanwhile
                if process.pid != self.spared and process.environ().get("TMPDIR") == str(self.tmp):
                    found[process] = " ".join(process.cmdline())
        return found

    def scratch(self) -> list[Path]:
        return [path for path in self.tmp.rglob("*") if path.is_file() or path.name.startswith("blockshock-")]

    def left(self) -> list[str]:
        """Each process, listening socket and temporary file that is still there."""
        sockets = [f"port {port}" for port in self.ports if listening(port)]
        files = [*self.scratch(), *self.folder.rglob(".*.tmp")]
        return [*self.processes().values(), *sockets, *map(str, files)]

    @property
    def status(self) -> str:
        return manifest.read(self.folder)["status"]

    def gone(self) -> bool:
        return not self.left() and self.status == "interrupted"

    def end(self) -> None:
        """Leave nothing behind, whatever the test found."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


def listening(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0
