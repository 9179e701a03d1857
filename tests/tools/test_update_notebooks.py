import json
import os
import subprocess
import sys

import nbformat
import pytest

from blockshock_lib.errors import RecordError
from tools import update_notebooks as update

TABLE = 'import pandas as pd\npd.DataFrame({"N": [128, 256, 512], "check": ["pass", "pass", "%s"]})'


def code(source, *tags, **more):
    return nbformat.v4.new_code_cell(source, metadata={"tags": list(tags)}, **more)


def notebook(*cells):
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = nbformat.v4.new_notebook(cells=list(cells), metadata={"kernelspec": kernel})
    for number, cell in enumerate(made.cells):
        cell["id"] = f"cell-{number:02}"
    return made


def shown(*tables, source="table()", tags=()):
    """A notebook whose one cell shows these tables, lists of rows, as HTML."""
    outputs = [
        nbformat.v4.new_output("display_data", {"text/html": f"<table>{rows}</table>", "text/plain": "as text"})
        for rows in tables
    ]
    return notebook(code(source, *tags, outputs=outputs))


def tr(*cells):
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


@pytest.fixture(scope="module")
def updated(tmp_path_factory):
    """(folder, output of the command) of two notebooks, re-executed together and committed."""
    folder = tmp_path_factory.mktemp("repository")
    changed = notebook(
        nbformat.v4.new_markdown_cell("# A question"),
        code(TABLE % "FAIL"),
        code("import time\ntime.time()", "nbval-ignore-output"),
        code("print('one')\nprint('two')"),
    )
    nbformat.write(update.execute(changed, folder, 60), folder / "changed.ipynb")
    changed = nbformat.read(folder / "changed.ipynb", as_version=4)
    changed.cells[1].source = TABLE % "pass"
    changed.cells[3].source = "print('one')\nprint('TWO')"
    changed.metadata["papermill"] = {"input_path": "x"}
    changed.cells[1].metadata["execution"] = {"iopub.status.busy": "2026-11-20T16:38:37.803221Z"}
    nbformat.write(changed, folder / "changed.ipynb")
    same = notebook(code("1 + 1"))
    nbformat.write(update.execute(same, folder, 60), folder / "same.ipynb")
    (folder / "other.txt").write_text("mine")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "PYTHONPATH": str(update.ROOT)}
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{who}_NAME": "A", f"GIT_{who}_EMAIL": "a@example.org"}

    def git(*args):
        return subprocess.run(["git", *args], cwd=folder, env=environment, capture_output=True, text=True, check=True)

    git("init", "--quiet")
    git("add", "other.txt")
    command = [sys.executable, "-m", "tools.update_notebooks", "--commit", "changed.ipynb", "same.ipynb"]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return folder, ran.stdout, git


def test_what_changed_in_a_table_is_shown_row_by_row_and_the_rest_is_counted(updated):
    _, said, _ = updated
    assert said.split("changed.ipynb: ")[1].splitlines()[:9] == [
        "1 cells not compared",
        "",
        'cell-01: pd.DataFrame({"N": [128, 256, 512], "check": ["pass", "pass", "pass"]})',
        "     N    check",
        "  ...",
        "- 2  512  FAIL",
        "+ 2  512  pass",
        "",
        "cell-03: print('TWO')",
    ]
    assert "- two\n+ TWO\n" in said
    assert "same.ipynb: 0 cells not compared\nno deterministic table changed\n" in said


def test_the_notebooks_are_written_without_times_and_paths(updated):
    folder, _, _ = updated
    text = (folder / "changed.ipynb").read_text()
    kept = nbformat.reads(text, as_version=4)
    assert "execution" not in kept.cells[1].metadata and "papermill" not in kept.metadata
    assert [cell.execution_count for cell in kept.cells[1:]] == [1, 2, 3]
    assert "iopub" not in text and str(folder) not in text


def test_only_the_notebooks_are_committed(updated):
    _, _, git = updated
    assert git("show", "--name-only", "--format=%s", "HEAD").stdout.split("\n\n") == [
        update.MESSAGE,
        "changed.ipynb\nsame.ipynb\n",
    ]
    assert git("status", "--short").stdout == "A  other.txt\n"


def test_without_commit_the_command_is_told_and_nothing_is_committed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", None)
    update.commit([tmp_path / "a.ipynb"], False)
    assert f'git commit -m "{update.MESSAGE}" -- {tmp_path / "a.ipynb"}' in capsys.readouterr().out


def test_a_failing_notebook_leaves_all_of_them_as_they_were(tmp_path, capsys):
    good, bad = tmp_path / "good.ipynb", tmp_path / "bad.ipynb"
    nbformat.write(notebook(code("1 + 1")), good)
    nbformat.write(notebook(code("1 / 0")), bad)
    before = {path: path.read_bytes() for path in (good, bad)}
    assert update.main([str(good), str(bad)]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_notebook_that_names_a_folder_of_this_machine_is_not_kept(tmp_path):
    path = tmp_path / "n.ipynb"
    with pytest.raises(RecordError, match="a folder of this machine"):
        update.keep(notebook(code(f"open('{update.ROOT}/x')")), path)
    assert not list(tmp_path.iterdir())


def test_a_cell_that_nbval_ignores_is_not_compared():
    old, new = (shown(tr(1), tags=["nbval-ignore-output"]), shown(tr(2), tags=["nbval-ignore-output"]))
    assert update.changes(old, new) == ([], 1)
    assert update.changes(shown(tr(1)), shown(tr(1))) == ([], 0)


def test_an_output_that_comes_or_goes_is_a_change():
    assert update.changes(shown(), shown(tr("a")))[0][2:] == ["+ a"]
    assert update.changes(shown(tr("a"), tr("b")), shown(tr("a")))[0][2:] == ["- b"]


def test_a_change_of_the_text_form_alone_is_one_too():
    old, new = shown(tr("a")), shown(tr("a"))
    new.cells[0].outputs[0].data["text/plain"] = "other text"
    assert update.changes(old, new)[0][:2] == ["", "cell-00: table()"]


def test_spanned_cells_keep_the_columns_in_line():
    html = '<tr><th colspan="2">a</th><th>b</th></tr><tr><td rowspan="2">1</td><td>2</td><td>3</td></tr>' + tr(4, 5)
    (output,) = shown(html).cells[0].outputs
    assert update.rows(output) == [["a", "", "b"], ["1", "2", "3"], ["", "4", "5"]]
    assert update.difference([["a", "bb"], ["1", "2"]], [["a", "bb"], ["1", "333"]]) == [
        "  a  bb",
        "- 1  2",
        "+ 1  333",
    ]


def test_the_random_names_of_widgets_become_numbers():
    def drawn(first, second):
        made = notebook(code("w", outputs=[nbformat.v4.new_output("display_data", {update.VIEW: {"model_id": first}})]))
        state = {first: {"state": {"layout": f"IPY_MODEL_{second}"}}, second: {"state": {}}}
        made.metadata["widgets"] = {update.STATE: {"state": state}}
        return json.dumps(update.steady(made))

    assert drawn("a" * 32, "b" * 32) == drawn("c" * 32, "0" * 31 + "d")
    assert f"IPY_MODEL_{2:032x}" in drawn("a" * 32, "b" * 32)
