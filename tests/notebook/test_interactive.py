"""A run in a notebook that no command executes: it says where it is kept, leaves its page there, and misses no edit."""

import json
from pathlib import Path
from types import SimpleNamespace

import IPython
import pandas as pd
import pytest
from IPython.core.formatters import DisplayFormatter

from blockshock_lib.errors import ParamsError, RecordError
from blockshock_lib.files import ROOT
from blockshock_lib.notebook import workbook
from blockshock_lib.runs import manifest, measure
from tests.small_runs import TINY, measured


@pytest.fixture
def cells(monkeypatch, outputs):
    """The names that the cells of a notebook have made; measuring writes records that passed."""
    names = {"hardware": "cpu", "settings": json.loads(json.dumps(TINY)), "run_dir": "", "redraw": "", "resume": ""}
    shell = SimpleNamespace(kernel=object(), user_ns=names, display_formatter=DisplayFormatter())
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    monkeypatch.setattr(workbook, "OUTPUTS", outputs.parents[2] / "outputs")
    monkeypatch.setattr(measure, "run", measured)
    return names


def opened(names, outputs):
    return workbook.open_run("phase0", **names, out=outputs)


@pytest.mark.long
def test_it_says_where_it_is_kept_and_leaves_notebook_and_page_there(cells, outputs, capsys):
    run = opened(cells, outputs)
    assert capsys.readouterr().out == f"run: {run.name}\n"
    line = run.measure(progress=False).conclude()
    said = capsys.readouterr().out
    page = run.folder / "phase0_correctness.html"
    assert said.endswith(f"page: {run.name}/{page.name}\n") and "PASS" in page.read_text()
    noted = manifest.read(run.folder)
    assert noted["status"] == "completed" and noted["verdict"] == line
    assert {page.name, "phase0_correctness.ipynb", "records.parquet"} <= noted["files"].keys()
    assert noted["files"] == manifest.digests(run.folder)


def test_what_is_edited_after_the_run_was_opened_is_not_measured_as_if_it_were(cells, outputs):
    run = opened(cells, outputs)
    cells["settings"]["sweep.n"] = [256]
    with pytest.raises(ParamsError, match="settings: edited since this run was opened; run the cell with open_run"):
        run.measure(progress=False)
    assert not list(run.folder.glob("records/*"))
    del run
    assert opened(cells, outputs).measure(progress=False).params.sweep.n == (256,)


def test_a_misspelt_setting_is_one_sentence_that_names_the_cells_own_word(outputs):
    with pytest.raises(ParamsError, match=r"^settings: swep: unknown key") as said:
        workbook.open_run("phase0", hardware="cpu", settings={"swep.n": [128]}, out=outputs)
    assert said.value._render_traceback_() == [f"ParamsError: {said.value}"]


def test_a_notebook_that_fails_on_a_completed_run_is_said_and_the_run_stays_completed(cells, outputs, monkeypatch):
    run = opened(cells, outputs)
    run.after = lambda: None
    line = run.measure(progress=False).conclude()
    monkeypatch.setattr(workbook, "run_notebook", lambda *_: ("failed", "ZeroDivisionError: planted"))
    assert workbook.draw(run.folder) == "phase0 failed: ZeroDivisionError: planted"
    noted = manifest.read(run.folder)
    assert (noted["status"], noted["verdict"]) == ("completed", line)
    monkeypatch.setattr(workbook, "DRAW", "import sys; sys.exit('phase0 failed: planted')")
    with pytest.warns(UserWarning, match="not whole: phase0 failed: planted"):
        workbook._say_drawn(run.folder)


def test_tables_have_neither_nan_nor_a_running_index_and_outputs_elsewhere_change_nothing(cells, outputs, monkeypatch):
    monkeypatch.setattr(workbook, "OUTPUTS", Path("/mine"))
    run = opened(cells, outputs)
    show = IPython.get_ipython().display_formatter.format
    frame = pd.DataFrame({"time": [0.5, None]})
    for table, numbers in ((frame, False), (frame.set_index(pd.Index(["a", "b"], name="n")), True)):
        text = show(table)[0]["text/html"]
        assert "NaN" not in text and "–" in text and ("<th>" in text.partition("<tbody>")[2]) == numbers
    drawn = []
    monkeypatch.setattr(workbook, "draw_apart", lambda folder: drawn.append(folder) or folder)
    run.measure(progress=False).conclude()
    assert drawn == [run.folder]


def test_a_process_that_draws_is_heard_and_its_last_words_say_why_there_is_no_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(workbook, "DRAW", "import sys; print('cell 7, 8 s', file=sys.stderr); sys.exit('boom')")
    with pytest.raises(RecordError, match=r"are not whole: boom$"):
        workbook.draw_apart(tmp_path)
    assert capsys.readouterr().out.splitlines() == ["cell 7, 8 s", "boom"]


def test_a_process_that_draws_keeps_the_users_own_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert workbook._path() == f"{ROOT}:/mine"


def test_a_command_or_a_script_hears_of_none_of_it(cells, outputs, capsys, monkeypatch):
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    run = opened(cells, outputs)
    cells["settings"]["sweep.n"] = [256]
    run.measure(progress=False).conclude()
    assert capsys.readouterr().out == "" and not list(run.folder.glob("*.html"))
