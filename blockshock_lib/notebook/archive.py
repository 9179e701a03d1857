"""What the zip of a run may hold: the checks that a colleague's zip passes before anything of it is believed.

Nothing of it is executed or unpickled; sizes are counted as they are read, for a header may say anything.
"""

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

from blockshock_lib import studies
from blockshock_lib.errors import RecordError, ShareError, first_line
from blockshock_lib.runs import manifest

MAX_FILES = 10_000
MAX_BYTES = 512 * 2**20  # of all files as they are unpacked, and once more of all traces as they are read
MAX_MANIFEST, MAX_NOTEBOOK = 8 * 2**20, 64 * 2**20

_WORD = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
# Whether a run has files of this name, relative to its folder.
is_kind = re.compile(
    rf"manifest\.json|records\.parquet|records/{_WORD}\.json|traces/{_WORD}\.json\.gz|"
    rf"figures/{_WORD}\.png|{_WORD}\.(?:ipynb|html|png)"
).fullmatch
_FOLDERS = ("records/", "traces/", "figures/")
_CHUNK = 2**16
# What zipfile raises, one time or another, where bits of a zip are wrong.
_BROKEN = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError)
_DIRECTORY = 512  # bytes of an entry in the directory: ours have 80


def read_into(folder: Path, file: BinaryIO, name: str) -> dict:
    """Unpacks the zip in `file`, called `name`, all but its page, into an empty folder; its manifest. Or ShareError."""
    _refuse(name, _directory_fault(file))
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            _refuse(name, _entries_fault(entries))
            digests = _extract(archive, [entry for entry in entries if not entry.is_dir()], folder, name)
    except _BROKEN as error:
        raise ShareError(f"{name} is no whole zip: {first_line(error)}") from None
    try:
        found = json.loads((folder / manifest.FILE).read_bytes())
        _refuse(name, _shape_fault(found))
        manifest.read(folder)
    except (ValueError, RecursionError, RecordError):
        raise ShareError(f"{name}: its {manifest.FILE} cannot be read") from None
    _refuse(name, _digest_fault(found["files"], digests) or _traces_fault(folder))
    return found


def _refuse(name: str, fault: str) -> None:
    if fault:
        raise ShareError(f"{name} is refused: {fault}")


def _shape_fault(found: Any) -> str:
    """What a manifest lacks for its run to be listed and drawn; its parameters are params' to judge."""
    if not isinstance(found, dict) or not found.keys() >= manifest.KEYS | {"files"}:
        return f"its {manifest.FILE} is that of no run that ended"
    known = {name: list(studies.load(name).phases) for name in studies.names()}
    study, card, files = found.get("study", "linear"), found["machine"], found["files"]
    for what, value, allowed in (
        ("study", study, list(known)),
        ("phase", found["phase"], known.get(str(study), [])),
        ("status", found["status"], ("completed", "failed", "interrupted")),
    ):
        if value not in allowed:
            return f"{what} {str(value)[:40]!r} is unknown; this version knows {', '.join(allowed)}"
    shapes = {
        **{name: isinstance(found[name], str) for name in ("run", "started")},
        "params": isinstance(found["params"], dict),
        **{name: isinstance(found.get(name, ""), str) for name in ("verdict", "answer")},
        "redrawn_from": found.get("redrawn_from", "") == "",
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
    lost = [name for name in wanted if name not in found and is_kind(name) and not name.endswith(".html")]
    return f"{lost[0]} is missing" if lost else ""


def _extract(archive: zipfile.ZipFile, entries: list[zipfile.ZipInfo], into: Path, name: str) -> dict[str, str]:
    left, digests = MAX_BYTES, {}
    for entry in entries:
        file = entry.filename
        most = MAX_MANIFEST if file == manifest.FILE else MAX_NOTEBOOK if file.endswith(".ipynb") else MAX_BYTES
        target, digest, start, size = into / file, hashlib.sha256(), b"", 0
        target.parent.mkdir(exist_ok=True)
        with archive.open(entry) as source, target.open("xb") as sink:
            while chunk := source.read(_CHUNK):
                size += len(chunk)
                if size > min(most, left):
                    _refuse(name, f"{file} is too large when unpacked")
                digest.update(chunk)
                sink.write(chunk)
                start = start or chunk[:8]
        left -= size
        digests[file] = digest.hexdigest()
        if file.endswith(".html"):
            target.unlink()
        if file.endswith(".png") and start != b"\x89PNG\r\n\x1a\n":
            _refuse(name, f"{file} is no PNG")
    del digests[manifest.FILE]
    return digests


def _directory_fault(file: BinaryIO) -> str:
    # Read before zipfile takes its whole directory into memory.
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
        if fault := _entry_fault(entry):
            return f"{entry.orig_filename!r} {fault}"
        if entry.filename.casefold() in seen:
            return f"{entry.orig_filename!r} is there twice, or in capitals too"
        seen.add(entry.filename.casefold())
    return "" if manifest.FILE in seen else f"it has no {manifest.FILE}, so it is no run"


def _entry_fault(entry: zipfile.ZipInfo) -> str:
    name, mode, folder = entry.orig_filename, entry.external_attr >> 16, entry.is_dir()
    kind = stat.S_IFMT(mode)
    ours = name in _FOLDERS and entry.file_size == 0 and kind in (0, stat.S_IFDIR)
    faults = {
        "is no folder of a run": folder and not ours,
        "is a link or no plain file": (not folder and kind not in (0, stat.S_IFREG)) or mode & 0o7000,
        "is encrypted": entry.flag_bits & 0x41,
        "is compressed in an unusual way": entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED),
        "is no file of a run": not (folder or is_kind(name)),  # a path that leads out, or has odd characters, is none
    }
    return next((fault for fault, wrong in faults.items() if wrong), "")


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
