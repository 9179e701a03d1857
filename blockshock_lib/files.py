"""Files: the project's root, writes that happen whole or not at all, locks, digests, canonical JSON; environment."""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blockshock_lib.errors import RecordError

_ABOVE = Path(__file__).resolve().parents[1]
ROOT = _ABOVE if (_ABOVE / "params").is_dir() else Path.cwd()  # installed without a clone: the working directory


def shown(path: Path | str) -> str:
    """A path as it is printed and stored: relative to the project where it lies inside."""
    path = Path(path).absolute()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def write_atomic(path: Path, data: str | bytes) -> None:
    """Gives `path` this content, and makes its folder. RecordError where it could not: an older file is as it was."""
    # In the same folder, for os.replace is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise RecordError(f"{path.name} could not be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path, seconds: float = float("inf")) -> Iterator[None]:
    """One process at a time for a folder or, by `<stem>.lock`, a file; BlockingIOError after `seconds` of another's."""
    handle = os.open(path, os.O_RDONLY) if path.is_dir() else os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
    try:
        lock(handle, seconds)
        yield
    finally:
        os.close(handle)


def lock(handle: int, seconds: float) -> None:
    """Locks an open file or folder, until its holder ends, however it ends. Nothing where the file system cannot."""
    end = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        except OSError:
            return None


@contextlib.contextmanager
def environment(**names: str) -> Iterator[None]:
    """These variables, for this process and what it starts, as long as the block runs."""
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def sha256(what: Path | bytes | str) -> str:
    """64 hex digits of a file's content, or of bytes or a text."""
    if isinstance(what, Path):
        with open(what, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(what.encode() if isinstance(what, str) else what).hexdigest()


def seed(*parts: object) -> int:
    """Of a random generator: 56 bits that hang on the text of all parts."""
    return int(sha256("/".join(map(str, parts)))[:14], 16)


def short_digest(*paths: Path) -> str:
    """12 hex digits that change with the content of any of these files."""
    return sha256(b"".join(path.read_bytes() for path in paths))[:12]


def canonical(value: Any) -> str:
    """JSON whose text is a function of the value: keys sorted, no blanks. ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
