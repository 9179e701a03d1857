"""A copy of the clone, with the .venv of the first one, works on its own or refuses; it never writes into the first."""

import os
import shutil
import subprocess

import pytest

from blockshock_lib.errors import LaunchError
from blockshock_lib.files import ROOT
from blockshock_lib.runs import manifest, records
from blockshock_lib.runs import open as opening
from tests.processes import flags
from tests.small_runs import TINY


@pytest.fixture
def clone(tmp_path):
    for name in ("blockshock_lib", "params", "notebooks"):
        shutil.copytree(ROOT / name, tmp_path / "copy" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "copy" / ".venv").symlink_to((ROOT / ".venv").resolve())
    return tmp_path / "copy"


def python(clone, *words, cwd, **more):
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "BLOCKSHOCK_OUTPUTS")} | more
    return subprocess.run([clone / ".venv/bin/python", *words], cwd=cwd, env=env, capture_output=True, text=True)


@pytest.mark.long
def test_a_command_in_a_copied_clone_runs_there_from_first_to_last(clone):
    done = python(clone, "-m", "blockshock_lib", "run", "phase0", *flags(TINY), cwd=clone)
    (folder,) = (path.parent for path in (clone / "outputs").rglob(manifest.FILE))
    assert done.returncode == 0 and "phase0: PASS" in done.stdout, done.stdout + done.stderr
    assert manifest.read(folder)["status"] == "completed" and len(records.load(folder, strict=True))
    assert not list((ROOT / folder.relative_to(clone)).glob("*")), "the first clone was written into"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_notebook_or_environment_of_a_copied_clone_that_imports_the_first_is_refused(clone, tmp_path, elsewhere):
    opened = "import blockshock_lib; blockshock_lib.open_run('phase0', hardware='cpu', out='outputs')"
    if elsewhere:  # its interpreter finds the first one's library as an editable install does, by no PYTHONPATH
        done = python(clone, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {opened}", cwd=tmp_path)
    else:
        done = python(clone, "-c", opened, cwd=clone / "notebooks", PYTHONPATH=str(ROOT))
    (said,) = done.stderr.strip().splitlines()[-1:]
    assert done.returncode and f"LaunchError: {clone} is a clone of its own" in said and "make clean setup" in said
    assert not (tmp_path / "outputs").exists() and not (clone / "outputs").exists()


@pytest.mark.parametrize("spelled", ["{}/", "nowhere:{}", "{}/notebooks/.."])
def test_whoever_names_the_clone_has_asked_for_it_however_it_is_spelled(clone, tmp_path, spelled, monkeypatch):
    monkeypatch.setattr(opening.sys, "prefix", str(clone / ".venv"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with pytest.raises(LaunchError, match="is a clone of its own"):
        opening._same_clone()
    monkeypatch.setenv("PYTHONPATH", spelled.format(ROOT))
    opening._same_clone()
