import pytest

from tests.tools.wheels import wheel
from tools import wheelhouse

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
