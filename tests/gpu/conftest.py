"""Every test of this folder needs a GPU, and is skipped where there is none."""

from pathlib import Path

import pytest
import torch

from blockshock_lib.kernels.sparse24 import tune
from blockshock_lib.ranks import WorkerGroup
from tests.gpu import reduce_tasks

WORLDS = [world for world in (2, 4, 8) if world <= torch.cuda.device_count()]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nothing is known that was tuned before."""
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path / "cache"))
    tune.choice.cache_clear()


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request, tmp_path_factory):
    """Ranks that share memory; there are none on fewer than two GPUs."""
    with WorkerGroup(request.param, device="cuda", logs=tmp_path_factory.mktemp("logs")) as group:
        if why := group.call(reduce_tasks.unsupported, seconds=120)[0]:
            pytest.skip(why)
        yield group


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available"))
