import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import nbformat
import pytest

from blockshock_lib.errors import RecordError
from tests import aloud
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


@pytest.fixture(scope="module")
def updated(tmp_path_factory):
    """(folder, output of the command) of two notebooks, re-executed together and committed."""
    folder = tmp_path_factory.mktemp("repository")
    cells = [code("import time\ntime.time()", "nbval-ignore-output"), code("print('one')\nprint('two')")]
    changed = notebook(nbformat.v4.new_markdown_cell("# A question"), code(TABLE % "FAIL"), *cells)
    changed = update.execute(changed, folder, 300)
    changed.cells[1].source = TABLE % "pass"
    changed.cells[3].source = "print('one')\nprint('TWO')"
    changed.metadata["papermill"] = {"input_path": "x"}
    changed.cells[1].metadata["execution"] = {"iopub.status.busy": "2026-11-20T16:38:37.803221Z"}
    nbformat.write(changed, folder / "changed.ipynb")
    nbformat.write(update.execute(notebook(code("1 + 1")), folder, 300), folder / "same.ipynb")
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
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return folder, ran.stdout, git


@pytest.mark.long
def test_what_changed_in_a_table_is_shown_row_by_row_and_the_rest_is_counted(updated):
    _, said, _ = updated
    assert said.split("changed.ipynb: ")[1].startswith("1 cells not compared\n")
    assert "\n- 2  512  FAIL\n+ 2  512  pass\n" in said and "- two\n+ TWO\n" in said
    assert "same.ipynb: 0 cells not compared\nno deterministic table changed\n" in said


def test_the_notebooks_alone_are_committed_without_times_and_paths(updated):
    folder, _, git = updated
    text = (folder / "changed.ipynb").read_text()
    kept = nbformat.reads(text, as_version=4)
    assert "execution" not in kept.cells[1].metadata and "papermill" not in kept.metadata
    assert [cell.execution_count for cell in kept.cells[1:]] == [1, 2, 3]
    assert "iopub" not in text and str(folder) not in text
    committed = git("show", "--name-only", "--format=%s", "HEAD").stdout
    assert committed == f"{update.MESSAGE}\n\nchanged.ipynb\nsame.ipynb\n"
    assert git("status", "--short").stdout == "A  other.txt\n"


def test_a_failing_notebook_leaves_all_of_them_as_they_were(tmp_path, capsys):
    good, bad = tmp_path / "good.ipynb", tmp_path / "bad.ipynb"
    nbformat.write(notebook(code("1 + 1")), good)
    nbformat.write(notebook(code("1 / 0")), bad)
    before = {path: path.read_bytes() for path in (good, bad)}
    assert update.main([str(good), str(bad)]) == 1
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said and re.search(rf"nbval-update: executing {good}, \d+ s", said), "not in silence"
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_notebook_that_names_a_folder_of_this_machine_is_not_kept(tmp_path):
    path = tmp_path / "n.ipynb"
    with pytest.raises(RecordError, match="a folder of this machine"):
        update.keep(notebook(code(f"open('{update.ROOT}/x')")), path)
    assert not list(tmp_path.iterdir())


def test_the_random_names_of_widgets_become_numbers():
    def drawn(first, second):
        view = nbformat.v4.new_output("display_data", {update.VIEW: {"model_id": first}})
        made = notebook(code("table()", outputs=[view]))
        state = {first: {"state": {"layout": f"IPY_MODEL_{second}"}}, second: {"state": {}}}
        made.metadata["widgets"] = {update.STATE: {"state": state}}
        return json.dumps(update.steady(made))

    assert drawn("a" * 32, "b" * 32) == drawn("c" * 32, "0" * 31 + "d")
    assert f"IPY_MODEL_{2:032x}" in drawn("a" * 32, "b" * 32)


def test_while_tests_run_it_is_said_every_few_seconds_how_many_have_passed():
    told, waits = [], iter((False, False, True))
    reporter = SimpleNamespace(stats={"passed": [1, 2]}, write_line=told.append)
    aloud.say(reporter, lambda seconds: seconds > 10 or next(waits))
    assert told == [" 2 passed"] * 2
