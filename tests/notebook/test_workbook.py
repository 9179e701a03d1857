import datetime as dt
import hashlib
import html
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from blockshock_lib import files
from blockshock_lib.errors import ParamsError
from blockshock_lib.notebook import workbook
from blockshock_lib.runs import machine, manifest, records
from blockshock_lib.runs import run as run_module
from blockshock_lib.studies.linear import STUDY
from tests.small_runs import TINY, written
from tools import drawn

ODD = 'it\'s "so"\n{braces} {0} %s ${HOME} $(id) \\n # é'


@pytest.fixture(scope="module")
def done(outputs):
    """A tiny phase 0 that really ran, in a folder whose name may hold anything: notebook, kernel, two ranks."""
    return workbook.execute("phase0", hardware="cpu", settings=TINY, out=outputs / "x" / ".." / ODD)


def noted_by(outcome):
    return manifest.read(outcome.notebook.parent)


def planted(tmp_path, monkeypatch, *cells):
    """The outcome of a phase 0 whose notebook holds these cells after the parameters."""
    path, names = tmp_path / "planted.ipynb", "hardware = settings = run_dir = redraw = resume = None"
    kernel = {"name": "python3", "display_name": "", "language": "python"}
    cells = [nbformat.v4.new_code_cell(cell) for cell in (names, *cells)]
    cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    monkeypatch.setitem(STUDY.phases, "phase0", replace(STUDY.phases["phase0"], notebook=str(path)))
    return workbook.execute("phase0", hardware="cpu", settings=TINY, out=tmp_path / "out")


def test_two_runs_of_the_same_second_get_folders_of_their_own(outputs, monkeypatch):
    clock = SimpleNamespace(now=lambda tz=None: dt.datetime(2030, 1, 2, 3, 4, 5, tzinfo=tz))
    monkeypatch.setattr(run_module, "dt", SimpleNamespace(datetime=clock, UTC=dt.UTC))
    first, second = (workbook.open_run("phase0", hardware="cpu", settings=TINY, out=outputs) for _ in range(2))
    assert first.folder == outputs / "2030-01-02" / "030405-linear-phase0-cpu"
    assert second.folder == outputs / "2030-01-02" / "030405-linear-phase0-cpu-2"


def test_a_run_that_completes_leaves_notebook_page_records_verdict_and_digests(done):
    noted, folder, card = noted_by(done), done.notebook.parent, machine.probe()
    assert noted["machine"] == card and card["libraries"]["torch"]
    assert noted["params"]["seed"] == 0 and noted["params"]["sweep"]["n"] == [128]
    assert noted["code"].keys() == {"commit", "dirty", "sources", "imported"}
    assert re.fullmatch("[0-9a-f]{12}", noted["code"]["sources"]) and noted["code"]["imported"]
    assert (done.status, done.ok, noted["status"], noted["reason"]) == ("completed", True, "completed", "")
    assert done.notebook == folder / "phase0_correctness.ipynb" and done.html == done.notebook.with_suffix(".html")
    assert "PASS" in done.verdict and noted["verdict"] == done.verdict
    assert done.verdict in str(drawn.outputs(done.notebook))
    assert noted["answer"].startswith("Yes: the sum equals the dense product")
    assert noted["answer"] in done.html.read_text()
    frame = records.load(folder, strict=True)
    assert set(frame["run"]) == {noted["run"]} and set(frame["shape"]) == {"128x128"}
    assert noted["started"] <= noted["ended"]
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    del files["manifest.json"]
    assert records.PARQUET in files
    assert noted["files"] == {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in files.items()}


