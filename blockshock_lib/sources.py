"""Which library files this process has imported, and which lie on disk now.

A kernel keeps what it imported; the workers that it starts import what is on disk then. Where the two differ the kernel
is stale. Only the standard library is needed here, for this runs whenever the package is imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Library:
    """The library's files as they stand at this moment: their digest, and one hash a file."""

    def __init__(self, root: Path):
        self.digest, self.files = hashlib.sha256(), {}
        for path in sorted(path for path in (root / "blockshock_lib").rglob("*.*") if path.suffix in (".py", ".cu")):
            with contextlib.suppress(FileNotFoundError):  # an editor may be replacing it
                data = path.read_bytes()
                name = path.relative_to(root).as_posix()
                self.digest.update(f"{name}\0{len(data)}\0".encode() + data)
                self.files[name] = hashlib.sha256(data).digest()


AT_IMPORT = Library(ROOT)


def digest(root: Path = ROOT, library: Library | None = None) -> str:
    """12 hex digits of the library's files and the notebooks' cells as they now stand on disk.

    Outputs do not count, nor does the parameters cell: what it says is in the manifest.

    Args:
        library: take the library's files as they were then, not as they are now.
    """
    found = (library or Library(root)).digest.copy()
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        data = path.read_bytes()
        with contextlib.suppress(ValueError, TypeError, KeyError):
            cells = [c for c in json.loads(data)["cells"] if "parameters" not in c.get("metadata", {}).get("tags", ())]
            data = json.dumps([(c["cell_type"], "".join(c["source"])) for c in cells]).encode()
        found.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode() + data)
    return found.hexdigest()[:12]


def changed() -> list[str]:
    """The library's files that differ from those that this process imported, added and removed ones too."""
    now, then = Library(ROOT).files, AT_IMPORT.files
    return sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))


def warn_if_stale(code: Mapping[str, str]) -> None:
    """Warn, naming the files, when this `machine.code_version` is not of the library that this process imported."""
    if code["imported"] == code["sources"]:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # each time, also where the same cell is run again
        warnings.warn(
            f"{', '.join(changed())} changed after this process had imported the library: restart the kernel. "
            "Its workers run the new files, it runs the old ones; the records say so, and no resumed run keeps them.",
            stacklevel=3,
        )
