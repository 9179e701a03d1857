"""Where a reader can go from the page of a run: to all runs, the findings, and the files beside it."""

import os
from pathlib import Path
from urllib.parse import quote

from blockshock_lib.errors import RecordError
from blockshock_lib.files import ROOT
from blockshock_lib.runs import manifest, records
from blockshock_lib.runs.run import OUTPUTS


def of(notebook: Path, alone: bool = False) -> list[tuple[str, str]]:
    """(word, link) relative to the notebook's page; `alone`: only to files of the run, as a zip holds them."""
    folder = notebook.resolve().parent
    found = {}
    home = next((one for one in folder.parents if (one / "index.html").is_file() or one == OUTPUTS.resolve()), None)
    if home is not None and not alone:
        shipped = [place / "findings" / "findings.html" for place in (home, home / "reference")]
        every = [path for path in (*shipped, *sorted(home.glob("*/*-findings/findings.html"))) if path.is_file()]
        found["Runs"] = home / "index.html"
        found |= {"Findings": every[-1]} if every and every[-1].parent != folder else {}
    found["Notebook"] = folder / notebook.name
    try:
        facts = manifest.read(folder)
    except RecordError:
        facts = {}
    else:
        source = ROOT / facts["redrawn_from"] if facts.get("redrawn_from") else folder
        if facts["phase"] != "findings" and not (alone and source != folder):
            # A run that ends well packs its records once its page is made.
            packed = (source / records.PARQUET).exists() or facts["status"] == "running"
            found["Records"] = source / (records.PARQUET if packed else "records")
        if (source / "traces").is_dir() and not (alone and source != folder):
            found["Traces"] = source / "traces"
        found["Manifest"] = folder / manifest.FILE
    return [(word, quote(Path(os.path.relpath(path, folder)).as_posix())) for word, path in found.items()]
