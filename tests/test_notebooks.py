import ast
import re
import shutil
import xml.etree.ElementTree as ElementTree

import nbformat
import pytest

from blockshock_lib import studies
from blockshock_lib.files import ROOT
from blockshock_lib.runs import manifest
from tests import nbval_runs
from tests.processes import python

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
IGNORED = "nbval-ignore-output"
# What is the same on every computer, and what holds times or depends on the machine. A cell that shows anything shows
# one of them, so that a new one has to say which it is. All figures vary.
SAME_TABLES = {"correctness", "reasons", "weights", "hypotheses", "syncs"}
SAME = {"plan_table", "proofs", "claims", *SAME_TABLES}
VARIES = {"answer", "card_table", "measure", "numbers", "figure", "show", "runs_table"}
VARIES |= {name for study in studies.names() for name in studies.load(study).tables} - SAME
# Of explore: a static figure, and after it a widget view.
VIEWS = {"masks_view", "floors_view", "runs_view", "live_view"}
VARIES |= VIEWS
FINDINGS = {"runs": "all", "run_dir": ""}
EXPLORE = {"mask": "transposable_random", "n": 4096, "b": 256, "dtype": "bf16", "world_size": 2}
EXPLORE["runs"] = ["outputs/reference/phase1-cuda", "outputs/reference/phase1-cpu"]
EITHER = {"conclude"}  # the line counts checks; with GPUs it has ratios from phase 1 on


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def calls(cell):
    """The methods that a cell calls; of run.table("speed") and run.figure("speed") also the name."""
    found = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
    plain = {node.func.id for node in found if isinstance(node.func, ast.Name)}
    found = [node for node in found if isinstance(node.func, ast.Attribute)]
    named = {node.args[0].value for node in found if node.func.attr == "table"}
    named |= {f"figure {node.args[0].value}" for node in found if node.func.attr == "figure"}
    return {node.func.attr for node in found} - {"table"} | named | plain


def test_every_cell_was_executed_once_in_order_and_none_raised_or_warned_or_shows_a_run_of_the_scratch_folder(notebook):
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert outputs and ".cache/" not in str(notebook)
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]


def test_the_parameters_are_literals(notebook):
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    body = ast.parse(cell.source).body
    assert all(isinstance(node, ast.Assign) for node in body)
    values = {node.targets[0].id: ast.literal_eval(node.value) for node in body}
    phase = {"hardware": "auto", "settings": {}, "run_dir": "", "redraw": "", "resume": ""}
    assert values in (EXPLORE, FINDINGS, phase)


def test_every_parameter_of_explore_reaches_its_views():
    cells = code(nbformat.read(ROOT / "notebooks" / "explore.ipynb", as_version=4))
    (floors,) = (cell.source for cell in cells if "floors_view" in calls(cell))
    assert set(re.findall(r"\w+", floors)) == {"floors_view", "dry_run", *EXPLORE} - {"runs"}


def test_no_notebook_defines_what_the_library_should_hold(notebook):
    defined = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda
    nodes = [node for cell in code(notebook) for node in ast.walk(ast.parse(cell.source))]
    assert not [node for node in nodes if isinstance(node, defined)]


def test_every_figure_has_alternative_text(notebook):
    figures = [cell for cell in code(notebook) if calls(cell) & ({"answer", "figure", "show"} | VIEWS)]
    assert figures
    for cell in figures:
        first, *views = cell.outputs
        alts = re.findall(r'<img alt="([^"]*)"', first.data["text/html"])
        assert alts and all(len(alt) > 40 for alt in alts), cell.source
        assert len(alts) == 1 or "runs_view" in calls(cell)
        assert len(views) == len(calls(cell) & VIEWS)
    kinds = {kind for cell in code(notebook) for output in cell.outputs for kind in output.get("data", ())}
    assert not kinds & {"image/png", "image/svg+xml"}, "an image without alternative text"


def test_a_cell_is_ignored_by_nbval_exactly_when_its_output_varies(notebook):
    for cell in code(notebook):
        shown, tags = calls(cell) & (SAME | VARIES | EITHER), cell.metadata.get("tags", ())
        assert not cell.outputs or shown, f"say in SAME or VARIES what this shows: {cell.source}"
        if shown & SAME:
            assert not shown & VARIES and IGNORED not in tags and cell.outputs, cell.source
        elif shown & VARIES:
            assert IGNORED in tags, cell.source
        assert "NBVAL" not in cell.source and not {"nbval-skip", "raises-exception"} & set(tags)


@pytest.mark.parametrize("study", studies.names())
def test_the_notebooks_show_every_table_and_figure_of_a_study(study):
    study = studies.load(study)
    shown = {name for path in NOTEBOOKS for cell in code(nbformat.read(path, 4)) for name in calls(cell)}
    at_the_top = {f"figure {name}" for phase in study.phases.values() for name in phase.figures[:1]}
    asked = {*study.tables, *(f"figure {name}" for name in study.figures)} - at_the_top
    assert shown >= asked


def test_a_notebook_begins_with_its_answer_before_it_says_how(notebook):
    if any("live_view" in calls(cell) for cell in code(notebook)):
        return  # explore asks and answers nothing
    first = notebook.cells.index(next(cell for cell in code(notebook) if "answer" in calls(cell)))
    assert not [cell for cell in notebook.cells[1:first] if cell.cell_type == "markdown"]
    assert notebook.cells[0].source.count("\n") == 0, "a title alone stands above the answer"
    text = notebook.cells[first].outputs[0].data["text/html"]
    assert text.index('class="sentence"') < text.index("<img") < text.index("Checks ")


@pytest.mark.long
def test_nbval_sees_an_altered_word_of_a_committed_table_and_a_row_too_few_and_says_where_they_stand(tmp_path):
    notebook = nbformat.read(ROOT / "notebooks" / "phase0_correctness.ipynb", as_version=4)
    changes = {
        "correctness": lambda text: text.replace("pass", "FAIL", 1),
        "weights": lambda text: text[: text.rindex("<tr")],
    }
    altered = [index for index, cell in enumerate(code(notebook)) if changes.keys() & calls(cell)]
    for index, change in zip(altered, changes.values(), strict=True):
        (output,) = code(notebook)[index].outputs
        output.data["text/html"] = change(output.data["text/html"])
    nbformat.write(notebook, tmp_path / "altered.ipynb")
    shutil.rmtree(own := ROOT / ".cache" / "nbval" / "altered", ignore_errors=True)
    options = "--nbval --junitxml=report.xml --color=no -p tests.nbval_runs -p no:cacheprovider altered.ipynb"
    ran = python("-m", "pytest", *options.split(), cwd=tmp_path)
    cases = ElementTree.parse(tmp_path / "report.xml").findall(".//testcase")
    bad = [index for index, case in enumerate(cases) if {"failure", "error"} & {part.tag for part in case}]
    assert ran.returncode == 1 and len(cases) == len(code(notebook)), ran.stdout
    said = "row 2 (uniform_1100, gaussian), column A dense: committed 'FAIL', now 'pass'\nmeant? make nbval-update"
    assert bad == altered and said in ran.stdout and "<td>" not in ran.stdout
    assert "\n- what is committed, + what is now\n" in ran.stdout and "\n+ 2  256x1024  bf16 " in ran.stdout
    (run,) = (path.parent for path in own.rglob(manifest.FILE))
    assert manifest.read(run)["params"]["timing"]["samples"] == nbval_runs.FEW["timing.samples"]
    shutil.rmtree(own)
