import ast
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nbformat
import pytest

from blockshock_lib import workbook
from blockshock_lib.report.training import h2
from blockshock_lib.report.training import tables as training_tables

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PHASE0 = ROOT / "notebooks" / "phase0_correctness.ipynb"
TRAINING = ROOT / "notebooks" / "phase3_training.ipynb"
IGNORED = "nbval-ignore-output"
# Calls whose output is the same on every computer, and calls whose output holds times or depends on the machine. A cell
# that shows anything calls one of them, so that a new one has to say which it is.
SAME = {"plan_table", "proofs", "correctness_table", "reasons", "weights", "words", "tensor_table", "how_table"}
VARIES = {
    "card_table",
    "measure",
    "error_table",
    "ceilings_table",
    "speed_table",
    "machine_table",
    "memory_table",
    "top_kernels",
    "exposed",
}
VARIES |= {"numbers", "show"}
VARIES |= {"whole_table", "pieces_table", "training_memory_table"}
VARIES |= {"loss_table", "dw_table", "order_table", "stages_table", "break_even_table", "largest_table"}
VARIES |= {"ratios_table", "gap_table"}
VARIES |= {"product_table", "gain_table", "call_table", "host_table", "compression_table"}
VARIES |= {"reduce_table", "chunks_table"}
# Of explore: a static figure, and after it a widget view.
VIEWS = {"masks_view", "floors_view", "runs_view", "live_view"}
# Of the findings, whose compared table speaks of the shipped GPU records alone.
VARIES |= {"runs_table", "law_table", "step_law_table", "where_table", "needs_table", "batch_table", "compress_table"}
VARIES |= {"backtest_table", "model_table", "larger_table", "others_table"}
VIEWS |= {"what_if_view"}
VARIES |= VIEWS
FINDINGS = {"runs": "all", "run_dir": ""}
EXPLORE = {
    "mask": "transposable_random",
    "n": 4096,
    "b": 256,
    "dtype": "bf16",
    "world_size": 2,
    "runs": ["outputs/reference/phase1-cuda", "outputs/reference/phase1-cpu"],
}
EITHER = {"conclude"}  # the line counts checks; with GPUs it has ratios from phase 1 on


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def calls(cell):
    nodes = ast.walk(ast.parse(cell.source))
    return {node.func.attr for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}


def tags(cell):
    return cell.metadata.get("tags", [])


def test_every_phase_has_a_notebook():
    assert {path.name for path in NOTEBOOKS} >= set(workbook.NOTEBOOKS.values())


def test_every_code_cell_was_executed_once_and_in_order(notebook):
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))


def test_no_cell_raised_or_warned(notebook):
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert outputs
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]


def test_the_parameters_are_literals(notebook):
    (cell,) = (cell for cell in notebook.cells if "parameters" in tags(cell))
    body = ast.parse(cell.source).body
    assert all(isinstance(node, ast.Assign) for node in body)
    values = {node.targets[0].id: ast.literal_eval(node.value) for node in body}
    phase = {"hardware": "auto", "settings": {}, "run_dir": "", "redraw": "", "resume": ""}
    assert values in (EXPLORE, FINDINGS, phase)


