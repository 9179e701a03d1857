import importlib.metadata
import re

import pytest
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.tools.wheels import wheel
from tools import wheelhouse

# A Python that no computer has yet: what is true of the one that runs the tests must not decide.
PYTHON = "3.50"


@pytest.fixture
def index(tmp_path):
    """Stands in for PyPI."""
    place = tmp_path / "index"
    for name in (*wheelhouse.TORCH_NEEDS, "pytest"):
        wheel(place, name, "1.0")
    for name, version in {"setuptools": "82.0", "nvidia-cublas": "13.0", "tzdata": "1.0", "nbconvert": "7.0"}.items():
        wheel(place, name, version)
    wheel(place, "setuptools", "81.0")
    # The real one would be gigabytes, and drag CUDA in.
    wheel(place, "torch", "2.13.0", ["nvidia-cublas"], tag="cp350-cp350-manylinux_2_28_x86_64")
    for version in ("1.0", "2.0", "3.0"):
        for python in ("cp350", "cp311"):
            wheel(place, "numpy", version, tag=f"{python}-{python}-manylinux_2_17_x86_64")
        wheel(place, "pandas", version, ["numpy>=2", "tzdata"])
    return place


@pytest.fixture
def gathered(index, tmp_path, capsys):
    """(dependencies, lines of the host's freeze, constraints) -> (what was gathered, what was printed)."""

    def run(dependencies, freeze=None, constraints=(), fails=False, options=()):
        project, have, folder = tmp_path / "project", tmp_path / "freeze.txt", tmp_path / "wheels"
        project.mkdir(exist_ok=True)
        listed = ["torch>=2.11", *dependencies]
        (project / "pyproject.toml").write_text(
            '[build-system]\nrequires = ["setuptools>=77"]\n'
            f'[project]\ndependencies = {listed}\noptional-dependencies = {{dev = ["pytest", "ruff"]}}\n'
        )
        (project / "constraints.txt").write_text("\n".join(["torch==2.13.0", *constraints]))
        command = ["--python", PYTHON, "--project", str(project), "--to", str(folder)]
        if freeze is not None:
            have.write_text("\n".join(freeze))
            command += ["--have", str(have)]
        local = ["--pip=--isolated", "--pip=--no-index", f"--pip=--find-links={index}"]
        status = wheelhouse.main([*command, *local, *options])
        said = capsys.readouterr()
        assert status == (2 if fails else 0), said.err
        files = {"-".join(path.name.split("-")[:2]) for path in folder.glob("*.whl")}
        assert not [path for path in tmp_path.rglob(".*")], "a temporary file is left"
        if freeze is not None and not fails:
            assert "setuptools-81.0" in files, "a new environment's own may be too old"
            files -= {"setuptools-81.0"}
        return files, said.err if fails else said.out

    return run


BASE = {f"{name.replace('-', '_')}-1.0" for name in (*wheelhouse.TORCH_NEEDS, "pytest")} | {"setuptools-81.0"}
HOST = [f"{name}==1.0" for name in (*wheelhouse.TORCH_NEEDS, "pytest")] + ["torch==2.11.0+cu130", "setuptools==80.9"]


def test_without_a_freeze_everything_is_gathered_but_torch_and_its_libraries(gathered):
    files, said = gathered(["pandas"], constraints=["pandas==2.0"])
    assert files == BASE | {"pandas-2.0", "numpy-3.0", "tzdata-1.0"}
    assert f"{len(files)} wheels in all" in said and f"make setup PYTHON=python{PYTHON} WHEELHOUSE=" in said


def test_what_the_host_has_is_not_gathered_nor_what_that_needs(gathered):
    assert gathered(["pandas"], [*HOST, "pandas==3.0", "numpy==2.0"])[0] == set()
    # That the index's pandas would want another numpy is no matter: the host has its own.
    files, said = gathered(["pandas"], [*HOST, "pandas==2.5", "numpy==1.0"])
    assert files == set() and "gathered anew" not in said
    # The host's pandas works without a tzdata that pip lists.
    assert gathered(["pandas", "numpy"], [*HOST, "pandas==3.0"])[0] == {"numpy-3.0"}


def test_a_version_of_the_host_that_will_not_do_is_gathered_anew_and_said(gathered):
    files, said = gathered(["pandas>=2"], [*HOST, "pandas==1.0", "numpy==1.0", "tzdata==1.0"], ["numpy==2.0"])
    assert files == {"pandas-3.0", "numpy-2.0"}
    assert "gathered anew: the host's pandas 1.0 is not >=2, as this project requires" in said
    assert "gathered anew: the host's numpy 1.0 is not >=2, as pandas requires" in said


def test_every_choice_is_checked_against_the_versions_of_the_host(gathered, index):
    wheel(index, "seaborn", "1.0", ["numpy<3"])
    wheel(index, "seaborn", "2.0", ["numpy<3"])
    assert gathered(["seaborn"], [*HOST, "numpy==2.0"])[0] == {"seaborn-2.0"}
    # A host with a version that no index has, and that the constraints do not know.
    wheel(index, "seaborn", "3.0", ["numpy==2.7"])
    assert gathered(["seaborn"], [*HOST, "numpy==2.7"], ["numpy==2.0"])[0] == {"seaborn-3.0"}


def test_every_installed_package_with_files_for_jupyter_counts_as_one():
    beside = re.compile(r"^(\.\./)+(share|etc)/jupyter/")
    found = {
        canonicalize_name(package.name)
        for package in importlib.metadata.distributions()
        if any(beside.match(str(file)) for file in package.files or [])
    }
    assert {"jupyterlab", "nbconvert", "ipykernel"} <= found <= wheelhouse.IN_PLACE


def test_wheels_of_the_host_are_gathered_not_of_this_machine(gathered, index):
    wheel(index, "fast", "1.0", tag="cp350-cp350-manylinux_2_34_x86_64")
    files, said = gathered(["fast"], HOST, fails=True)
    assert not files and "fast" in said
    assert gathered(["fast"], HOST, options=["--glibc", "2.35"])[0] == {"fast-1.0"}
    wheel(index, "new", "1.0", python=">=3.50.4")
    assert gathered(["new"], HOST)[0] == {"new-1.0"}
    assert gathered(["new"], HOST, options=["--python", f"{PYTHON}.2"], fails=True)[1].count("new")


def test_a_line_of_a_freeze_gives_name_and_version_and_one_without_a_version_counts_as_not_there():
    for line, name, version in (
        ("torch==2.11.0+cu130", "torch", "2.11.0+cu130"),
        ("Jinja2==3.1.6  # a comment", "jinja2", "3.1.6"),
        ("ruamel.yaml==0.19.1 ; python_version > '3'", "ruamel-yaml", "0.19.1"),
        ("six==1.17.0 --hash=sha256:00", "six", "1.17.0"),
        ("torch @ file:///opt/w/torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl#sha256=00", "torch", "2.13.0+cpu"),
        ("x @ https://example.org/x-1.0-py3-none-any.whl", "x", "1.0"),
    ):
        assert wheelhouse.frozen(line) == ({name: Version(version)}, [])
    bare = ("-e git+https://example.org/x.git@0a#egg=x", "x @ file:///opt/src/x", "-e /opt/x", "x", "x==what", "<x>")
    for line in bare:
        assert wheelhouse.frozen(line) == ({}, [line])
