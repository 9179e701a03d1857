"""Which code runs: the commit, and the digest of every file that can change what a run of a study measures.

A kernel keeps what it imported, its ranks import what is on disk: where they differ it is stale. Loads nothing heavy.
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockshock_lib import studies
from blockshock_lib.engine.study import Study
from blockshock_lib.files import canonical, sha256

HERE = Path(__file__).resolve().parents[2]


def library(root: Path = HERE) -> dict[str, str]:
    found = {}
    for path in sorted((root / "blockshock_lib").rglob("*.*")):
        with contextlib.suppress(FileNotFoundError):  # an editor may be replacing it
            if path.suffix in (".py", ".cu"):
                found[path.relative_to(root).as_posix()] = sha256(path)
    return found


AT_IMPORT = library()


def digest(study: Study | None = None, then: Mapping[str, str] | None = None, root: Path = HERE) -> str:
    """12 hex digits of the general rooms, layers and kernels, and the study's own folder and notebooks (without a
    study, of all) on disk, or with `then` as the library was. Neither a notebook's outputs nor its parameters count.
    """
    found = {name: digits for name, digits in (then or library(root)).items() if _counts(name, study)}
    names = None if study is None else {phase.notebook for phase in study.phases.values()}
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        if names is None or path.name in names:
            found[f"notebooks/{path.name}"] = sha256(cells(path.read_bytes()))
    place = Path(importlib.util.find_spec(studies.module_of(study.name)).origin if study else __file__).resolve()
    if not place.is_relative_to(HERE / "blockshock_lib"):  # a study that is not ours
        paths = place.parent.rglob("*.py") if place.name == "__init__.py" else [place]
        found |= {path.relative_to(place.parent).as_posix(): sha256(path) for path in paths}
    return sha256(canonical(found))[:12]


def _counts(name: str, study: Study | None) -> bool:
    parts = Path(name).parts
    return study is None or parts[1] != "studies" or parts[2].removesuffix(".py") == study.name


def cells(data: bytes) -> bytes:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        cells = [c for c in json.loads(data)["cells"] if "parameters" not in c.get("metadata", {}).get("tags", ())]
        return canonical([(cell["cell_type"], "".join(cell["source"])) for cell in cells]).encode()
    return data


def version(study: Study | None = None, root: Path = HERE) -> dict[str, Any]:
    """Which code this is. commit: sha; outside git what BLOCKSHOCK_COMMIT says, or "". dirty: whether the study's
    code, a notebook's cells or parameters differ from it; None outside git. sources: `digest`. imported: the same with
    the library as this process imported it; only for the project's own code.
    """
    digits = {"sources": digest(study, root=root)}
    if root == HERE:
        digits["imported"] = digest(study, AT_IMPORT)
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
            counts = path.suffix in (".py", ".cu") and _counts(name, study)
        if counts:
            return True
    return False


def git(root: Path, *args: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["git", "-C", str(root), *args]
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return ""


def changed(study: Study | None = None) -> list[str]:
    differ = dict(library().items() ^ AT_IMPORT.items())
    return sorted(name for name in differ if _counts(name, study))


def warn_if_stale(code: Mapping[str, str], study: Study | None = None) -> None:
    """Warns, naming the files, when this `version` is not of the library that this process imported."""
    if code["imported"] == code["sources"]:
        return
    why = f"{', '.join(changed(study))} changed after this process had imported the library: restart the kernel. "
    why += "Its workers run the new files, it runs the old ones; the records say so, and no resumed run keeps them."
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # each time, also where the same cell is run again
        warnings.warn(why, stacklevel=3)
