"""Which runs this process owns: their locks, and the scratch folder of what it starts for them.

The process that opens a run owns it, and alone says that it is completed; where a command executes a notebook, the
command. However a holder ends, its lock is free: a run that says `running` then was interrupted.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from blockshock_lib import files
from blockshock_lib.errors import LaunchError

RUN = "BLOCKSHOCK_RUN"  # the folder of the run that a command owns, for the kernel that it starts
SCRATCH = "BLOCKSHOCK_SCRATCH"  # names the scratch folder to every process that is started for a run
PREFIX = "blockshock-run-"
HOLD_SECONDS = 1.0

_guard = threading.RLock()  # a notebook may measure in a thread
_held: dict[Path, int] = {}
_scratch: list[Path] = []


def hold(folder: Path) -> None:
    """Own the run in `folder` until `release`, or until this process ends. LaunchError where a living one owns it."""
    folder = folder.resolve()
    with _guard:
        if folder in _held or borrowed(folder):
            return
        handle = os.open(folder, os.O_RDONLY)
        try:
            files.lock(handle, HOLD_SECONDS)
        except BlockingIOError:
            os.close(handle)
            raise LaunchError(f"{files.shown(folder)}: this run is still going on; wait, or stop it") from None
        _held[folder] = handle
        tidy(folder)


def release(folder: Path) -> None:
    with _guard:
        handle = _held.pop(folder.resolve(), None)
        if handle is not None:
            tidy(folder)
            os.close(handle)


def borrowed(folder: Path) -> bool:
    """Whether the command that started this kernel owns the run in `folder`."""
    return os.environ.get(RUN) == str(folder.resolve())


def state(folder: Path) -> str:
    """Whether a living process owns the run in `folder`: "held", "free", or "unknown" where nothing can be locked."""
    if folder.resolve() in _held or borrowed(folder):
        return "held"
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return "held" if isinstance(error, BlockingIOError) else "unknown"
    finally:
        os.close(handle)
    return "free"


def tidy(folder: Path) -> None:
    """Remove what a process that was killed while it wrote has left in a run's folder."""
    for path in folder.rglob(".*.tmp"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def scratch(**environment: str) -> Iterator[Path]:
    """A folder for what is temporary, told to started processes in BLOCKSHOCK_SCRATCH beside more variables; in a
    kernel that a command started it is the command's.
    """
    with _guard, contextlib.ExitStack() as stack:
        if not _scratch and not (RUN in os.environ and SCRATCH in os.environ):
            sweep_stale()
            _scratch.append(stack.enter_context(_new_scratch()))
            stack.callback(_scratch.clear)
        place = _scratch[0] if _scratch else Path(os.environ[SCRATCH])
        ours = stack.pop_all()
    with ours, files.environment(**{SCRATCH: str(place)} | environment):
        yield place


def sweep_stale() -> None:
    """Remove the scratch folders whose makers have gone; what these had started watches its parent, and has ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # its maker lives, or another user's does, or nobody can tell
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


@contextlib.contextmanager
def _new_scratch() -> Iterator[Path]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with files.locked(folder):
            if folder.exists():  # else another process swept it before it was locked
                try:
                    return (yield folder)
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
