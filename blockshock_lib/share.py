"""One run as a zip for a colleague, and a colleague's zip as a run: checked in whole before anything of it is believed.

A zip holds the manifest, records, traces, notebook, page and pictures of one run. Logs stay at home: they may name
paths. Nothing of a zip is ever executed or unpickled, and its page is not taken but made anew from its notebook.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from blockshock_lib import archive, manifest, records
from blockshock_lib.catalogue import write_index
from blockshock_lib.errors import RecordError, ShareError, first_line
from blockshock_lib.manifest import shown
from blockshock_lib.report.pages import page
from blockshock_lib.workbook import OUTPUTS, now

__all__ = ["pack", "unpack", "write_index"]


def pack(folder: Path | str, target: Path | str | None = None) -> Path:
    """The run in `folder` as a zip, whose path is returned; the same run gives the same bytes.

    It holds manifest.json, records/*.json, traces/*.json.gz and the notebook, page and pictures beside them. Logs and
    anything else stay behind, and so does a run in a folder of its own inside. Tracebacks in the notebook of a run that
    failed may name paths.

    Args:
        target: the zip to write; by default outputs/<date>-<name of the run>.zip, or beside a folder outside outputs/.

    Raises:
        RecordError: no run there, or the zip could not be written.
        ShareError: the run is still going on, only redraws another, holds a link, or lost or changed a record.
    """
    folder = Path(folder).resolve()
    found = manifest.read(folder)
    name = shown(folder)
    if found["status"] == "running":
        raise ShareError(f"{name} is still running, or was cut off: wait for its end, or resume it, then share it")
    if found.get("redrawn_from"):
        raise ShareError(f"{name} only redraws {found['redrawn_from']} and holds no records: share that run")
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in _files(folder)}
    known = found.get("files") or {}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items() if name != manifest.FILE}
    for file in sorted(known):
        if file.startswith(("records/", "traces/")) and archive.is_kind(file) and known[file] != digests.get(file):
            what = "has changed since the run ended" if file in digests else "is gone"
            raise ShareError(f"{name}: {file} {what}; a run is shared as it was measured, or not at all")
    found = {key: value for key, value in found.items() if key != "received"} | {"files": digests}
    files[manifest.FILE] = (json.dumps(found, indent=1) + "\n").encode()
    fault = archive.shape_fault(found) or archive.size_fault(files)
    if fault:
        raise ShareError(f"{name} cannot be shared: {fault}")
    target = Path(target) if target is not None else _default_target(folder)
    records.write_atomic(target, _zipped(files))
    return target


def unpack(path: Path | str, into: Path | str) -> Path:
    """The run of a colleague's zip as the folder `into`, which is returned; or as `into`-2, and so on, where that is
    taken. A zip that was unpacked there before, and is still whole, is not unpacked again.

    Everything is checked before the folder appears: names, kinds, sizes as they are read, the digest of every file
    and the manifest's shape. The manifest then also says what it was received as; its page is made anew.

    Raises:
        ShareError: the zip is not one of a run, is damaged, or holds what a run does not; nothing is left of it.
    """
    path, into = Path(path), Path(into)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            for place in _places(into):
                if not place.exists():
                    return _unpacked(file, path.name, digest, place)
                if _is_same(place, digest):
                    return place
    except OSError as error:
        raise ShareError(f"{path.name} could not be unpacked: {error.strerror or error}") from None
    raise ShareError(f"{shown(into)} and 98 more like it exist already")


def _unpacked(file: BinaryIO, name: str, digest: str, into: Path) -> Path:
    near = next(place for place in into.absolute().parents if place.exists())
    partial = Path(tempfile.mkdtemp(prefix=f".{into.name}.", dir=near))
    try:
        found = archive.read_into(partial, file, name)
        for notebook in sorted(partial.glob("*.ipynb")):
            try:
                page.write_html(notebook)
            except Exception as error:
                raise ShareError(f"{name}: {notebook.name} is no notebook: {first_line(error)}") from None
        facts = {"received": {"zip": name, "sha256": digest, "at": now()}, "files": manifest.digests(partial)}
        records.write_atomic(partial / manifest.FILE, json.dumps(found | facts, indent=1) + "\n")
        partial.chmod(0o755)  # mkdtemp's is for its owner alone
        into.parent.mkdir(parents=True, exist_ok=True)
        partial.rename(into)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return into


def _files(folder: Path) -> Iterator[Path]:
    """The files of the run in `folder` that go into a zip. ShareError at a link."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(one for one in folders if not (Path(place) / one / manifest.FILE).exists())
        for path in (Path(place) / one for one in (*folders, *sorted(names))):
            if path.is_symlink():
                raise ShareError(f"{shown(folder)}: {path.relative_to(folder)} is a link: a run is shared without")
            if path.is_file() and archive.is_kind(path.relative_to(folder).as_posix()):
                yield path


def _zipped(files: dict[str, bytes]) -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as made:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, (stat.S_IFREG | 0o644) << 16  # the same on every system
            made.writestr(entry, files[name], zipfile.ZIP_DEFLATED, 9)
    return whole.getvalue()


def _default_target(folder: Path) -> Path:
    out = OUTPUTS.resolve()
    if folder.is_relative_to(out) and folder != out:
        return OUTPUTS / f"{'-'.join(folder.relative_to(out).parts)}.zip"
    return folder.with_name(f"{folder.name}.zip")


def _places(into: Path) -> Iterator[Path]:
    yield into
    yield from (into.with_name(f"{into.name}-{number}") for number in range(2, 100))


def _is_same(folder: Path, digest: str) -> bool:
    """Whether `folder` holds, unchanged, what was unpacked of the zip with this digest."""
    try:
        found = manifest.read(folder)
    except RecordError:
        return False
    received = found.get("received")
    same = isinstance(received, dict) and received.get("sha256") == digest
    return same and manifest.digests(folder) == found.get("files")
