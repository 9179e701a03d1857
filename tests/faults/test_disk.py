"""A full disk or a folder that cannot be written: a clear error, the old file as it was, and no temporary one left."""

import json
import os
import resource
import shutil
import subprocess
import sys

import nbformat
import pytest

from blockshock_lib import manifest, records
from blockshock_lib.errors import RecordError
from blockshock_lib.report.pages import page
from tests.cases import METHODS, case
from tests.faults.workers import CONTEXT
from tests.runs import TINY
from tools import update_notebooks


def write_record(folder, text):
    rows = [records.row(method, "check", 1.0, detail=text) for method in METHODS]
    return records.write(folder, run="r", case=case(), group=0, rows=rows, context=CONTEXT)


def write_manifest(folder, text):
    manifest.note(folder, verdict=text)
    return folder / manifest.FILE


def write_page(folder, text):
    return page.write_html(folder / "n.ipynb")


def write_notebook(folder, text):
    update_notebooks.keep(notebook(text), folder / "kept.ipynb")
    return folder / "kept.ipynb"


def notebook(text):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text, id="a")])


WRITERS = {"record": write_record, "manifest": write_manifest, "page": write_page, "notebook": write_notebook}
LIMIT = 5_000  # bytes a file can grow to on the full disk: less than a page's own style and script
LARGE = "x" * 20_000


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def on_a_full_disk(write, folder):
    """What `write` says in a process whose files can grow no further than LIMIT."""
    said, tell = os.pipe()
    # A fork, for it has imported everything.
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
            write(folder, LARGE)
            os.write(tell, b"written")
        except RecordError as error:
            os.write(tell, str(error).encode())
        except BaseException as error:
            os.write(tell, repr(error).encode())
        finally:
            os._exit(0)
    os.close(tell)
    with open(said, "rb") as told:
        text = told.read().decode()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def folder(tmp_path):
    """A run's folder with a small notebook, of which a page can be made."""
    place = tmp_path / "run"
    place.mkdir()
    nbformat.write(notebook("small"), place / "n.ipynb")
    return place


FULL, FOLDER, FILE = "full disk", "folder in its place", "file in its folder's place"
# A page is made beside its notebook: there is no file in that folder's place.
FAULTS = [(what, fault) for what in WRITERS for fault in (FULL, FOLDER, FILE) if (what, fault) != ("page", FILE)]


@pytest.mark.parametrize("what, fault", FAULTS)
def test_full_disk_or_unwritable_folder(what, fault, folder):
    write = WRITERS[what]
    path = write(folder, "small")
    assert path.is_file()
    if fault == FULL:
        nbformat.write(notebook(LARGE), folder / "n.ipynb")
        before = contents(folder)
        assert on_a_full_disk(write, folder) == f"{path.name} could not be written: File too large"
        assert contents(folder) == before
        return
    # Not permissions: root, as which tests may run, has them all.
    path.unlink()
    if fault == FOLDER:
        (path / "kept").mkdir(parents=True)
    else:
        place = path.parent
        shutil.rmtree(place)
        place.touch()
    before = contents(folder.parent)
    with pytest.raises(RecordError, match=rf"{path.name} (could not be written|holds no readable|could not be read)"):
        write(folder, "large")
    assert contents(folder.parent) == before


def test_a_run_on_a_full_disk_says_so_and_leaves_no_half_file(tmp_path):
    settings = [f"--set={key}={json.dumps(value)}" for key, value in TINY.items()]
    # Enough for the manifest and not for the notebook.
    script = (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))\n"
        "from blockshock_lib.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", script, "run", "phase0", "--hardware=cpu", f"--out={tmp_path / 'out'}", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    assert "File too large" in done.stdout + done.stderr
    (noted,) = (tmp_path / "out").rglob(manifest.FILE)
    assert json.loads(noted.read_text())["status"] == "failed"
    for path in noted.parent.rglob("*"):
        assert not path.name.endswith(".tmp")
        if path.suffix == ".ipynb":
            json.loads(path.read_text())
