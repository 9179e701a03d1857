"""Which runs this process owns: their locks, their scratch folder, and the custodian that looks after both.

The process that opens a run owns it. A notebook executed by a command is the exception: there the command owns the run,
and the kernel, which it named the folder to, only works on it. The owner alone says that a run is completed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from blockshock_lib import custodian
from blockshock_lib.errors import LaunchError
from blockshock_lib.manifest import shown

RUN = "BLOCKSHOCK_RUN"  # the folder of the run that a command owns, for the kernel that it starts

_guard = threading.RLock()  # a notebook may measure in a thread
_held: dict[Path, int] = {}
_scratch: list[Path] = []
_process: subprocess.Popen | None = None


def hold(folder: Path) -> None:
    """Own the run in `folder`: nobody else can until `release`, or until this process ends.

    Raises: LaunchError when a living process owns it.
    """
    folder = folder.resolve()
    with _guard:
        if folder in _held or borrowed(folder):
            return
        handle = os.open(folder, os.O_RDONLY)
        try:
            custodian.lock(handle)
        except BlockingIOError:
            os.close(handle)
            raise LaunchError(f"{shown(folder)}: this run is still going on; wait for its end, or stop it") from None
        _held[folder] = handle
        _tell()


def release(folder: Path) -> None:
    """Own the run in `folder` no longer, and leave no half-written file there; does nothing where it is not owned."""
    with _guard:
        handle = _held.pop(folder.resolve(), None)
        if handle is not None:
            custodian.tidy(folder)
            _tell()
            os.close(handle)


def borrowed(folder: Path) -> bool:
    """Whether the command that started this kernel owns the run in `folder`."""
    return os.environ.get(RUN) == str(folder.resolve())


@contextlib.contextmanager
def scratch(**environment: str) -> Iterator[Path]:
    """A folder for whatever is temporary; at the end it is removed, and no process started meanwhile is left.

    BLOCKSHOCK_SCRATCH names it to the processes that are started. In a kernel that a command started it is the
    command's; while this process has one already, it is that one.

    Args:
        environment: more variables to set meanwhile.
    """
    with _guard:
        ours = not _scratch and not (RUN in os.environ and custodian.SCRATCH in os.environ)
        if ours:
            _scratch.append(Path(tempfile.mkdtemp(prefix="blockshock-")))
            _tell()
        place = _scratch[0] if _scratch else Path(os.environ[custodian.SCRATCH])
    wanted = {custodian.SCRATCH: str(place)} | environment
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield place
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
        if ours:
            custodian.sweep(place)
            with _guard:
                _scratch.remove(place)
                _tell()


def _tell() -> None:
    # What there is to look after, to the custodian; it is started with the first thing and leaves after the last.
    global _process
    told = {"runs": [str(folder) for folder in _held], "scratch": [str(folder) for folder in _scratch]}
    if _process is None or _process.poll() is not None:  # it was killed: another takes its place
        _process = _start() if any(told.values()) else None
    if _process is None:
        return
    with contextlib.suppress(OSError):
        _process.stdin.write(json.dumps(told).encode() + b"\n")
    if not any(told.values()):
        with contextlib.suppress(OSError):
            _process.stdin.close()
        try:
            _process.wait(custodian.END_SECONDS)
        except subprocess.TimeoutExpired:  # stopped by somebody: there is nothing that it is needed for
            _process.kill()
            _process.wait()
        _process = None


@atexit.register
def _leave() -> None:
    # A custodian that still has something to do begins it when this process is gone, so nobody waits for it.
    if _process is not None:
        _process.stdin.close()
        _process.returncode = 0


def _start() -> subprocess.Popen:
    # A session of its own: Ctrl-C and the end of a terminal are the owner's to hear. None of our variables: a process
    # that has an owner's scratch folder in its environment is swept with it. Blocked signals are inherited, so that
    # none can end it before it has said which it ignores.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, custodian.IGNORED)
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", custodian.__file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env={name: value for name, value in os.environ.items() if not name.startswith("BLOCKSHOCK_")},
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
