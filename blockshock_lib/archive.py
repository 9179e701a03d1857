"""What the zip of a run may hold: the checks that a colleague's zip passes before anything of it is believed.

Nothing of it is executed or unpickled; sizes are counted as they are read, for a header may say anything.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import stat
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from blockshock_lib import manifest
from blockshock_lib.errors import ShareError, first_line
from blockshock_lib.workbook import NOTEBOOKS

MAX_FILES = 10_000
MAX_BYTES = 512 * 2**20  # of all files as they are unpacked, and once more of all traces as they are read
MAX_MANIFEST, MAX_NOTEBOOK = 8 * 2**20, 64 * 2**20

_WORD = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
_KINDS = re.compile(rf"manifest\.json|records/{_WORD}\.json|traces/{_WORD}\.json\.gz|{_WORD}\.(?:ipynb|html|png)")
_FOLDERS = ("records/", "traces/")
_STOPPED = ("completed", "failed", "interrupted")
_CHUNK = 2**16
# What zipfile raises, one time or another, where bits of a zip are wrong.
_BROKEN = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError)
_DIRECTORY = 512  # bytes of an entry in the directory: ours have 80


def read_into(folder: Path, file: BinaryIO, name: str) -> dict:
    """Writes what the zip in `file` holds into an empty folder, all but its page, and returns its manifest.

    Args:
        name: what to call the zip in a message.

    Raises: ShareError at the first thing that a run's zip does not have, or where it is damaged.
    """
    _refuse(name, _directory_fault(file))
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            _refuse(name, _entries_fault(entries))
            found = _extract(archive, [entry for entry in entries if not entry.is_dir()], folder, name)
    except _BROKEN as error:
        raise ShareError(f"{name} is no whole zip: {first_line(error)}") from None
    _refuse(name, _traces_fault(folder))
    return found


def is_kind(name: str) -> bool:
    """Whether a run has files of this name, relative to its folder."""
    return _KINDS.fullmatch(name) is not None


def shape_fault(found: Any) -> str:
    """What a manifest lacks for its run to be listed and drawn; its parameters are params' to judge."""
    if not isinstance(found, dict) or not found.keys() >= manifest.KEYS | {"files"}:
        return f"its {manifest.FILE} is that of no run that ended"
    if found["phase"] not in (list(NOTEBOOKS) if isinstance(found["phase"], str) else ()):
        return f"phase {str(found['phase'])[:40]!r} is unknown; this version knows {', '.join(NOTEBOOKS)}"
    if found["status"] not in _STOPPED:
        return f"status {str(found['status'])[:40]!r} is none of {', '.join(_STOPPED)}"
    card, files = found["machine"], found["files"]
    shapes = {
        "run": isinstance(found["run"], str),
        "params": isinstance(found["params"], dict),
        "started": isinstance(found["started"], str),
        "verdict": isinstance(found.get("verdict", ""), str),
        "redrawn_from": not found.get("redrawn_from"),
        "code": isinstance(found.get("code", {}), dict),
        "machine": isinstance(card, dict) and isinstance(card.get("title"), str) and _texts(card.get("libraries")),
        "machine.unsupported": isinstance(card, dict) and _texts(card.get("unsupported", {})),
        "files": _texts(files) and all(re.fullmatch("[0-9a-f]{64}", digest) for digest in files.values()),
    }
    wrong = [name for name, right in shapes.items() if not right]
    return f"{', '.join(wrong)} in its {manifest.FILE} cannot be so" if wrong else ""


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _digest_fault(wanted: dict[str, str], found: dict[str, str]) -> str:
    for name, digest in found.items():
        if wanted.get(name) != digest:
            return f"{name} is not the file that its {manifest.FILE} tells of"
    lost = [name for name in wanted if name not in found and _KINDS.fullmatch(name) and not name.endswith(".html")]
    return f"{lost[0]} is missing" if lost else ""


def size_fault(files: dict[str, bytes]) -> str:
    if len(files) > MAX_FILES:
        return f"it holds more than {MAX_FILES} files"
    return f"it holds more than {MAX_BYTES} bytes" if sum(map(len, files.values())) > MAX_BYTES else ""


