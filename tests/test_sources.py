"""What was imported, and what is on disk now."""

import json
import subprocess
import sys

import pytest

from blockshock_lib import machine, sources


@pytest.fixture
def project(tmp_path):
    (tmp_path / "blockshock_lib" / "report").mkdir(parents=True)
    (tmp_path / "blockshock_lib" / "a.py").write_text("a = 1\n")
    (tmp_path / "blockshock_lib" / "report" / "b.py").write_text("b = 1\n")
    (tmp_path / "notebooks").mkdir()
    notebook(tmp_path, "print(1)")
    return tmp_path


def notebook(folder, source, asked="hardware = 'auto'"):
    cells = [
        {"cell_type": "code", "source": [asked], "metadata": {"tags": ["parameters"]}},
        {"cell_type": "code", "source": [source], "metadata": {}},
    ]
    (folder / "notebooks" / "n.ipynb").write_text(json.dumps({"cells": cells}))


def test_the_digest_of_what_was_imported_stays_while_the_files_change(project):
    before, then = sources.digest(project), sources.Library(project)
    assert sources.digest(project, then) == before
    for change in (
        lambda: (project / "blockshock_lib" / "report" / "b.py").write_text("b = 2\n"),
        lambda: (project / "blockshock_lib" / "c.py").write_text(""),
        lambda: (project / "blockshock_lib" / "a.py").unlink(),
        lambda: (project / "blockshock_lib" / "report" / "kernel.cu").write_text("// a kernel compiled at run time\n"),
    ):
        last = sources.digest(project)
        change()
        assert sources.digest(project) != last and sources.digest(project, then) == before


def test_notebooks_count_as_they_are_now_so_that_editing_one_makes_no_kernel_stale(project):
    then, before = sources.Library(project), sources.digest(project)
    notebook(project, "print(2)")
    assert sources.digest(project) == sources.digest(project, then) != before


def test_what_is_asked_for_in_the_parameters_cell_is_no_other_code(project):
    before = sources.digest(project)
    notebook(project, "print(1)", asked="resume = 'latest'")
    assert sources.digest(project) == before


def test_the_changed_files_are_named(project, monkeypatch):
    monkeypatch.setattr(sources, "ROOT", project)
    monkeypatch.setattr(sources, "AT_IMPORT", sources.Library(project))
    assert sources.changed() == []
    (project / "blockshock_lib" / "a.py").write_text("a = 2\n")
    (project / "blockshock_lib" / "c.py").write_text("")
    (project / "blockshock_lib" / "report" / "b.py").unlink()
    assert sources.changed() == [f"blockshock_lib/{name}.py" for name in ("a", "c", "report/b")]


def test_the_code_that_runs_says_what_was_imported_of_it(project):
    assert len(machine.code_version()["imported"]) == 12
    assert "imported" not in machine.code_version(project), "this process imported no other project"


def test_looking_at_the_files_loads_nothing_heavy():
    said = "import sys; from blockshock_lib import sources; assert not {'pandas', 'torch', 'numpy'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", said], check=True, cwd=sources.ROOT)
