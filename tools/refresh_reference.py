"""Draws shipped runs again from their records, in their own folders: `python -m tools.refresh_reference [folder ...]`.

Without folders, every run under outputs/reference. Records that are files of their own are packed into one table first.
Measures nothing: records, verdicts' inputs and times of a run stay as they are.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from blockshock_lib.files import ROOT, shown
from blockshock_lib.notebook import findings, share, workbook
from blockshock_lib.notebook.pages import page
from blockshock_lib.runs import manifest, records
from blockshock_lib.runs.manifest import REFERENCE


def refresh(folder: Path, scratch: Path) -> str:
    """Packs and draws one run; returns its verdict. SystemExit where it cannot be drawn."""
    records.pack(folder)
    done = workbook.execute(manifest.read(folder)["phase"], redraw=shown(folder), out=scratch)
    if not done.html:  # of a run that was stopped there is one too
        sys.exit(f"{shown(folder)}: {done.text()}")
    drawn = done.notebook.parent
    for old in (*folder.glob("*.html"), *folder.glob("*.png")):
        old.unlink()
    shutil.rmtree(folder / "figures", ignore_errors=True)
    shutil.copytree(drawn / "figures", folder / "figures")
    page.write_html(Path(shutil.copy(done.notebook, folder)))
    facts = manifest.read(drawn)
    kept = {name: facts[name] for name in ("figures", "verdict", "verdicts", "answer") if name in facts}
    manifest.note(folder, **kept, files=manifest.digests(folder))
    return done.verdict


def refresh_findings(folder: Path, scratch: Path) -> str:
    """Weighs the shipped runs anew, after all of them were drawn."""
    done = findings.execute("reference", out=scratch)
    if not done.ok:
        sys.exit(done.text())
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(done.notebook.parent, folder)
    manifest.note(folder, run=shown(folder))
    page.write_html(folder / done.notebook.name)
    manifest.note(folder, files=manifest.digests(folder))
    return done.verdict


def main(folders: list[Path]) -> None:
    (ROOT / ".cache").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache") as scratch:
        for folder in folders:
            drawn = refresh_findings if folder.name == "findings" else refresh
            print(f"{shown(folder)}: {drawn(folder.resolve(), Path(scratch))}", flush=True)
    share.write_index(REFERENCE)  # a fresh clone has this list alone, so the shipped pages link to it


if __name__ == "__main__":
    named = [Path(text) for text in sys.argv[1:]]
    runs = [folder for folder, _ in manifest.every(REFERENCE)]
    main(named or sorted(runs, key=lambda folder: (folder.name == "findings", folder)))
