"""A run in a notebook that no command executes: it says where it is kept, leaves its page there, and misses no edit."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import IPython
import nbclient
import nbformat
import pandas as pd
import pytest
from IPython.core.formatters import DisplayFormatter

from blockshock_lib.errors import ParamsError
from blockshock_lib.files import ROOT
from blockshock_lib.notebook import workbook
from blockshock_lib.runs import manifest, measure
from tests.cases import row, write
from tests.small_runs import TINY


@pytest.fixture
def cells(monkeypatch, outputs):
    """The names that the cells of a notebook have made; measuring writes one record that passed."""
    names = {"hardware": "cpu", "settings": json.loads(json.dumps(TINY)), "run_dir": "", "redraw": "", "resume": ""}
    shell = SimpleNamespace(kernel=object(), user_ns=names, display_formatter=DisplayFormatter())
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    monkeypatch.setattr(workbook, "OUTPUTS", outputs.parents[2] / "outputs")

    def measured(params, cases, folder, *, run_name, context, **_):
        rows = [row(method, "check", 1.0) for method in cases[0].methods]
        write(folder, run=run_name, case=cases[0], group=0, rows=rows, context=context)

    monkeypatch.setattr(measure, "run", measured)
    return names


def opened(names, outputs):
    return workbook.open_run("phase0", **names, out=outputs)


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
    with pytest.raises(
        ParamsError, match="settings: edited since this run was opened; run the cell with open_run again"
    ):
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


def test_a_process_that_draws_keeps_the_users_own_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert workbook._path() == f"{ROOT}:/mine"


def test_a_command_or_a_script_hears_of_none_of_it(cells, outputs, capsys, monkeypatch):
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    run = opened(cells, outputs)
    cells["settings"]["sweep.n"] = [256]
    run.measure(progress=False).conclude()
    assert capsys.readouterr().out == "" and not list(run.folder.glob("*.html"))


@pytest.mark.long
def test_in_a_real_kernel_each_refusal_is_a_sentence_and_the_page_is_made(outputs, monkeypatch):
    monkeypatch.delenv("BLOCKSHOCK_OUTPUTS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    opened = f"run = workbook.open_run('phase0', hardware='cpu', settings=settings, out=Path({str(outputs)!r}))"
    first = f"from pathlib import Path\nfrom blockshock_lib.notebook import workbook\nsettings = {TINY!r}\n{opened}"
    bad = opened.replace("=settings", "={'swep.n': [128]}")
    sources = (first, bad, "run.measure(progress=False)", "print(run.conclude())", "run.measure()")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    options = dict(timeout=120, resources={"metadata": {"path": str(ROOT / "notebooks")}}, allow_errors=True)
    nbclient.NotebookClient(notebook, **options, extra_arguments=["--log-level=40"]).execute()
    said = ["".join(part.get("text", "") for part in cell.outputs) for cell in notebook.cells]
    folder = ROOT / said[0].removeprefix("run: ").strip()
    assert (folder / "phase0_correctness.html").exists() and f"page: {said[0][5:-1]}/phase0" in said[3]
    assert "phase0: PASS" in said[3] and manifest.read(folder)["status"] == "completed"
    assert "resource_tracker" not in "".join(said)
    for place, words in ((1, "ParamsError: settings: swep: unknown key"), (4, "RecordError: .*is measured already: ")):
        (wrong,) = [part for part in notebook.cells[place].outputs if part.output_type == "error"]
        assert len(wrong.traceback) == 1 and re.match(words, wrong.traceback[0])
