"""The manifest of a run: what was asked, of which code and machine, how it ended, and a digest of every file."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path

from blockshock_lib import records
from blockshock_lib.errors import RecordError

ROOT = Path(__file__).resolve().parent.parent
FILE = "manifest.json"
KEYS = {"run", "phase", "status", "params", "machine", "started"}  # what every manifest holds from the start


def read(folder: Path) -> dict:
    """The manifest of a run. RecordError when there is none, it cannot be read, or it lacks one of KEYS."""
    try:
        found = json.loads((folder / FILE).read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RecordError(f"{shown(folder)} holds no readable {FILE}: {why}") from None
    if not isinstance(found, dict) or not found.keys() >= KEYS:
        raise RecordError(f"{shown(folder)} holds no readable {FILE}: it lacks one of {', '.join(sorted(KEYS))}")
    words = [found["phase"], found["status"], found["started"]]
    titled = isinstance(found["machine"], dict) and isinstance(found["machine"].get("title"), str)
    if not titled or not all(isinstance(word, str) for word in words):
        raise RecordError(f"{shown(folder)} holds no readable {FILE}: phase, status, started or machine is no text")
    return found


def every(out: Path) -> Iterator[tuple[Path, dict]]:
    """Folder and manifest of every run under `out`, by path; one that cannot be read is skipped with a warning, and so,
    silently, is what lies in a hidden folder: half a run, which is being unpacked.
    """
    for path in sorted(Path(out).glob(f"**/{FILE}")):
        if any(part.startswith(".") for part in path.relative_to(out).parts):
            continue
        try:
            yield path.parent, read(path.parent)
        except RecordError as error:
            warnings.warn(str(error), stacklevel=2)


def note(folder: Path, **facts: object) -> None:
    """Adds facts to a run's manifest, atomically; a fact that is None is taken out of it. RecordError when the manifest
    that is there cannot be read, or the new one not be written.
    """
    path = folder / FILE
    try:
        known = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise RecordError(f"{shown(path)} could not be read: {getattr(error, 'strerror', None) or error}") from None
    facts = {key: value for key, value in (known | facts).items() if value is not None}
    records.write_atomic(path, json.dumps(facts, indent=1) + "\n")


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of the run but its manifest."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != FILE)
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def shown(path: Path) -> str:
    """A path as it is printed and stored: relative to the project where it lies inside."""
    path = Path(path).absolute()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
