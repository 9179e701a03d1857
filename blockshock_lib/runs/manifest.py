"""The manifest of a run: what was asked, of which code and machine, how it ended, and a digest of every file."""

import difflib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from blockshock_lib import files
from blockshock_lib.errors import RecordError
from blockshock_lib.files import shown
from blockshock_lib.runs import lock

# Where dated folders go. The environment variable lets a test re-run notebooks without a trace under outputs/.
OUTPUTS = files.ROOT / os.environ.get("BLOCKSHOCK_OUTPUTS", "outputs")
REFERENCE = files.ROOT / "outputs" / "reference"
FILE = "manifest.json"
TEXTS = {"run", "phase", "status", "started", "study"}
LATER = {"verdict", "reason", "redrawn_from", "reference", "again"}  # texts that not every one holds
KEYS = TEXTS - {"study"} | {"params", "machine"}  # what every manifest holds from the start

STOPPED = {
    "free": ("interrupted", "the process that ran it ended before the run did"),
    "unknown": ("unknown", "its file system cannot lock a folder, so nobody can tell whether the run still goes on"),
}


def read(folder: Path) -> dict:
    """RecordError where it cannot be read or lacks one of KEYS. `running` without a living owner is read as STOPPED."""
    try:
        found = {"study": "linear"} | json.loads((folder / FILE).read_text())  # the only one before manifests named it
        if lacks := KEYS - found.keys():
            raise ValueError(f"it lacks {', '.join(sorted(lacks))}")
        json.dumps(found, ensure_ascii=False).encode()  # a lone surrogate is no text
        texts = {"machine's title": found["machine"]["title"]}
        texts |= {key: found.get(key, "") for key in TEXTS | LATER}
        if wrong := [key for key, text in texts.items() if not isinstance(text, str) or "\0" in text]:
            raise ValueError(f"its {', '.join(wrong)} cannot be so")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        hint = "" if Path(folder, FILE).exists() else near(folder)
        raise RecordError(f"{shown(folder)} holds no readable {FILE}: {why}{hint}") from None
    if found["status"] == "running" and (state := lock.state(folder)) in STOPPED:
        status, reason = STOPPED[state]
        found |= {"status": status, "reason": reason, "verdict": f"{found['phase']} {status}: {reason}"}
    return found


def near(folder: Path) -> str:
    """What a message about a folder that is no run's ends with: the nearest run, as the newest of a day, and `list`."""
    found = [shown(one) for one in folders(folder, "*") if not one.name.endswith("-before")][-1:]
    found = found or difflib.get_close_matches(shown(files.ROOT / folder), map(shown, folders(OUTPUTS)), n=1)
    found = [files.ROOT / one if one == str(folder) else one for one in found]  # asked for from another folder
    return f"{''.join(f'; did you mean {one}?' for one in found)}; all runs: python -m blockshock_lib list"


def folders(out: Path, below: str = "**") -> list[Path]:
    """The folder of every run under `out`, by path, but those in a hidden one: half a run, which is being unpacked."""
    found = sorted(Path(out).glob(f"{below}/{FILE}"))
    return [path.parent for path in found if not any(part.startswith(".") for part in path.relative_to(out).parts)]


def every(out: Path) -> Iterator[tuple[Path, dict]]:
    """Folder and manifest of every run under `out`, by path; one that cannot be read is skipped with a warning."""
    for folder in folders(out):
        try:
            yield folder, read(folder)
        except RecordError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)


def placed(text: str, folders: Mapping[str, Path]) -> str:
    """`text`, each run that its records name so called by where it lies, not by where it was measured."""
    names = "|".join(re.escape(name) for name in folders if "/" in name)  # a stranger's may be any word
    return re.sub(rf"({names})(?![\w-])", lambda found: shown(folders[found[0]]), text) if names else text


def note(folder: Path, **facts: object) -> None:
    """Adds facts to a run's manifest, atomically; None takes one out. RecordError where that is impossible."""
    path = folder / FILE
    try:
        known = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{shown(path)} could not be read: {getattr(error, 'strerror', None) or error}") from None
    facts = {key: value for key, value in (known | facts).items() if value is not None}
    files.write_atomic(path, json.dumps(facts, indent=1) + "\n")


class Saved(NamedTuple):
    name: str
    path: Path
    alt: str


def figures(folder: Path) -> list[Saved]:
    """The figures saved with a run, its headline first, but those that do not fit or are not there."""
    kept, found = read(folder).get("figures"), []
    for one in kept if isinstance(kept, list) else ():
        texts = [one.get(key) for key in ("name", "file", "alt")] if isinstance(one, dict) else [None]
        if all(isinstance(text, str) for text in texts) and re.fullmatch(r"figures/[\w+-]+\.png", texts[1]):
            path = folder / texts[1]
            found += [Saved(texts[0], path, texts[2])] if path.is_file() and not path.is_symlink() else []
    return found


def digests(folder: Path) -> dict[str, str]:
    found = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != FILE)
    return {p.relative_to(folder).as_posix(): files.sha256(p) for p in found}
