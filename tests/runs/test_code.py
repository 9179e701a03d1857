"""Which code a run rests on: what was imported, what is on disk now, and of which study."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from blockshock_lib import studies
from blockshock_lib.runs import code

LIBRARY = {
    "__init__.py": "",
    "runs/__init__.py": "",
    "runs/measure.py": "from blockshock_lib import studies\nfrom blockshock_lib.engine import (\n    case,  # one\n)\n",
    "engine/__init__.py": "",
    "engine/case.py": 'def late():\n    """Words."""\n    # why\n    import blockshock_lib.deep\n',
    "deep.py": 'LAYER = "blockshock_lib.layers.dense:Layer"\nTEXT = """\n# 1\n"""\n',
    "layers/__init__.py": "",
    "layers/dense.py": "",
    "layers/kernel.cu": "",
    "report/__init__.py": "",
    "report/tables.py": "",
    "kernels/other.cu": "",
    "studies/__init__.py": "",
    "studies/linear/__init__.py": "from blockshock_lib.studies.linear import report\n",
    "studies/linear/problem.py": "",
    "studies/linear/report.py": "from blockshock_lib.report import tables\n",
    "studies/gpt/other.py": "",
}
OF_PROBLEM = SimpleNamespace(__module__="blockshock_lib.studies.linear.problem")
LINEAR = SimpleNamespace(
    name="linear",
    phases={"phase1": SimpleNamespace(notebook="n.ipynb")},
    problem="blockshock_lib.studies.linear.problem:Problem",
    case=OF_PROBLEM,
    expand=OF_PROBLEM,
)


@pytest.fixture
def project(tmp_path):
    for name, text in LIBRARY.items():
        path = tmp_path / "blockshock_lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
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


def edit(name, old="", new="EDITED = 1\n"):
    def change(project):
        path = project / "blockshock_lib" / name
        path.write_text((path.read_text() if path.exists() else "").replace(old, new, 1))

    return change


OWN = {
    "what runs import": edit("engine/case.py"),
    "what is imported late": edit("deep.py"),
    "what is named": edit("layers/dense.py"),
    "a package on the way": edit("layers/__init__.py"),
    "a kernel beside it": edit("layers/kernel.cu"),
    "removed": lambda project: (project / "blockshock_lib" / "deep.py").unlink(),
    "own study": edit("studies/linear/problem.py"),
    "what the study brings": edit("studies/linear/__init__.py"),
    "a text that looks like a comment": edit("deep.py", "# 1", "# 2"),
    "half a line": edit("deep.py", "LAYER =", "LAYER = ("),
}
SHOWN = {"the report": edit("report/tables.py"), "the study's report": edit("studies/linear/report.py")}
SAID = {
    "a docstring": edit("engine/case.py", "Words", "Other words"),
    "a comment": edit("engine/case.py", "# why", "# because\n\n"),
    "a kernel that nothing reaches": edit("kernels/other.cu"),
}
OTHER = {
    "other study": edit("studies/gpt/other.py"),
    "new study": edit("studies/toy.py"),
    "table of studies": edit("studies/__init__.py"),
    "notebook of another study": lambda project: notebook(project / "notebooks/others.ipynb", "print(2)"),
    "output of a notebook": lambda project: notebook(project / "notebooks/n.ipynb", output="2"),
    "what is asked for": lambda project: notebook(project / "notebooks/n.ipynb", asked="resume = 'latest'"),
}


@pytest.mark.parametrize("change", OWN | SHOWN | SAID | OTHER)
def test_the_fingerprint_of_a_run_is_of_what_it_is_measured_by_and_of_nothing_else(project, change):
    before = code.digest(LINEAR, project)
    (OWN | SHOWN | SAID | OTHER)[change](project)
    assert (code.digest(LINEAR, project) != before) == (change in OWN) and len(before) == 12


def test_what_this_process_imported_is_stale_where_the_disk_holds_other_code_that_measures(project, monkeypatch):
    monkeypatch.setattr(code, "AT_IMPORT", code.library(project))
    monkeypatch.setattr(code, "HERE", project)
    monkeypatch.setattr(code.library, "__defaults__", (project,))
    monkeypatch.setattr(code.measured, "__defaults__", (project,))
    for change in SHOWN.values():
        change(project)
        assert (made := code.version(LINEAR, project))["imported"] == made["sources"]
    for change in (OWN["what is imported late"], OWN["removed"]):
        change(project)
        assert not code.version(LINEAR, project)["imported"] and code.changed(LINEAR) == ["blockshock_lib/deep.py"]


def test_every_study_measures_by_the_engine_and_its_own_kernels_and_layers_and_not_by_its_report():
    for study, own in {"linear": "studies/linear/works.py", "attention": "kernels/attention/triton.py"}.items():
        found = {name.removeprefix("blockshock_lib/") for name in code.measured(studies.load(study))}
        assert {"engine/timing.py", "ranks/worker.py", "layers/sharded.py", "kernels/sparse24/small.cu", own} < found
        assert not {"report/verdicts.py", "notebook/share.py", f"studies/{study}/hypotheses.py"} & found
        assert ("kernels/attention/triton.py" in found) == (study == "attention")


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
    for what, change in (OWN | SHOWN).items():
        assert dirty(change), what
    assert dirty(new("params/x.yaml")) and dirty(new("blockshock_lib/ä b.cu"))
    assert dirty(lambda project: notebook(project / "notebooks/n.ipynb", "print(2)"))