def test_nothing_of_a_shared_run_names_a_path_of_this_machine_and_nothing_lies_outside_its_folder(done, outputs):
    folder = done.notebook.parent
    assert folder.parent.parent == outputs / "x" / ".." / ODD and not list((outputs / "x").iterdir())
    assert not list((files.ROOT / "notebooks").rglob("*braces*"))
    places = [p for p in (files.ROOT, Path.home(), Path(tempfile.gettempdir()), Path(sys.prefix)) if len(p.parts) > 1]
    for file in folder.glob("*.*"):
        text = re.sub(r"base64,[A-Za-z0-9+/=\\n]+", "", file.read_bytes().decode("latin-1"))
        assert not [place for place in places if f"{place}/" in text or f'{place}"' in text], file.name
    assert noted_by(done)["run"] == folder.relative_to(files.ROOT).as_posix()


@pytest.mark.long
def test_a_redrawn_run_makes_the_same_tables_and_measures_nothing(done, outputs):
    # Given as an absolute path, as a shell completes it.
    again = workbook.execute("phase0", redraw=str(done.notebook.parent), out=outputs)
    folder = again.notebook.parent
    assert (again.status, again.ok, again.verdict) == ("completed", True, done.verdict)
    assert not records.any_in(folder) and not (folder / "logs").exists()
    shown = again.notebook.read_text()
    assert drawn.differences(done.notebook, again.notebook)[1:] == ["-[text] 0%| | 0<path> [00:00<?, ?it<path>]"]
    for old, new in ((">pass<", ">FAIL<"), ('<img alt=\\"', '<img alt=\\"Not '), (";base64,PD94", ";base64,PD95")):
        again.notebook.write_text(shown.replace(old, new, 1))
        assert len(drawn.differences(done.notebook, again.notebook)) > 3, f"{new} is not seen"
    assert noted_by(again)["redrawn_from"] == noted_by(done)["run"]
    assert str(files.ROOT) not in shown


@pytest.mark.long
def test_a_page_that_cannot_be_made_costs_the_page_only(outputs, monkeypatch):
    monkeypatch.setattr("blockshock_lib.notebook.pages.page.write_html", lambda path: 1 / 0)
    with pytest.warns(UserWarning, match="no HTML page.*division by zero"):
        outcome = workbook.execute("phase0", redraw=written(outputs).name, out=outputs)
    assert outcome.ok and outcome.html is None and outcome.text().endswith(".ipynb")


@pytest.mark.parametrize(
    ("cell", "status", "reason"),
    [
        ("1 / 0", "failed", "ZeroDivisionError: division by zero"),
        ("import os\nos._exit(0)", "interrupted", "the notebook's kernel died"),
        ("raise KeyboardInterrupt", "interrupted", "KeyboardInterrupt"),
    ],
)
def test_a_notebook_that_does_not_end_makes_a_run_that_says_so_with_reason_and_page(
    tmp_path, monkeypatch, cell, status, reason
):
    outcome = planted(tmp_path, monkeypatch, cell, "print('never')")
    noted = noted_by(outcome)
    assert (outcome.status, outcome.ok, noted["status"], noted["reason"]) == (status, False, status, reason)
    assert reason in outcome.verdict and reason in html.unescape(outcome.html.read_text()) and "ended" in noted


def test_a_notebook_that_measures_nothing_makes_a_run_that_failed(tmp_path, monkeypatch):
    outcome = planted(tmp_path, monkeypatch, "1 + 1")
    noted = noted_by(outcome)
    assert outcome.status == noted["status"] == "failed" and not outcome.ok
    assert noted["reason"] == "no record was written: nothing was measured"


def test_what_a_redraw_cannot_be_asked_for_is_refused_and_makes_no_folder(outputs, tmp_path):  # of what: runs/test_run
    source = written(outputs).name
    for asked, words in (
        ({"redraw": source, "hardware": "cpu"}, "leave hardware and settings out"),
        ({"redraw": source, "settings": {"seed": 1}}, "leave hardware and settings out"),
        ({"run_dir": source, "hardware": "cpu", "settings": TINY}, "holds the records of a run"),
    ):
        for verb in (workbook.open_run, workbook.execute):
            with pytest.raises(ParamsError, match=words):
                verb("phase0", **asked, out=tmp_path)
    assert not list(tmp_path.iterdir())
