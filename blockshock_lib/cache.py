"""Files of what was measured on this machine: where they lie, how they are written, which driver they belong to."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def folder() -> Path:
    """$BLOCKSHOCK_CACHE, or .cache/blockshock of the working directory. It need not exist."""
    named = os.environ.get("BLOCKSHOCK_CACHE")
    return Path(named) if named else Path.cwd() / ".cache" / "blockshock"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Only one process at a time changes the file of that path. Its folder exists."""
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also by a killed process
        yield


def replace(path: Path, text: str) -> None:
    """Writes the whole file or nothing: a reader never sees half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


@functools.cache
def driver_version() -> str:
    """Of NVIDIA's driver, like "580.65.06"; "" where NVML cannot be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
        found = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # no NVML library, no driver: the module raises its own kind for each
        return ""
    return found if isinstance(found, str) else found.decode()


@functools.cache
def version_of(*sources: Path) -> str:
    """Twelve digits that change with the text of these files: what they measured is then measured again."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
