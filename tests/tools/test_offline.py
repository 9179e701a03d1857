import importlib.metadata
import json
import subprocess
from pathlib import Path

import pytest

from tests.tools.wheels import wheel
from tools import offline

BACKEND = """
import shutil

def build_editable(folder, *_):
    return shutil.copy({!r}, folder).rpartition("/")[2]
"""


def project(place, *dependencies):
    """The folder `place`, made a project that installs without setuptools: it "builds" a wheel that is there."""
    place.mkdir(exist_ok=True)
    (place / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "tiny-project"\nversion = "1.0"\ndependencies = {json.dumps(dependencies)}\n'
        'optional-dependencies = {dev = ["pytest", "ruff"]}\n'
    )
    (place / "backend.py").write_text(BACKEND.format(str(wheel(place / "built", "tiny-project", "1.0", dependencies))))
    return place


@pytest.mark.long
def test_the_environment_has_the_wheels_over_the_packages_of_the_host(tmp_path, monkeypatch):
    # Any index that pip would ask is not there.
    settings = {"INDEX_URL": "http://127.0.0.1:9", "EXTRA_INDEX_URL": "http://127.0.0.1:9", "CONFIG_FILE": "/dev/null"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    wheels, venv = tmp_path / "wheels", tmp_path / "venv"
    wheel(wheels, "only-offline", "1.0")
    wheel(wheels, "setuptools", "81.0")  # torch asks for one, and a new environment may have an old one
    # The host, which runs these tests, has this very version: what was gathered is installed all the same.
    version = importlib.metadata.version("tqdm")
    wheel(wheels, "tqdm", version)
    place = project(tmp_path / "project", "only-offline", "torch>=2.11", "pandas")
    offline.make(wheels, venv, place)
    script = (
        "import importlib.metadata, json, only_offline, pandas, tiny_project, torch, tqdm\n"
        "print(json.dumps([m.__file__ for m in (only_offline, tqdm, tiny_project, pandas, torch)]\n"
        "    + [importlib.metadata.version('tqdm')]))\n"
    )
    done = subprocess.run([venv / "bin" / "python", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert not done.returncode, done.stderr
    *files, seen = json.loads(done.stdout)
    *mine, pandas, torch = map(Path, files)
    assert seen == version
    assert all(one.is_relative_to(venv) for one in mine)
    assert not pandas.is_relative_to(venv) and not torch.is_relative_to(venv)
    assert (venv / offline.MADE_OFFLINE).exists()
    # Something that is in neither place is said, by name.
    project(place, "only-offline", "torch>=2.11", "in-neither-place")
    with pytest.raises(offline.OfflineError, match="in-neither-place") as caught:
        offline.install(wheels, venv, place)
    assert "HAVE=" in str(caught.value)


def test_a_folder_without_wheels_and_a_host_without_torch_are_refused(tmp_path, monkeypatch, nothing_starts):
    with pytest.raises(offline.OfflineError, match=f"{tmp_path} holds no wheels"):
        offline.make(tmp_path, tmp_path / "venv", project(tmp_path / "project"))
    wheel(tmp_path, "x", "1.0")
    monkeypatch.setattr(offline.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(offline.OfflineError, match="has no torch"):
        offline.make(tmp_path, tmp_path / "venv", tmp_path / "project")
    assert not (tmp_path / "venv").exists()
