"""A full disk or a folder that cannot be written: a clear error, the old file as it was, and no temporary one left."""

import json
import resource
import shutil

import nbformat
import pytest

from blockshock_lib.errors import RecordError
from blockshock_lib.notebook.pages import page
from blockshock_lib.runs import manifest
from tests.cases import METHODS, case, row, write
from tests.faults.workers import CONTEXT
from tests.processes import flags, python
from tests.small_runs import TINY
from tools import update_notebooks


def write_record(folder, text):
    rows = [row(method, "check", 1.0, detail=text) for method in METHODS]
    return write(folder, run="r", case=case(), group=0, rows=rows, context=CONTEXT)


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
    """What `write` says where files can grow no further than LIMIT."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        with pytest.raises(RecordError) as said:
            write(folder, LARGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return str(said.value)


@pytest.fixture
def folder(tmp_path):
    """A run's folder with a small notebook, of which a page can be made."""
    place = tmp_path / "run"
    place.mkdir()
    nbformat.write(notebook("small"), place / "n.ipynb")
    return place


@pytest.mark.parametrize("what", WRITERS)
def test_on_a_full_disk_the_old_file_stands(what, folder):
    path = WRITERS[what](folder, "small")
    nbformat.write(notebook(LARGE), folder / "n.ipynb")
    before = contents(folder)
    assert on_a_full_disk(WRITERS[what], folder) == f"{path.name} could not be written: File too large"
    assert contents(folder) == before


# A page is made beside its notebook: there is no file in that folder's place.
PLACES = [(what, place) for what in WRITERS for place in ("file", "folder") if (what, place) != ("page", "folder")]


@pytest.mark.parametrize("what, in_place_of", PLACES)
def test_where_it_cannot_be_written_it_says_so(what, in_place_of, folder):
    # Not permissions: root, as which tests may run, has them all.
    write = WRITERS[what]
    path = write(folder, "small")
    path.unlink()
    if in_place_of == "file":
        (path / "kept").mkdir(parents=True)
    else:
        shutil.rmtree(path.parent)
        path.parent.touch()
    before = contents(folder.parent)
    with pytest.raises(RecordError, match=rf"{path.name} (could not be written|holds no readable|could not be read)"):
        write(folder, "large")
    assert contents(folder.parent) == before


@pytest.mark.long
def test_a_run_on_a_full_disk_says_so_and_leaves_no_half_file(tmp_path):
    # Enough for the manifest and not for the notebook.
    script = (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))\n"
        "from blockshock_lib.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    done = python("-c", script, "run", "phase0", f"--out={tmp_path / 'out'}", *flags(TINY))
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    assert "File too large" in done.stdout + done.stderr
    (noted,) = (tmp_path / "out").rglob(manifest.FILE)
    assert json.loads(noted.read_text())["status"] == "failed"
    for path in noted.parent.rglob("*"):
        assert not path.name.endswith(".tmp")
        if path.suffix == ".ipynb":
            json.loads(path.read_text())
