"""Which code runs: the commit, and the digest of the code that can change what a run of a study measures.

A kernel keeps what it imported, its ranks import what is on disk: where they differ it is stale. Loads nothing heavy.
"""

import ast
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from blockshock_lib import studies
from blockshock_lib.engine.study import Study
from blockshock_lib.files import canonical, sha256

HERE = Path(__file__).resolve().parents[2]
_IMPORT = re.compile(
    r"^\s*(?:from (blockshock_lib[\w.]*) import (\([^)]*\)|.+)|import (blockshock_lib[\w.]*))", re.MULTILINE
)
_PLACE = re.compile(r'"(blockshock_lib[\w.]*):')  # "module:name", resolved when it is needed


def library(root: Path = HERE) -> dict[str, str]:
    found = {}
    for path in sorted((root / "blockshock_lib").rglob("*.*")):
        with contextlib.suppress(FileNotFoundError):  # an editor may be replacing it
            if path.suffix in (".py", ".cu"):
                found[path.relative_to(root).as_posix()] = sha256(path)
    return found


AT_IMPORT = library()


def digest(study: Study | None = None, root: Path = HERE) -> str:
    """12 hex digits of what can change what a run of the study measures (see `measured`); without a study, of all."""
    return sha256(canonical(library(root) if study is None else measured(study, root)))[:12]


def measured(study: Study, root: Path = HERE) -> dict[str, str]:
    """File -> its code, of all that a rank imports, at once or late, to measure a case of the study. Of a study's first
    file no import counts: it names the report. How a run is opened, drawn and told changes no row.
    """
    place, files = _file(studies.module_of(study.name), root), [root / "blockshock_lib/runs/measure.py"]
    if place is None:  # a study that is not ours: all of it
        place = Path(importlib.util.find_spec(studies.module_of(study.name)).origin).resolve()
        files += place.parent.rglob("*.py") if place.name == "__init__.py" else [place]
    else:
        brought = study.problem.partition(":")[0], study.case.__module__, study.expand.__module__
        files += (_file(module, root) for module in brought)
    found, asked = dict[str, str](), set[str]()  # the latter: modules, each looked for once
    while files:
        path = files.pop()
        ours = path is not None and path.is_relative_to(root)
        name = "" if path is None else path.relative_to(root if ours else place.parent).as_posix()
        if name in {"", "blockshock_lib/studies/__init__.py", *found} or not path.is_file():
            continue
        text = path.read_text("utf-8")
        found[name] = plain(text) if path.suffix == ".py" else text
        if not (ours and path.name == "__init__.py" and path.parents[1].name == "studies"):
            files += (_file(module, root) for module in _named(text) - asked)
            asked |= _named(text)
        if ours:
            files += [*path.parent.glob("*.cu"), *(up / "__init__.py" for up in path.parents if root in up.parents)]
    return found


@cache
def _named(text: str) -> frozenset[str]:
    """The library's modules, and what may be one, that a file imports anywhere or names as "module:name"."""
    found = _PLACE.findall(text)
    for source, names, module in _IMPORT.findall(text):
        found += [module] if module else [source, *(f"{source}.{name}" for name in re.findall(r"\w+", names))]
    return frozenset(found)


def _file(module: str, root: Path) -> Path | None:
    place = root / module.replace(".", "/")
    return next(filter(Path.is_file, (place.with_suffix(".py"), place / "__init__.py")), None)


@cache
def plain(text: str, node: ast.stmt | None = None) -> str:
    """The lines of a file, or of a statement in it, but for docstrings, lines of comment and blank ones."""
    lines, docs, strings = list(enumerate(text.splitlines(), 1)), set(), set()
    with contextlib.suppress(SyntaxError):  # of a file that is being edited
        for one in ast.walk(node or ast.parse(text)):
            if isinstance(one, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(one) is not None:
                docs.update(range(one.body[0].lineno, one.body[0].end_lineno + 1))
            elif isinstance(one, ast.Constant | ast.JoinedStr):
                strings.update(range(one.lineno, one.end_lineno + 1))
    if node:
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
        lines = lines[first - 1 : node.end_lineno]
    silent = docs | {at for at, line in lines if at not in strings and line.strip()[:1] in ("", "#")}
    return "\n".join(line.rstrip() for at, line in lines if at not in silent)


def cells(data: bytes) -> bytes:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        cells = [c for c in json.loads(data)["cells"] if "parameters" not in c.get("metadata", {}).get("tags", ())]
        return canonical([(cell["cell_type"], "".join(cell["source"])) for cell in cells]).encode()
    return data


def version(study: Study | None = None, root: Path = HERE) -> dict[str, Any]:
    """Which code this is. commit: sha; outside git what BLOCKSHOCK_COMMIT says, or "". dirty: whether the study's
    code or report, a notebook's cells or parameters differ from it; None outside git. sources: `digest`. imported: the
    same where this process has imported what lies on disk, else ""; only for the project's own code.
    """
    digits = {"sources": digest(study, root=root)}
    if root == HERE:
        digits["imported"] = "" if changed(study) else digits["sources"]
    # Only this project's own repository: installed elsewhere, git would speak of whatever folder surrounds it.
    commit = git(root, "rev-parse", "--verify", "HEAD") if (root / ".git").exists() else ""
    dirty = _dirty(root, study) if commit else None
    return {"commit": commit or os.environ.get("BLOCKSHOCK_COMMIT", ""), "dirty": dirty, **digits}


def _dirty(root: Path, study: Study | None) -> bool:
    """Whether a file that git calls changed, or does not know, can change what a run of the study does."""
    asked = ("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all", "--")
    found = git(root, *asked, "blockshock_lib", "notebooks", "params").split("\0")
    for name in (line.lstrip()[2:].lstrip() for line in found if line):
        path = root / name
        if name.startswith("notebooks/"):  # opened and saved, it has other outputs; one not committed runs nothing
            then = git(root, "show", f"HEAD:{name}")
            counts = then and (not path.exists() or cells(path.read_bytes()) != cells(then.encode()))
        elif name.startswith("params/"):
            counts = path.suffix == ".yaml"
        else:
            parts = Path(name).parts
            ours = study is None or parts[1] != "studies" or parts[2].removesuffix(".py") == study.name
            counts = ours and path.suffix in (".py", ".cu")
        if counts:
            return True
    return False


def git(root: Path, *args: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["git", "-C", str(root), *args]
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return ""


def changed(study: Study | None = None) -> list[str]:
    """Files of what a run of the study measures that are not as this process imported them."""
    now, counts = library(), None if study is None else measured(study)
    differ = dict(now.items() ^ AT_IMPORT.items())
    return sorted(name for name in differ if counts is None or name in counts or name not in now)


def warn_if_stale(code: Mapping[str, str], study: Study | None = None) -> None:
    """Warns, naming the files, when this `version` is not of the library that this process imported."""
    if code["imported"] == code["sources"]:
        return
    why = f"{', '.join(changed(study))} changed after this process had imported the library: restart the kernel. "
    why += "Its workers run the new files, it runs the old ones; the records say so, and no resumed run keeps them."
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # each time, also where the same cell is run again
        warnings.warn(why, stacklevel=3)
