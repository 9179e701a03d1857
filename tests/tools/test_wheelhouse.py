import pytest

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

    def run(dependencies, freeze=None, constraints=()):
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
        status, said = wheelhouse.main([*command, *local]), capsys.readouterr()
        assert status == 0, said.err
        files = {"-".join(path.name.split("-")[:2]) for path in folder.glob("*.whl")}
        assert not [path for path in tmp_path.rglob(".*")], "a temporary file is left"
        if freeze is not None:
            assert "setuptools-81.0" in files, "a new environment's own may be too old"
            files -= {"setuptools-81.0"}
        return files, said.out

    return run


BASE = {f"{name.replace('-', '_')}-1.0" for name in (*wheelhouse.TORCH_NEEDS, "pytest")} | {"setuptools-81.0"}
HOST = [f"{name}==1.0  # a comment" for name in (*wheelhouse.TORCH_NEEDS, "pytest")] + ["setuptools==80.9", "-e /opt/x"]
HOST += ["torch @ file:///opt/w/torch-2.11.0%2Bcu130-cp350-cp350-linux_x86_64.whl#sha256=00", "x @ file:///opt/src/x"]


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
