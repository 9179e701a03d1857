"""Which code a run rests on: what was imported, what is on disk now, and of which study."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from blockshock_lib.runs import code

LINEAR = SimpleNamespace(name="linear", phases={"phase1": SimpleNamespace(notebook="n.ipynb")})
LIBRARY = ("a.py", "report/b.py", "studies/__init__.py", "studies/linear/own.py", "studies/gpt/other.py")


@pytest.fixture
def project(tmp_path):
    for name in LIBRARY:
        path = tmp_path / "blockshock_lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
    (tmp_path / "outputs").mkdir()
    for name in ("n", "others"):
        notebook(tmp_path / "notebooks" / f"{name}.ipynb")
    return tmp_path


def notebook(path, source="print(1)", asked="hardware = 'auto'", output="1", **metadata):
    cells = [
        {"cell_type": "code", "source": [asked], "metadata": {"tags": ["parameters"]}},
        {"cell_type": "code", "source": [source], "metadata": {}, "outputs": [output]},
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"cells": cells, "metadata": metadata}))


def edit(name):
    return lambda project: (project / "blockshock_lib" / name).write_text("# edited\n")


OWN = {
    "general": edit("report/b.py"),
    "added": edit("c.py"),
    "kernel": edit("report/kernel.cu"),
    "removed": lambda project: (project / "blockshock_lib" / "a.py").unlink(),
    "own study": edit("studies/linear/own.py"),
}
OTHER = {
    "other study": edit("studies/gpt/other.py"),
    "new study": edit("studies/toy.py"),
    "table of studies": edit("studies/__init__.py"),
    "notebook of another study": lambda project: notebook(project / "notebooks/others.ipynb", "print(2)"),
    "output of a notebook": lambda project: notebook(project / "notebooks/n.ipynb", output="2"),
    "what is asked for": lambda project: notebook(project / "notebooks/n.ipynb", asked="resume = 'latest'"),
}


@pytest.mark.parametrize("change", OWN)
def test_what_a_run_rests_on_changes_its_fingerprint_and_not_that_of_what_was_imported(project, change):
    before, then = code.digest(LINEAR, root=project), code.library(project)
    assert code.digest(LINEAR, then, project) == before and len(before) == 12
    OWN[change](project)
    assert code.digest(LINEAR, root=project) != before == code.digest(LINEAR, then, project)


@pytest.mark.parametrize("change", OTHER)
def test_what_a_run_does_not_rest_on_leaves_its_fingerprint(project, change):
    before = code.version(LINEAR, project)
    OTHER[change](project)
    assert code.version(LINEAR, project) == before


def test_a_study_outside_the_library_counts_with_its_own_file(tmp_path, monkeypatch):
    (tmp_path / "planted_study.py").write_text("STUDY = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("BLOCKSHOCK_STUDIES", "planted=planted_study:STUDY")
    planted = SimpleNamespace(name="planted", phases={})
    before = code.digest(planted)
    (tmp_path / "planted_study.py").write_text("STUDY = 1\n")
    assert code.digest(planted) != before


def test_a_run_is_dirty_where_code_or_parameters_differ_from_the_commit_and_by_no_stray_file(project):
    def git(*args):
        options = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", "-C", str(project), *options, *args], check=True, capture_output=True, text=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    sha = git("rev-parse", "HEAD").stdout.strip()

    def dirty(change):
        change(project)
        noted = code.version(LINEAR, project)
        git("clean", "-fd")
        git("checkout", "--", ".")
        assert noted["commit"] == sha and code.version(LINEAR, project)["dirty"] is False
        return noted["dirty"]

    def new(name):
        def make(project):
            (project / name).parent.mkdir(exist_ok=True)
            (project / name).write_text("x")

        return make

    for name in ("outputs/new", "new.log", "blockshock_lib/note.txt", "params/x.yaml~", "notebooks/Untitled.ipynb"):
        assert not dirty(new(name)), name
    for what in ("output of a notebook", "what is asked for", "other study"):
        assert not dirty(OTHER[what]), what
    for what in OWN:
        assert dirty(OWN[what]), what
    assert dirty(new("params/x.yaml")) and dirty(new("blockshock_lib/ä b.cu"))
    assert dirty(lambda project: notebook(project / "notebooks/n.ipynb", "print(2)"))
