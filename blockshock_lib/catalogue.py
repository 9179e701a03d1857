"""The list of all runs as one page, outputs/index.html, with a small figure of each that is drawn only once."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import hashlib
import json
import warnings
from pathlib import Path
from urllib.parse import quote

from blockshock_lib import manifest, records
from blockshock_lib.errors import BlockShockError, RecordError, first_line
from blockshock_lib.report.pages import index
from blockshock_lib.report.pages.index import Entry, Picture
from blockshock_lib.run import CACHE, OUTPUTS

DRAWN = 1  # counted up when the small figures are drawn otherwise: those in the cache are then left alone


def write_index(out: Path = OUTPUTS, cache: Path = CACHE / "pictures") -> Path:
    """Write `out`/index.html, a page of every run under `out`, newest first, and return its path.

    A run whose manifest cannot be read is listed as damaged. Small figures are kept in `cache`, by the digest of the
    run's manifest: a second call draws none again.

    Raises: RecordError: the page could not be written; an older one is as it was.
    """
    out = Path(out)
    folders = sorted(path.parent for path in out.glob(f"**/{manifest.FILE}"))
    # A hidden folder is half a run: one that is being unpacked.
    seen = [one for one in folders if not any(part.startswith(".") for part in one.relative_to(out).parts)]
    found = [_entry(folder, out, Path(cache)) for folder in seen]
    found.sort(key=lambda pair: (pair[0], pair[1].folder), reverse=True)
    target = out / "index.html"
    records.write_atomic(target, index.html([entry for _, entry in found]))
    return target


def _entry(folder: Path, out: Path, cache: Path) -> tuple[float, Entry]:
    """When the run was started, in seconds since 1970, and what the page says of it. Anything may be in a manifest."""
    place = quote(folder.relative_to(out).as_posix())
    try:
        m = manifest.read(folder)
        card = m["machine"] if isinstance(m["machine"], dict) else {}
        received = m.get("received") if isinstance(m.get("received"), dict) else {}
    except RecordError as error:
        why = str(error).partition(f"{manifest.FILE}: ")[2] or str(error)
        return 0.0, Entry(folder=place, status="damaged", verdict=f"its manifest cannot be read: {why}")
    return _seconds(m["started"]), Entry(
        folder=place,
        phase=_short(m["phase"]),
        machine=_short(card.get("title", "unknown machine")),
        started=_short(m["started"]),
        status=_short(m["status"]),
        verdict=_short(m.get("verdict") or m.get("reason") or "", 2000),
        redrawn_from=_short(m.get("redrawn_from") or ""),
        received=_short(received.get("zip", "")),
        page=_link(folder, out, "*.html"),
        notebook=_link(folder, out, "*.ipynb"),
        picture=_picture(folder, m, out, cache),
    )


def _short(text: object, most: int = 200) -> str:
    text = str(text)
    return text if len(text) <= most else f"{text[:most]}…"


def _seconds(started: object) -> float:
    try:
        return dt.datetime.fromisoformat(str(started)).astimezone(dt.UTC).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _link(folder: Path, out: Path, pattern: str) -> str:
    path = min(folder.glob(pattern), default=None)
    return quote(path.relative_to(out).as_posix()) if path is not None else ""


def _picture(folder: Path, found: dict, out: Path, cache: Path) -> Picture:
    """The small figure of a run that has ended, from the cache or drawn; without an image where there is none."""
    if found["status"] == "running":
        return Picture(alt="still running, or cut off")
    if found.get("redrawn_from"):
        folder = (manifest.ROOT / str(found["redrawn_from"])).resolve()
        if not folder.is_relative_to(out.resolve()) or not (folder / manifest.FILE).is_file():
            return Picture(alt="no figure: the run that it redraws is not here")
    key = hashlib.sha256(f"{DRAWN}\n".encode() + (folder / manifest.FILE).read_bytes()).hexdigest()
    kept = cache / f"{key[:40]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(kept.read_text(encoding="utf-8"))
        return Picture(str(known["alt"]), base64.b64decode(known["png"], validate=True))
    picture = _drawn(folder, str(found["phase"]))
    if picture.png:
        with contextlib.suppress(RecordError):  # a cache that cannot be written costs time, nothing else
            records.write_atomic(kept, json.dumps({"alt": picture.alt, "png": base64.b64encode(picture.png).decode()}))
    return picture


def _drawn(folder: Path, phase: str) -> Picture:
    from blockshock_lib.report.pages import index_plots  # drawing takes a second to import

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a damaged record is said in the run's own verdict
            return index_plots.picture(records.load(folder), phase)
    except (BlockShockError, ValueError, KeyError, TypeError) as error:
        return Picture(alt=f"no figure: {first_line(error)}")
