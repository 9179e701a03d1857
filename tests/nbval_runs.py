"""Pytest plugin: a committed notebook runs as it was committed, without GPUs, and keeps its runs to itself."""

import os
from unittest import mock

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """The kernel that starts with a notebook's first cell inherits this, and nothing else does."""
    if item.path.suffix != ".ipynb":
        return (yield)
    # Of its own: notebooks run side by side, and one of them reads the runs that it finds.
    own = {"CUDA_VISIBLE_DEVICES": "", "BLOCKSHOCK_OUTPUTS": f".cache/nbval/{item.path.stem}"}
    with mock.patch.dict(os.environ, own):
        return (yield)
