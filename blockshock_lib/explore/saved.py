"""Saved runs as a view needs them: listed, loaded and drawn once for each state of their manifest."""

from __future__ import annotations

import base64
import binascii
import hashlib
import html
import json
import re
from functools import lru_cache
from pathlib import Path

import pandas as pd

from blockshock_lib import manifest, records, workbook
from blockshock_lib.errors import RecordError
from blockshock_lib.explore.view import DRAWING, table
from blockshock_lib.manifest import ROOT
from blockshock_lib.predict.earlier import REFERENCE
from blockshock_lib.report import figures, plots, tables

FIGURES = {
    "speed over B1": "ratio_heatmap",
    "time against N": "time_vs_n",
    "where the time goes": "stacked",
    "memory": "memory_bars",
    "roofline": "roofline",
    "the law": "law",
    "loss": "loss_curves",
    "checks (table)": "",
}
"""What a run can be asked for: words -> the function of report.plots; "" for the table of checks."""

# Where a phase shows the same by another function or of another work: its function, and what it takes after the frame.
_OF_PHASE: dict[tuple[str, str], tuple[str, dict[str, str]]] = {
    ("phase2", "ratio_heatmap"): ("ratio_heatmap", {"metric": "pass_kernel"}),
    ("phase2", "time_vs_n"): ("time_vs_n", {"metric": "pass_kernel"}),
    ("phase2", "stacked"): ("pieces_figure", {"": "pass"}),
    ("phase3", "ratio_heatmap"): ("ratio_heatmap", {"metric": "step_kernel"}),
    ("phase3", "time_vs_n"): ("time_vs_n", {"metric": "step_kernel"}),
    ("phase3", "stacked"): ("pieces_figure", {}),
    ("phase3", "memory_bars"): ("training_memory", {}),
}


def _drawing(phase: str, name: str) -> tuple[str, list[str], dict[str, str]]:
    """(function of report.plots, its arguments after the frame) that draw `name` of a run of that phase."""
    function, asked = _OF_PHASE.get((phase, name), (name, {}))
    return function, [asked[""]] if "" in asked else [], {key: value for key, value in asked.items() if key}


def call(phase: str, name: str) -> str:
    """The cell that draws `name` in the notebook of that phase."""
    function, args, options = _drawing(phase, name)
    given = [f'"{value}"' for value in args] + [f'{key}="{value}"' for key, value in options.items()]
    return f"plots.show(plots.{function}({', '.join(['frame', *given])}))"


def runs(out: Path | None = None) -> dict[str, Path]:
    """What a list shows -> folder, newest first: every run under `out` (default: the outputs), and the shipped ones."""
    found = pd.concat([workbook.runs(place) for place in dict.fromkeys((out or workbook.OUTPUTS, REFERENCE))])
    found = found.drop_duplicates("folder").sort_values(["started", "folder"], ascending=False)
    return {
        f"{one.started[:16].replace('T', ' ')} · {one.phase} · {one.machine} · {one.status} · {one.folder}": ROOT
        / one.folder
        for one in found.itertuples()
    }


def key(folder: Path) -> str:
    """The digest of a run's manifest: what is kept of a run is kept for this state of it."""
    try:
        return hashlib.sha256((folder / manifest.FILE).read_bytes()).hexdigest()
    except OSError as error:
        raise RecordError(f"{manifest.shown(folder)} holds no readable {manifest.FILE}: {error.strerror}") from None


@lru_cache(maxsize=8)
def _frame(folder: Path, _key: str) -> pd.DataFrame:
    return records.load(folder)


def figure(folder: Path, name: str) -> str:
    """One of FIGURES of a run, as HTML; drawn from its records, unless its own notebook holds the drawing already."""
    return _figure(folder, name, key(folder))


def at_hand(folder: Path, name: str) -> str | None:
    """`figure` where it takes no drawing, else None."""
    digest = key(folder)
    if (folder, name, digest) in _kept:
        return _kept[folder, name, digest]
    if found := from_notebook(folder, name):
        _kept[folder, name, digest] = found
    return found or None


_kept: dict[tuple[Path, str, str], str] = {}
_MOST = 128


def _figure(folder: Path, name: str, digest: str) -> str:
    found = at_hand(folder, name)
    if found is None:
        with DRAWING:
            frame = _frame(folder, digest)
            if name:
                function, args, options = _drawing(manifest.read(folder)["phase"], name)
                found = figures.show(getattr(plots, function)(frame, *args, **options)).data
            else:
                found = table(tables.correctness_table(frame).reset_index(), "outcome of every check")
        if len(_kept) >= _MOST:
            _kept.pop(next(iter(_kept)))
        _kept[folder, name, digest] = found
    return found


def from_notebook(folder: Path, name: str) -> str:
    """The figure as the run's own executed notebook holds it; "" where that is not what the manifest says it is.

    A run may come from a colleague: of the notebook's HTML only the picture's bytes and its text are taken.
    """
    facts = manifest.read(folder)
    notebook = workbook.NOTEBOOKS.get(facts["phase"])
    wanted = (facts.get("files") or {}).get(notebook)
    if not name or not wanted:
        return ""
    try:
        data = (folder / notebook).read_bytes()
        if hashlib.sha256(data).hexdigest() != wanted:
            return ""
        wanted = call(facts["phase"], name)
        for cell in json.loads(data)["cells"]:
            if "".join(cell["source"]).strip() == wanted:
                (output,) = cell["outputs"]
                return picture("".join(output["data"]["text/html"]))
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return ""


_PICTURE = re.compile(r'<img alt="([^"<>]*)"[^<>]*? src="data:image/png;base64,([A-Za-z0-9+/]+=*)">')


def picture(text: str) -> str:
    """`figures.show`'s HTML made anew from the one PNG and its text that `text` is; "" where it is anything else."""
    match = _PICTURE.fullmatch(text.strip())
    if not match:
        return ""
    try:
        data = base64.b64decode(match[2], validate=True)
    except binascii.Error:
        return ""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return ""
    alt = html.escape(html.unescape(match[1]))
    return f'<img alt="{alt}" style="max-width:100%" src="data:image/png;base64,{match[2]}">'
