"""Notebooks that are checked side by side keep their runs apart, and see no GPU."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.nbval_runs import pytest_runtest_setup


def seen_by(name):
    """(outputs folder, visible GPUs) while an item of that file is set up, and whether all is as before afterwards."""
    before = dict(os.environ)
    hook = pytest_runtest_setup(SimpleNamespace(path=Path(name)))
    next(hook)
    inside = os.environ.get("BLOCKSHOCK_OUTPUTS"), os.environ.get("CUDA_VISIBLE_DEVICES")
    with pytest.raises(StopIteration):
        hook.send(None)
    return inside, dict(os.environ) == before


def test_each_notebook_has_an_outputs_folder_of_its_own_and_no_gpu():
    assert seen_by("notebooks/a.ipynb") == ((".cache/nbval/a", ""), True)
    assert seen_by("notebooks/b.ipynb") == ((".cache/nbval/b", ""), True)


def test_a_test_keeps_its_environment(monkeypatch):
    monkeypatch.setenv("BLOCKSHOCK_OUTPUTS", "elsewhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert seen_by("tests/test_a.py") == (("elsewhere", "1"), True)
