"""An environment without internet: the wheels that a host lacks are gathered, and installed from their folder alone."""

import importlib.metadata
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from tools import offline, wheelhouse


def wheel(folder, name, version, requires=(), *, tag="py3-none-any"):
    """A wheel of one module that is called as the package is; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    stem = f"{module}-{version}"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {one}" for one in requires]
    about = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n"
    parts = {"METADATA": "\n".join(lines) + "\n", "WHEEL": about, "RECORD": ""}
    parts = {f"{stem}.dist-info/{part}": text for part, text in parts.items()}
    parts[f"{module}.py"] = f"__version__ = {version!r}\n"
    parts[f"{stem}.dist-info/RECORD"] = "".join(f"{part},,\n" for part in parts)
    path = folder / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as file:
        for part, text in parts.items():
            file.writestr(part, text)
    return path


# A Python that no computer has yet: what is true of the one that runs the tests must not decide.
PYTHON = "3.50"
NEEDED = (*wheelhouse.TORCH_NEEDS, "pytest")
BASE = {f"{name.replace('-', '_')}-1.0" for name in NEEDED} | {"setuptools-81.0"}
HOST = [f"{name}==1.0  # a comment" for name in NEEDED] + ["setuptools==80.9", "-e /opt/x", "x @ file:///opt/src/x"]
HOST += ["torch @ file:///opt/w/torch-2.11.0%2Bcu130-cp350-cp350-linux_x86_64.whl#sha256=00"]
LACKING = {"setuptools-81.0"}  # what every host is given: a new environment's own may be too old
PROJECT = """
build-system = {requires = ["setuptools>=77"]}
project = {dependencies = ["torch>=2.11", %s], optional-dependencies = {dev = ["pytest", "ruff"]}}
"""


@pytest.fixture
def gathered(tmp_path, capsys):
    """(dependencies, lines of the host's freeze, constraints) -> (what was gathered, what was printed)."""
    index, have, folder = (tmp_path / name for name in ("index", "freeze.txt", "wheels"))  # index: in place of PyPI
    others = [("setuptools", "81.0"), ("setuptools", "82.0"), ("nvidia-cublas", "13.0"), ("tzdata", "1.0")]
    for name, version in (*((name, "1.0") for name in NEEDED), *others):
        wheel(index, name, version)
    # The real one would be gigabytes, and drag CUDA in.
    wheel(index, "torch", "2.13.0", ["nvidia-cublas"], tag="cp350-cp350-manylinux_2_28_x86_64")
    for version in ("1.0", "2.0", "3.0"):
        for python in ("cp350", "cp311"):
            wheel(index, "numpy", version, tag=f"{python}-{python}-manylinux_2_17_x86_64")
        wheel(index, "pandas", version, ["numpy>=2", "tzdata"])

    def run(dependencies, freeze=(), constraints=()):
        (tmp_path / "pyproject.toml").write_text(PROJECT % str(dependencies)[1:-1])
        (tmp_path / "constraints.txt").write_text("\n".join(["torch==2.13.0", *constraints]))
        have.write_text("\n".join(freeze))
        command = ["--python", PYTHON, "--project", tmp_path, "--to", folder, *(["--have", have] if freeze else [])]
        command += ["--pip=--isolated", "--pip=--no-index", f"--pip=--find-links={index}"]
        status, said = wheelhouse.main([*map(str, command)]), capsys.readouterr()
        assert status == 0, said.err
        assert not [path for path in tmp_path.rglob(".*")], "a temporary file is left"
        return {"-".join(path.name.split("-")[:2]) for path in folder.glob("*.whl")}, said.out

    return run


def test_without_a_freeze_everything_is_gathered_but_torch_and_its_libraries(gathered):
    files, said = gathered(["pandas"], constraints=["pandas==2.0"])
    assert files == BASE | {"pandas-2.0", "numpy-3.0", "tzdata-1.0"}
    assert f"{len(files)} wheels in all" in said and f"make setup PYTHON=python{PYTHON} WHEELHOUSE=" in said


@pytest.mark.long
def test_what_the_host_has_is_not_gathered_nor_what_that_needs(gathered):
    # That the index's pandas would want another numpy is no matter: the host has its own.
    files, said = gathered(["pandas"], [*HOST, "pandas==2.5", "numpy==1.0"])
    assert files == LACKING and "gathered anew" not in said
    # The host's pandas works without a tzdata that pip lists.
    assert gathered(["pandas", "numpy"], [*HOST, "pandas==3.0"])[0] == LACKING | {"numpy-3.0"}


def test_a_version_of_the_host_that_will_not_do_is_gathered_anew_and_said(gathered):
    files, said = gathered(["pandas>=2"], [*HOST, "pandas==1.0", "numpy==1.0", "tzdata==1.0"], ["numpy==2.0"])
    assert files == LACKING | {"pandas-3.0", "numpy-2.0"}
    assert "gathered anew: the host's pandas 1.0 is not >=2, as this project requires" in said
    assert "gathered anew: the host's numpy 1.0 is not >=2, as pandas requires" in said


# From the folder

BACKEND = """
import shutil

def build_editable(folder, *_):
    return shutil.copy({!r}, folder).rpartition("/")[2]
"""


def project_of(place, *dependencies):
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
    place = project_of(tmp_path / "project", "only-offline", "torch>=2.11", "pandas")
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
    project_of(place, "only-offline", "torch>=2.11", "in-neither-place")
    with pytest.raises(offline.OfflineError, match="in-neither-place") as caught:
        offline.install(wheels, venv, place)
    assert "HAVE=" in str(caught.value)


def test_a_folder_without_wheels_and_a_host_without_torch_are_refused(tmp_path, monkeypatch, nothing_starts):
    with pytest.raises(offline.OfflineError, match=f"{tmp_path} holds no wheels"):
        offline.make(tmp_path, tmp_path / "venv", project_of(tmp_path / "project"))
    wheel(tmp_path, "x", "1.0")
    monkeypatch.setattr(offline.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(offline.OfflineError, match="has no torch"):
        offline.make(tmp_path, tmp_path / "venv", tmp_path / "project")
    assert not (tmp_path / "venv").exists()
