"""Re-execute notebooks and keep their outputs on purpose: python -m tools.update_notebooks [--commit] notebooks/*.ipynb

Prints what changed in the tables that nbval compares, row by row. Nothing is written unless every notebook ran through.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from itertools import zip_longest
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from blockshock_lib import files
from blockshock_lib.errors import BlockShockError
from blockshock_lib.notebook import terminal
from blockshock_lib.runs import records

ROOT = Path(__file__).resolve().parent.parent
IGNORED = "nbval-ignore-output"
VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"
MESSAGE = "Re-execute the notebooks"
SCRATCH = ".cache/notebooks"  # of runs that are measured meanwhile, and are listed by none that comes later


def execute(notebook: NotebookNode, folder: Path, seconds: int = 600) -> NotebookNode:
    """A copy of the notebook, executed in `folder`; raises CellExecutionError at the first cell that does."""
    fresh = copy.deepcopy(notebook)
    # record_timing would put the time of day into every cell. ipykernel warns of its loopback sockets at each start.
    client = NotebookClient(
        fresh,
        timeout=seconds,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--log-level=40"],
    )
    # On a CPU, and beside no run of this machine, which some of them list.
    client.execute(env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "BLOCKSHOCK_OUTPUTS": SCRATCH})
    return steady(fresh)


def steady(notebook: NotebookNode) -> NotebookNode:
    """The notebook without what changes from one execution to the next although nothing has."""
    notebook.metadata.pop("papermill", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        cell.metadata.pop("papermill", None)
    widgets = notebook.metadata.get("widgets", {}).get(STATE, {}).get("state", {})
    # A widget's id is drawn at random; its place in the order of creation serves as well.
    names = {name: f"{number:032x}" for number, name in enumerate(widgets, start=1)}
    if names:
        text = re.sub("|".join(map(re.escape, names)), lambda found: names[found[0]], json.dumps(notebook))
        notebook = nbformat.from_dict(json.loads(text))
    return notebook


def keep(notebook: NotebookNode, path: Path) -> None:
    """Write the notebook, whole or not at all; RecordError if it cannot, or if it names a folder of this machine."""
    text = nbformat.writes(notebook) + "\n"
    for place in {ROOT, Path.home(), Path(sys.prefix), Path(tempfile.gettempdir())}:
        if len(place.parts) > 1 and f"{place}/" in text:
            raise records.RecordError(f"{path.name} names {place}/, a folder of this machine, so it is not kept")
    files.write_atomic(path, text)


def changes(old: NotebookNode, new: NotebookNode) -> tuple[list[str], int]:
    """What nbval would find to differ, as lines to read, and how many cells it does not compare."""
    lines, ignored = [], 0
    before = {cell.get("id", place): cell for place, cell in enumerate(old.cells)}
    for place, cell in enumerate(new.cells):
        if cell.cell_type != "code":
            continue
        if IGNORED in cell.metadata.get("tags", []):
            ignored += 1
            continue
        earlier = before.get(cell.get("id", place), {}).get("outputs", [])
        differing = [
            line
            for one, other in zip_longest(earlier, cell.outputs, fillvalue={})
            if compared(one) != compared(other)
            for line in difference(rows(one), rows(other))
        ]
        if differing:
            lines += ["", f"{cell.get('id', place)}: {cell.source.strip().splitlines()[-1]}", *differing]
    return lines, ignored


def compared(output: dict) -> object:
    """Of an output, what nbval compares; None of none."""
    data = {kind: text for kind, text in output.get("data", {}).items() if kind != VIEW and "image" not in kind}
    return data or output.get("text") or output.get("evalue")


def rows(output: dict) -> list[list[str]]:
    """An output as rows of cells: those of its HTML table, else its lines of text."""
    data = output.get("data", {})
    reader = _Table()
    reader.feed(data.get("text/html", ""))
    if reader.rows:
        return reader.rows
    text = data.get("text/plain") or output.get("text") or output.get("evalue") or ""
    return [[line] for line in text.splitlines()]


class _Table(HTMLParser):
    """Rows of the tables in HTML. A cell that spans rows or columns is written once, and blank below and beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._below: dict[int, int] = {}  # column -> rows yet to be filled by a cell above
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            row, spans = self.rows[-1], dict(attrs)
            while self._below.get(len(row), 0):
                self._below[len(row)] -= 1
                row.append("")
            wide = int(spans.get("colspan") or 1)
            self._below |= dict.fromkeys(range(len(row), len(row) + wide), int(spans.get("rowspan") or 1) - 1)
            self._at = len(row)
            row += [""] * wide
            self._open = True

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag not in ("td", "th", "tr")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.rows[-1][self._at] += " ".join(data.split())


def difference(old: list[list[str]], new: list[list[str]]) -> list[str]:
    """Two tables as aligned text: - what was, + what is; of what stayed, the first row and a mark."""
    widths = [max(map(len, column)) for column in zip_longest(*old, *new, fillvalue="")]

    def text(sign: str, row: list[str]) -> str:
        return f"{sign} {'  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))}".rstrip()

    lines = []
    steps = difflib.SequenceMatcher(None, [*map(tuple, old)], [*map(tuple, new)], autojunk=False).get_opcodes()
    for step, a, b, c, d in steps:
        if step == "equal":
            lines += [text(" ", old[0])] if a == 0 else []
            lines += ["  ..."] if b - a > (a == 0) else []
            continue
        lines += [text("-", row) for row in old[a:b]] + [text("+", row) for row in new[c:d]]
    return lines


def commit(paths: list[Path], done: bool) -> None:
    """Commit these files and nothing else, or say how; RecordError when git refuses."""
    names = [str(path) for path in paths]
    if not done:
        print(f'\nlook at them, then: git add {" ".join(names)} && git commit -m "{MESSAGE}" -- {" ".join(names)}')
        return
    for command in (["add", "--", *names], ["commit", "--quiet", "-m", MESSAGE, "--only", "--", *names]):
        ran = subprocess.run(["git", *command], capture_output=True, text=True)
        if ran.returncode:
            raise records.RecordError(f"git {command[0]} refused: {(ran.stderr or ran.stdout).strip()}")
    print("\ncommitted")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", action="store_true", help="also commit these notebooks, and nothing else")
    parser.add_argument("--seconds", type=int, default=600, help="deadline of a cell (default: 600)")
    parser.add_argument("notebooks", nargs="+", type=Path)
    args = parser.parse_args(argv)
    try:
        old = {path: nbformat.read(path, as_version=4) for path in args.notebooks}
        new = {}
        with terminal.working("nbval-update"):
            for path, notebook in old.items():
                terminal.note(f"executing {path}")
                shutil.rmtree(ROOT / SCRATCH, ignore_errors=True)
                new[path] = execute(notebook, path.parent, args.seconds)
        for path, notebook in new.items():
            keep(notebook, path)
            lines, ignored = changes(old[path], notebook)
            print("\n".join([f"{path}: {ignored} cells not compared", *(lines or ["no deterministic table changed"])]))
        commit(args.notebooks, args.commit)
    except (OSError, BlockShockError, CellExecutionError, TimeoutError, ValueError) as error:
        print(f"error: no notebook was committed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