def _extract(archive: zipfile.ZipFile, entries: list[zipfile.ZipInfo], into: Path, name: str) -> dict:
    """Writes the files into the folder `into`, but no page; returns the manifest."""
    budget, digests, whole = MAX_BYTES, {}, b""
    for entry in entries:
        kept = not entry.filename.endswith(".html")
        most = {"manifest.json": MAX_MANIFEST}.get(entry.filename, MAX_BYTES)
        most = min(budget, MAX_NOTEBOOK if entry.filename.endswith(".ipynb") else most)
        target, digest, size = into / entry.filename, hashlib.sha256(), 0
        target.parent.mkdir(exist_ok=True)
        with archive.open(entry) as source, target.open("xb") as sink:
            # Counted here, for a header may say anything.
            while chunk := source.read(_CHUNK):
                size += len(chunk)
                _refuse(name, f"{entry.filename} is too large when unpacked" if size > most else "")
                digest.update(chunk)
                sink.write(chunk)
        budget -= size
        digests[entry.filename] = digest.hexdigest()
        if entry.filename == manifest.FILE:
            whole = target.read_bytes()
        if not kept:
            target.unlink()
        elif entry.filename.endswith(".png"):
            with target.open("rb") as file:
                _refuse(name, "" if file.read(8) == b"\x89PNG\r\n\x1a\n" else f"{entry.filename} is no PNG")
    try:
        found = json.loads(whole)
    except (ValueError, RecursionError):
        raise ShareError(f"{name}: its {manifest.FILE} cannot be read") from None
    _refuse(name, shape_fault(found))
    digests.pop(manifest.FILE)
    _refuse(name, _digest_fault(found["files"], digests))
    return found


def _directory_fault(file: BinaryIO) -> str:
    """What is wrong with the end of the zip, read before zipfile takes its whole directory into memory."""
    end = file.seek(0, io.SEEK_END)
    file.seek(max(0, end - 42))
    tail = file.read()
    if tail[-22:-18] != b"PK\5\6" or tail[-2:] != b"\0\0" or tail[:4] == b"PK\6\7":
        return "it is no plain zip file"
    return "" if int.from_bytes(tail[-10:-6], "little") <= _DIRECTORY * MAX_FILES else "it holds too many files"


def _entries_fault(entries: list[zipfile.ZipInfo]) -> str:
    if len(entries) > MAX_FILES:
        return f"it holds more than {MAX_FILES} files"
    seen: set[str] = set()
    for entry in entries:
        fault = _entry_fault(entry)
        if fault:
            return f"{entry.orig_filename!r} {fault}"
        if entry.filename.casefold() in seen:
            return f"{entry.orig_filename!r} is there twice, or in capitals too"
        seen.add(entry.filename.casefold())
    return "" if manifest.FILE in seen else f"it has no {manifest.FILE}, so it is no run"


def _entry_fault(entry: zipfile.ZipInfo) -> str:
    name, mode = entry.orig_filename, entry.external_attr >> 16
    if name != entry.filename or not name.isprintable():
        return "has a character that no file name has"
    if "\\" in name or name.startswith("/") or re.match(r"[A-Za-z]:", name):
        return "is no relative path of this kind of zip"
    if ".." in name.split("/"):
        return "leads out of the folder"
    if entry.is_dir():
        usual = name in _FOLDERS and entry.file_size == 0 and stat.S_IFMT(mode) in (0, stat.S_IFDIR)
        return "" if usual else "is no folder of a run"
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG) or mode & 0o7000:
        return "is a link or something else that is no plain file"
    if entry.flag_bits & 0x1 or entry.flag_bits & 0x40:
        return "is encrypted"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "is compressed in an unusual way"
    return "" if _KINDS.fullmatch(name) else "is no file of a run"


def _traces_fault(folder: Path) -> str:
    left = MAX_BYTES
    for path in sorted(folder.glob("traces/*.json.gz")):
        try:
            with gzip.open(path) as trace:
                while chunk := trace.read(_CHUNK):
                    left -= len(chunk)
                    if left < 0:
                        return f"traces/{path.name} is too large when read"
        except (OSError, EOFError, zlib.error) as error:
            return f"traces/{path.name} is no whole trace: {error}"
    return ""


def _refuse(name: str, fault: str) -> None:
    if fault:
        raise ShareError(f"{name} is refused: {fault}")
