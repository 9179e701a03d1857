"""Every test of this folder needs a GPU, and is skipped where there is none."""

from pathlib import Path

import pytest
import torch

from blockshock_lib.kernels.sparse24 import tune


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nothing is known that was tuned before."""
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path / "cache"))
    tune.choice.cache_clear()


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available"))
