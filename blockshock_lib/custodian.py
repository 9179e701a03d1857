"""The process that outlives a run's owner: it ends what the owner left behind, and says in the manifest what happened.

A process that is killed can do neither. This file is run as a script, on the standard library alone: torch or pandas
would take longer to load than an orphan may live. Its owner sends it, on standard input, what there is to look after,
as one line of JSON each time that changes: {"runs": [folder], "scratch": [folder]}.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import json
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

SCRATCH = "BLOCKSHOCK_SCRATCH"  # names the scratch folder to every process that is started for a run
MANIFEST = "manifest.json"
REASON = "the process that ran it ended before the run did"
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # meant for the owner, whose end is this process's work
POLL_SECONDS = 0.1
END_SECONDS = 1.0
LOCK_SECONDS = 1.0


def main(owner: int) -> None:
    """Wait until `owner`, the parent of this process, is gone or has nothing more to look after."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    told, rest, ended = {"runs": [], "scratch": []}, b"", False
    while True:
        # Asked before reading: what the owner said last is then read, however soon after it has gone.
        orphaned = os.getppid() != owner
        while not ended and select.select([0], [], [], 0 if orphaned else POLL_SECONDS)[0]:
            part = os.read(0, 1 << 16)
            ended = not part
            *lines, rest = (rest + part).split(b"\n")
            told = json.loads(lines[-1]) if lines else told
        if orphaned:
            break
        if ended:
            if not any(told.values()):
                return
            time.sleep(POLL_SECONDS)  # the owner is about to go
    for scratch in told["scratch"]:
        sweep(Path(scratch))
    for folder in told["runs"]:
        conclude(Path(folder))


def sweep(scratch: Path) -> None:
    """Kill every process that was started under this scratch folder, then remove the folder."""
    end = time.monotonic() + END_SECONDS
    while (left := started_under(scratch)) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(scratch, ignore_errors=True)


def started_under(scratch: Path) -> list[int]:
    """Ids of the living processes whose environment names this scratch folder.

    Empty where there is no /proc: kernels and ranks then end on their own, for they watch their parents.
    """
    wanted, found = f"{SCRATCH}={scratch}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def conclude(folder: Path) -> None:
    """Say `interrupted` in the manifest of a run that still says `running`; remove its half-written files."""
    with contextlib.suppress(OSError, ValueError), locked(folder):
        tidy(folder)
        known = json.loads((folder / MANIFEST).read_text())
        if known["status"] != "running":
            return
        known |= {"status": "interrupted", "reason": REASON, "verdict": f"{known['phase']} interrupted: {REASON}"}
        known |= {"ended": dt.datetime.now(dt.UTC).isoformat(timespec="seconds")}
        # As records.write_atomic does it, which this process cannot afford to import.
        temporary = folder / f".{MANIFEST}.{os.getpid()}.tmp"
        with open(temporary, "w") as file:
            file.write(json.dumps(known, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / MANIFEST)


def tidy(folder: Path) -> None:
    """Remove what a process that was killed while it wrote has left in a run's folder."""
    for path in folder.rglob(".*.tmp"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path, seconds: float = LOCK_SECONDS):
    """Hold the lock of a run's folder; BlockingIOError when another process holds it all the while.

    The system gives it back when its holder ends, however it ends. It lies on the folder itself, so that no file of it
    is left; a file system that cannot lock a folder is taken at its word, and nothing is locked.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle, seconds)
        yield
    finally:
        os.close(handle)


def lock(handle: int, seconds: float = LOCK_SECONDS) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        except OSError:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
