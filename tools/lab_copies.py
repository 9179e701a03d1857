"""Makes the copies of the notebooks that JupyterLab opens, and prints where: `python -m tools.lab_copies`.

JupyterLab saves what it has opened, by itself: a committed notebook would lose the outputs that its test compares.
"""

import json
import sys
from pathlib import Path

from blockshock_lib import files
from blockshock_lib.files import ROOT, sha256, shown
from blockshock_lib.runs import code
from blockshock_lib.runs.manifest import OUTPUTS


def copies(source: Path = ROOT / "notebooks", target: Path = OUTPUTS / "lab") -> Path:
    """A copy of each notebook of `source` in the folder `target`, which is returned. One whose cells were edited, but
    for its parameters, is never replaced; another one is, once the committed one has changed.
    """
    for path in sorted(source.glob("*.ipynb")):
        data, copy = path.read_bytes(), target / path.name
        made_of = sha256(code.cells(data))
        if _is_kept(copy, made_of):
            continue
        content = json.loads(data)
        content["metadata"]["made_of"] = made_of
        files.write_atomic(copy, json.dumps(content, indent=1) + "\n")
    return target


def _is_kept(copy: Path, made_of: str) -> bool:
    try:
        cells, was = sha256(code.cells(copy.read_bytes())), json.loads(copy.read_bytes())["metadata"].get("made_of")
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError, AttributeError):
        print(f"no notebook, half saved perhaps: now {shown(copy.replace(f'{copy}.damaged'))}", file=sys.stderr)
        return False
    return made_of in (was, cells) or was != cells


if __name__ == "__main__":
    print(shown(copies()))
