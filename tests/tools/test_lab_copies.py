"""The copies of the notebooks that JupyterLab opens: whatever it saves, the committed ones stay as they are."""

import json

import pytest

from tests.runs.test_code import notebook
from tools import lab_copies


def copy_of(folder):
    return json.loads((lab_copies.copies(folder / "notebooks", folder / "lab") / "a.ipynb").read_text())


def test_a_copy_is_kept_as_it_was_saved_until_the_committed_notebook_changes_and_once_edited_for_good(tmp_path):
    notebook(tmp_path / "notebooks/a.ipynb")
    made_of = copy_of(tmp_path)["metadata"]["made_of"]
    notebook(tmp_path / "lab/a.ipynb", asked="hardware = 'cuda'", output="2", made_of=made_of)  # run in Lab, and saved
    assert copy_of(tmp_path)["cells"][1]["outputs"] == ["2"]
    notebook(tmp_path / "notebooks/a.ipynb", source="print(3)", output="3")
    assert copy_of(tmp_path)["cells"][1]["outputs"] == ["3"]
    notebook(tmp_path / "lab/a.ipynb", source="mine()", made_of=copy_of(tmp_path)["metadata"]["made_of"])
    notebook(tmp_path / "notebooks/a.ipynb", source="print(4)")
    assert copy_of(tmp_path)["cells"][1]["source"] == ["mine()"]


@pytest.mark.parametrize("text", ['{"cells": [', "", "[]", '{"metadata": []}'])
def test_a_copy_that_is_no_notebook_is_put_aside_and_said(tmp_path, capsys, text):
    notebook(tmp_path / "notebooks/a.ipynb")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "a.ipynb").write_text(text)
    assert copy_of(tmp_path)["cells"][1]["outputs"] == ["1"]
    assert (tmp_path / "lab" / "a.ipynb.damaged").read_text() == text
    assert "a.ipynb.damaged" in capsys.readouterr().err