def test_no_notebook_defines_what_the_library_should_hold(notebook):
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    assert not [n for cell in code(notebook) for n in ast.walk(ast.parse(cell.source)) if isinstance(n, defined)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_is_smaller_than_1_mb(path):
    assert path.stat().st_size < 1_000_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_no_run_of_the_scratch_folder(path):
    assert ".cache/" not in path.read_text(encoding="utf-8")


def test_every_figure_has_alternative_text(notebook):
    figures = [cell for cell in code(notebook) if calls(cell) & ({"show"} | VIEWS)]
    assert figures
    for cell in figures:
        first, *views = cell.outputs
        alts = re.findall(r'<img alt="([^"]*)"', first.data["text/html"])
        assert alts and all(len(alt) > 40 for alt in alts), cell.source
        assert len(alts) == 1 or "runs_view" in calls(cell)
        assert len(views) == len(calls(cell) & VIEWS)
    bare = [
        o for cell in code(notebook) for o in cell.outputs if {"image/png", "image/svg+xml"} & set(o.get("data", ()))
    ]
    assert not bare, "an image without alternative text"


def test_a_cell_is_ignored_by_nbval_exactly_when_its_output_varies(notebook):
    for cell in code(notebook):
        shown = calls(cell) & (SAME | VARIES | EITHER)
        assert not cell.outputs or shown, f"say in SAME or VARIES what this shows: {cell.source}"
        if shown & SAME:
            assert not shown & VARIES and IGNORED not in tags(cell) and cell.outputs, cell.source
        elif shown & VARIES:
            assert IGNORED in tags(cell), cell.source
        assert "NBVAL" not in cell.source and not {"nbval-skip", "raises-exception"} & set(tags(cell))


def test_the_deterministic_tables_are_all_there():
    shown = {path.stem: {name for cell in code(nbformat.read(path, 4)) for name in calls(cell)} for path in NOTEBOOKS}
    training = {"tensor_table", "how_table"}
    assert shown["phase0_correctness"] >= SAME - training - {"words"}
    assert shown["phase1_forward"] >= SAME - training - {"proofs"}
    assert shown["phase2_backward"] >= {"plan_table", "reasons", *training}
    assert shown["phase3_training"] >= {"plan_table", "reasons", "words", "tensor_table"}


def test_the_training_notebook_shows_every_table_and_figure_of_training():
    shown = {name for cell in code(nbformat.read(TRAINING, 4)) for name in calls(cell)}
    tables = {name for name in vars(training_tables) if name.endswith("_table")} - {"how_table"}
    tables |= {name for name in vars(h2) if name.endswith("_table")}
    assert shown >= {*tables, "training_memory_table", "training_memory", "pieces_figure", "loss_curves", "timeline"}
    assert sum("ratio_heatmap" in calls(cell) for cell in code(nbformat.read(TRAINING, 4))) == 2, "T3 and T1"


def test_a_static_figure_stands_before_each_widget_view():
    notebook = nbformat.read(ROOT / "notebooks" / "explore.ipynb", as_version=4)
    shown = [cell.outputs for cell in code(notebook) if calls(cell) & VIEWS]
    assert len(shown) == len(VIEWS - {"what_if_view"})
    for first, second in shown:
        assert first.data["text/html"].startswith('<div class="bs-static') and "<img" in first.data["text/html"]
        assert "application/vnd.jupyter.widget-view+json" in second.data


def test_nbval_sees_one_altered_word_of_a_committed_table(tmp_path):
    notebook = nbformat.read(PHASE0, as_version=4)
    altered = [index for index, cell in enumerate(code(notebook)) if "correctness_table" in calls(cell)]
    (output,) = code(notebook)[altered[0]].outputs
    for kind in ("text/plain", "text/html"):
        assert "pass" in output.data[kind]
        output.data[kind] = output.data[kind].replace("pass", "FAIL", 1)
    nbformat.write(notebook, tmp_path / PHASE0.name)
    # Its run goes where the test's other files are, and it runs as the committed notebook did: without GPUs.
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "BLOCKSHOCK_OUTPUTS": str(tmp_path / "outputs")}
    line = [sys.executable, "-m", "pytest", "--nbval", "--junitxml=report.xml", "-p", "no:cacheprovider", PHASE0.name]
    ran = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    cases = ElementTree.parse(tmp_path / "report.xml").findall(".//testcase")
    bad = [
        index for index, case in enumerate(cases) if case.find("failure") is not None or case.find("error") is not None
    ]
    assert ran.returncode == 1 and len(cases) == len(code(notebook)), ran.stdout
    assert bad == altered and len(altered) == 1
    assert "mismatch" in ran.stdout and "FAIL" in ran.stdout
    assert len(list((tmp_path / "outputs").rglob("manifest.json"))) == 1
