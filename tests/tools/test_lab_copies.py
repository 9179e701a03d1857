"""The copies of the notebooks that JupyterLab opens: whatever it saves, the committed ones stay as they are."""

import json

import pytest

from tools import lab_copies


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "notebooks").mkdir()
    return tmp_path


def notebook(folder, source="print(1)", asked="hardware = 'auto'", output="1", **metadata):
    cells = [{"cell_type": "code", "source": [asked], "metadata": {"tags": ["parameters"]}}]
    cells += [{"cell_type": "code", "source": [source], "metadata": {}, "outputs": [output]}]
    folder.mkdir(exist_ok=True)
    (folder / "a.ipynb").write_text(json.dumps({"cells": cells, "metadata": metadata}))


def copy_of(folder):
    return json.loads((lab_copies.copies(folder / "notebooks", folder / "lab") / "a.ipynb").read_text())


def test_a_copy_is_kept_as_it_was_saved_until_the_committed_notebook_changes(folder):
    notebook(folder / "notebooks")
    made_of = copy_of(folder)["metadata"]["made_of"]
    notebook(folder / "lab", asked="hardware = 'cuda'", output="2", made_of=made_of)  # run in Lab, and saved
    assert copy_of(folder)["cells"][1]["outputs"] == ["2"]
    notebook(folder / "notebooks", source="print(3)", output="3")
    assert copy_of(folder)["cells"][1]["outputs"] == ["3"]


def test_a_copy_that_was_edited_is_never_replaced(folder):
    notebook(folder / "notebooks")
    made_of = copy_of(folder)["metadata"]["made_of"]
    notebook(folder / "lab", source="mine()", made_of=made_of)
    notebook(folder / "notebooks", source="print(3)")
    assert copy_of(folder)["cells"][1]["source"] == ["mine()"]


@pytest.mark.parametrize("text", ['{"cells": [', "", "[]", '{"metadata": []}'])
def test_a_copy_that_is_no_notebook_is_put_aside_and_said(folder, capsys, text):
    notebook(folder / "notebooks")
    (folder / "lab").mkdir()
    (folder / "lab" / "a.ipynb").write_text(text)
    assert copy_of(folder)["cells"][1]["outputs"] == ["1"]
    assert (folder / "lab" / "a.ipynb.damaged").read_text() == text
    assert "a.ipynb.damaged" in capsys.readouterr().err
