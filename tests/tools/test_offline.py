import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.wheels import wheel
from tools import offline

# setuptools need not be there: the project builds itself, as a link to its folder.
BACKEND = """
import zipfile
from pathlib import Path

def get_requires_for_build_editable(settings=None):
    return []

def build_editable(folder, settings=None, metadata=None):
    name = "tiny_project-1.0-py3-none-any.whl"
    lines = ["Metadata-Version: 2.1", "Name: tiny-project", "Version: 1.0", *REQUIRES]
    with zipfile.ZipFile(Path(folder) / name, "w") as file:
        file.writestr("tiny_project.pth", str(Path.cwd()))
        file.writestr("tiny_project-1.0.dist-info/METADATA", "\\n".join(lines) + "\\n")
        file.writestr("tiny_project-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        file.writestr("tiny_project-1.0.dist-info/RECORD", "")
    return name
"""


@pytest.fixture
def project(tmp_path):
    """(dependencies) -> the folder of a project that can be installed without setuptools."""

    def made(*dependencies):
        place = tmp_path / "project"
        place.mkdir(exist_ok=True)
        (place / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            f'[project]\nname = "tiny-project"\nversion = "1.0"\ndependencies = {json.dumps(dependencies)}\n'
            'optional-dependencies = {dev = ["pytest", "ruff"]}\n'
        )
        requires = [f"Requires-Dist: {one}" for one in dependencies]
        (place / "backend.py").write_text(f"REQUIRES = {requires}\n{BACKEND}")
        (place / "tiny_module.py").write_text("")
        return place

    return made


@pytest.fixture
def no_network(monkeypatch):
    """Any index that pip would ask is not there."""
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


def test_the_environment_has_the_wheels_over_the_packages_of_the_host(tmp_path, project, no_network):
    wheels, venv = tmp_path / "wheels", tmp_path / "venv"
    wheel(wheels, "only-offline", "1.0")
    wheel(wheels, "setuptools", "81.0")  # torch asks for one, and a new environment may have an old one
    # The host, which runs these tests, has this very version: what was gathered is installed all the same.
    version = importlib.metadata.version("tqdm")
    wheel(wheels, "tqdm", version)
    place = project("only-offline", "torch>=2.11", "pandas")
    offline.make(wheels, venv, place)
    script = (
        "import importlib.metadata, json, only_offline, pandas, tiny_module, torch, tqdm\n"
        "print(json.dumps([m.__file__ for m in (only_offline, tqdm, tiny_module, pandas, torch)]\n"
        "    + [importlib.metadata.version('tqdm')]))\n"
    )
    done = subprocess.run([venv / "bin" / "python", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert not done.returncode, done.stderr
    *files, seen = json.loads(done.stdout)
    mine, over, linked, pandas, torch = map(Path, files)
    assert seen == version
    assert mine.is_relative_to(venv) and over.is_relative_to(venv) and linked.is_relative_to(place)
    assert not pandas.is_relative_to(venv) and not torch.is_relative_to(venv)
    assert (venv / offline.MADE_OFFLINE).exists()
    # Something that is in neither place is said, by name.
    project("only-offline", "torch>=2.11", "in-neither-place")
    with pytest.raises(offline.OfflineError, match="in-neither-place") as caught:
        offline.install(wheels, venv, place)
    assert "HAVE=" in str(caught.value)


def test_a_folder_without_wheels_is_refused(tmp_path, project, nothing_starts):
    with pytest.raises(offline.OfflineError, match=f"{tmp_path} holds no wheels"):
        offline.make(tmp_path, tmp_path / "venv", project())


def test_a_host_without_torch_is_refused(tmp_path, project, monkeypatch, nothing_starts):
    wheel(tmp_path, "x", "1.0")
    monkeypatch.setattr(offline.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(offline.OfflineError, match="has no torch"):
        offline.make(tmp_path, tmp_path / "venv", project())
    assert not (tmp_path / "venv").exists()


def test_an_interpreter_that_is_no_virtual_environment_needs_no_link(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    offline.show_host(tmp_path)
    assert not list(tmp_path.iterdir())


def test_ruff_alone_of_what_the_project_declares_stays_where_the_internet_is():
    wanted = offline.requirements(offline.ROOT)
    assert {"torch>=2.11", "pytest", "jupyterlab"} <= set(wanted)
    assert "ruff" not in wanted and importlib.metadata.version("ruff")
