"""All runs as one page; one run as a zip, without its logs, which may name paths; a colleague's zip as a run.

A zip is checked in whole before anything of it is believed; nothing of it is executed or unpickled, its page made anew.
"""

import base64
import contextlib
import datetime as dt
import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from PIL import Image

from blockshock_lib.errors import RecordError, ShareError, first_line
from blockshock_lib.files import ROOT, sha256, shown, write_atomic
from blockshock_lib.notebook import archive
from blockshock_lib.notebook.pages import page
from blockshock_lib.runs import manifest, records
from blockshock_lib.runs.run import CACHE, OUTPUTS, now

WIDTH = 560  # pixels of a figure in the list: twice what it shows, for fine screens


def write_index(out: Path = OUTPUTS) -> Path:
    """Writes `out`/index.html and returns its path: the shipped runs of each study behind its answer, the findings and
    real GPUs first, then all others, newest first.
    """
    out = Path(out)
    entries = [_entry(folder, out) for folder in manifest.folders(out)]
    entries.sort(key=lambda entry: (entry["seconds"], entry["folder"]), reverse=True)
    shipped = [entry for entry in entries if "reference" in (out.name, entry["folder"].partition("/")[0])]
    # Of a phase the first run before further ones, whose folders have longer names.
    shipped.sort(key=lambda e: (e["phase"] != "findings", e["cpu"], e["phase"], len(e["folder"]), e["folder"]))
    shows: dict[tuple, set] = {}  # of a phase on a machine the first shows its figure: the page stays short
    for one in shipped:
        if one["picture"]:
            said = shows.setdefault((one["study"], one["phase"], one["machine"]), set())
            one["later"], one["again"] = bool(said), one["line"] in said
            said.add(one["line"])
    of = {name: [one for one in shipped if one["study"] == name] for name in dict.fromkeys(s["study"] for s in shipped)}
    groups = [(f"The shipped answers: {name}", _answer(name, out), some) for name, some in of.items()]
    groups += [("Yours", ("", ""), mine)] if (mine := [one for one in entries if one not in shipped]) else []
    phases, machines = (sorted({entry[key] for entry in entries}) for key in ("phase", "machine"))
    given = dict(groups=groups, phases=phases, machines=machines, count=len(entries))
    text = page.document("index.html", "Block-Shock runs", **given)
    write_atomic(out / "index.html", text)
    return out / "index.html"


def _answer(study: str, out: Path) -> tuple[str, str]:
    # As docs/results says it, from the shipped records, and the way there from `out`; "" twice of a study without.
    path = ROOT / "docs" / "results" / f"{study}.md"
    found = path.read_text("utf-8").split("\n\n", 3) if path.is_file() else []
    return (found[2], quote(os.path.relpath(path, out))) if len(found) > 3 else ("", "")


def _entry(folder: Path, out: Path) -> dict[str, object]:
    # All of it is text of a manifest, which anybody may have written; links are relative to the list.
    entry = dict.fromkeys(("redrawn_from", "received", "page", "notebook", "picture", "alt", "note"), "")
    entry |= {name: f"unknown {name}" for name in ("study", "phase", "machine")}
    entry |= dict(seconds=0.0, when="unknown time", cpu=False, later=False, again=False)
    entry["folder"] = quote(folder.relative_to(out).as_posix())
    try:
        found = manifest.read(folder)
    except RecordError as error:
        why = str(error).partition(f"{manifest.FILE}: ")[2] or str(error)
        return entry | dict(status="damaged", tone="bad", line=f"its manifest cannot be read: {why}", more=[])
    with contextlib.suppress(ValueError, OverflowError):
        entry["seconds"] = dt.datetime.fromisoformat(found["started"]).astimezone(dt.UTC).timestamp()
    for key, pattern in (("page", "*.html"), ("notebook", "*.ipynb")):
        if path := min(folder.glob(pattern), default=None):
            entry[key] = quote(path.relative_to(out).as_posix())
    verdict = _short(found.get("verdict") or found.get("reason") or "", 2000)
    answer = _short(found.get("answer") or "", 2000) if found["status"] in ("completed", "running") else ""
    received = found.get("received")
    entry["picture"], entry["alt"] = _picture(folder, found)
    texts = {key: found.get(key) or "" for key in ("study", "phase", "status", "redrawn_from")}
    texts |= dict(machine=found["machine"]["title"], when=page.moment(found["started"]))
    texts |= dict(received=received.get("zip", "") if isinstance(received, dict) else "")
    entry |= {key: _short(text) for key, text in texts.items()}
    entry["note"] = _short(found.get("reason") or "") if found["status"] == "completed" else ""
    entry["cpu"] = "CPU" in entry["machine"]
    line, *more = [part for part in ([answer] if answer else []) + verdict.split(" · ") if part] or [""]
    return entry | dict(tone=page.tone(found["status"], verdict), line=line, more=more)


def _short(text: object, most: int = 200) -> str:
    text = str(text)
    return text if len(text) <= most else f"{text[:most]}…"


def _picture(folder: Path, found: dict) -> tuple[str, str]:
    # The run's first saved figure as a small PNG in base64 and its alternative text, or no picture and why.
    if found["status"] == "running":
        return "", "still running"
    if not (kept := manifest.figures(folder)):
        return "", "no figure is saved with this run: make report RUN=folder draws it"
    try:
        small = CACHE / "pictures" / f"{sha256(kept[0].path)}-{WIDTH}.png"  # most runs were in the last list, too
        if not small.is_file():
            image, data = Image.open(kept[0].path).convert("RGB"), io.BytesIO()
            image.thumbnail((WIDTH, WIDTH))
            image.quantize(64, dither=Image.Dither.NONE).save(data, format="png", optimize=True)
            with contextlib.suppress(OSError):
                write_atomic(small, data.getvalue())
        data = small.read_bytes() if small.is_file() else data.getvalue()
        return base64.b64encode(data).decode(), _short(kept[0].alt, 2000)
    except Exception:  # a PNG that somebody made wrong raises anything, SyntaxError too
        return "", "its figure cannot be read"


def pack(folder: Path | str, target: Path | str | None = None) -> Path:
    """The run in `folder` as a zip; the same run gives the same bytes. A failed run's notebook may name paths. `target`
    is by default outputs/<date>-<name of the run>.zip, or beside a folder outside outputs/. RecordError: no run, or no
    write; ShareError: it is still going on, only redraws another, holds a link, or lost or changed a record.
    """
    folder = Path(folder).resolve()
    found, name = manifest.read(folder), shown(folder)
    if found["status"] == "running":
        raise ShareError(f"{name} is still running: wait for its end, then share it")
    if found.get("redrawn_from"):
        raise ShareError(f"{name} only redraws {found['redrawn_from']} and holds no records: share that run")
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise ShareError(f"{shown(folder)}: {path.relative_to(folder)} is a link: a run is shared without")
        if path.is_file() and archive.is_kind(file := path.relative_to(folder).as_posix()):
            files[file] = path.read_bytes()
    for notebook in (one for one in folder.glob("*.ipynb") if one.with_suffix(".html").name in files):
        with contextlib.suppress(Exception):  # somebody edited the notebook into no notebook: its page stays
            files[notebook.with_suffix(".html").name] = page.render(notebook, alone=True).encode()
    digests = {file: sha256(data) for file, data in files.items() if file != manifest.FILE}
    for file, digest in sorted((found.get("files") or {}).items()):
        if file.startswith(("records", "traces/")) and archive.is_kind(file) and digest != digests.get(file):
            what = "has changed since the run ended" if file in digests else "is gone"
            raise ShareError(f"{name}: {file} {what}; a run is shared as it was measured, or not at all")
    found = {key: value for key, value in found.items() if key != "received"} | {"files": digests}
    files[manifest.FILE] = (json.dumps(found, indent=1) + "\n").encode()
    if target is None:
        inside = folder.relative_to(OUTPUTS.resolve()).parts if folder.is_relative_to(OUTPUTS.resolve()) else ()
        target = OUTPUTS / f"{'-'.join(inside)}.zip" if inside else folder.with_name(f"{folder.name}.zip")
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as made:
        for file in sorted(files):
            entry = zipfile.ZipInfo(file, (1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, (stat.S_IFREG | 0o644) << 16  # the same on every system
            made.writestr(entry, files[file], zipfile.ZIP_DEFLATED, 9)
    with tempfile.TemporaryDirectory() as scratch:
        archive.read_into(Path(scratch), whole, name)  # what a colleague could not unpack is not packed
    write_atomic(Path(target), whole.getvalue())
    return Path(target)


def unpack(path: Path | str, into: Path | str) -> Path:
    """The run of a colleague's zip as the folder `into`, or `into`-2 and so on where that is taken; one that was
    unpacked there before, and is still whole, is not unpacked again. The manifest also says what it was `received` as.
    ShareError where the zip is not one of a run, or is damaged; nothing is left of it.
    """
    path, into = Path(path), Path(into)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            for place in (into, *(into.with_name(f"{into.name}-{number}") for number in range(2, 100))):
                if not place.exists():
                    return _unpacked(file, path.name, digest, place)
                with contextlib.suppress(RecordError):
                    found = manifest.read(place)
                    same = isinstance(found.get("received"), dict) and found["received"].get("sha256") == digest
                    if same and manifest.digests(place) == found.get("files"):
                        return place
    except OSError as error:
        raise ShareError(f"{path.name} could not be unpacked: {error.strerror or error}") from None
    raise ShareError(f"{shown(into)} and 98 more like it exist already")


def _unpacked(file: BinaryIO, name: str, digest: str, into: Path) -> Path:
    near = next(place for place in into.absolute().parents if place.exists())
    partial = Path(tempfile.mkdtemp(prefix=f".{into.name}.", dir=near))
    try:
        found = archive.read_into(partial, file, name)
        if records.find(partial) is not None:
            _try_table(partial, name)
        for notebook in sorted(partial.glob("*.ipynb")):
            try:
                page.write_html(notebook)
            except Exception as error:
                raise ShareError(f"{name}: {notebook.name} is no notebook: {first_line(error)}") from None
        facts = {"received": {"zip": name, "sha256": digest, "at": now()}, "files": manifest.digests(partial)}
        write_atomic(partial / manifest.FILE, json.dumps(found | facts, indent=1) + "\n")
        partial.chmod(0o755)  # mkdtemp's is for its owner alone
        into.parent.mkdir(parents=True, exist_ok=True)
        partial.rename(into)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return into


def _try_table(folder: Path, name: str) -> None:
    """Opens a stranger's table of records in a process of its own first: a wrong one can end it, or take all memory."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33)); "
        "from blockshock_lib.runs import records; records.load(sys.argv[1], strict=True)"
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        command = [sys.executable, "-c", code, folder]
        if not subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120).returncode:
            return
    raise ShareError(f"{name} is refused: its table of records cannot be opened")
