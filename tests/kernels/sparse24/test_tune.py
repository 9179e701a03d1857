"""The search and its consumers, against fakes on the CPU. Real values and times: tests/gpu."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import backends, cslt, small, tune
from blockshock_lib.kernels.sparse24.plans import Setting
from blockshock_lib.kernels.sparse24.small import Config
from blockshock_lib.kernels.sparse24.tune import Probe
from blockshock_lib.kernels.tuning import child
from blockshock_lib.kernels.tuning.search import BrokenContextError, Error, Found, Trial

from .fake_cusparselt import install
from .problems import problem

RIGHT = Error(1.0, 1.0)
CONFIGS = [Config(1, 1, 1, 3, 1), Config(1, 2, 1, 3, 1)]
BEST = {"cslt": Setting(17, 2, 1), "small": CONFIGS[1], "tuned": CONFIGS[1]}


@pytest.fixture(autouse=True)
def matmul(monkeypatch):
    return install(monkeypatch)


def given(name="cslt"):
    """A backend, x and what the backend packed."""
    x, weight, mask = problem()
    return backends.BACKENDS[name], x, backends.BACKENDS[name].pack(weight, mask)


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """The cache in a temporary folder, and searches that are counted and find algorithm 17 and a faster config."""
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(tune, "versions", lambda device: {"driver": "580"})
    tune.choice.cache_clear()
    trials = (Trial(CONFIGS[1], RIGHT, 0.2), Trial(Setting(17, 2, 1), RIGHT, 0.5), Trial(Setting(), RIGHT, 0.9))
    planned = SimpleNamespace(count=0, found=Found(trials))

    def find(self, problem, device):
        planned.count += 1
        return planned.found

    monkeypatch.setattr(child.Search, "find", find)
    return planned


def test_one_search_serves_all_backends_and_further_processes(tuned):
    for _ in range(2):
        for name in (*BEST, *BEST):
            backend, x, packed = given(name)
            backend.tune(x, packed)
            backend.tune(x, packed)
            assert packed.extra == {16: BEST[name]}
        tune.choice.cache_clear()  # as in another process
    assert tuned.count == 1


NONE_RIGHT = "nothing that was tried gave right values"


@pytest.mark.parametrize(("found", "reason"), [(Found(), NONE_RIGHT), (Found(failed="given up"), "given up")])
@pytest.mark.parametrize("name", ["cslt", "tuned"])
def test_the_default_stays_with_one_warning_when_nothing_is_found(tuned, name, found, reason):
    tuned.found = found
    with pytest.warns(UserWarning, match=f"128x192 B=16 bfloat16: {reason}: the default stays"):
        backends.BACKENDS[name].tune(*given(name)[1:])
    backend, x, packed = given(name)
    backend.tune(x, packed)
    assert tuned.count == 1 and packed.extra == {16: Setting()} and not tune.STORE.path.exists()


NO_CONFIG = Found((Trial(Setting(17), RIGHT, 0.5), Trial(CONFIGS[0], Error(9.0, 9.0))))
CRASHED = Found((Trial(Setting(), crashed="SIGILL"),), crashes=("cslt alg_id 0 (SIGILL)",))


@pytest.mark.parametrize(
    ("name", "found", "match"),
    [
        ("small", NO_CONFIG, "no config of the small-batch kernel is known to be right"),
        ("cslt", CRASHED, "default algorithm crashes"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*crashed")
def test_where_there_is_no_default_or_it_crashes_nothing_is_left_in_use(tuned, name, found, match):
    tuned.found = found
    backend, x, packed = given(name)
    with pytest.raises(UnsupportedError, match=match):
        backend.tune(x, packed)
    assert not packed.extra


def test_what_crashed_is_told_and_the_best_of_each_kind_kept_all_the_same(tuned):
    tuned.found = Found(tuned.found.trials, crashes=("mm_search (SIGILL)",))
    backend, x, packed = given()
    with pytest.warns(UserWarning, match=r"left out what crashed: mm_search \(SIGILL\)"):
        backend.tune(x, packed)
    key = tune.problem_of(packed.shape, 16, packed.dtype, x.device)
    assert tune.STORE.find(key, tune.versions(x.device)) == {Setting(17, 2, 1): 0.5, CONFIGS[1]: 0.2}


def test_a_choice_belongs_to_the_kernels_sources_where_it_can_run_and_to_the_library(monkeypatch):
    asked = mock.Mock()
    monkeypatch.setattr(tune.store, "versions", asked)
    monkeypatch.setattr(torch.backends.cusparselt, "version", lambda: 800)
    for reason, sources in (("", (small.SOURCE, Path(small.__file__))), ("no compiler", ())):
        monkeypatch.setattr(small, "unsupported", lambda device, dtype, reason=reason: reason)
        tune.versions.__wrapped__(torch.device("cpu"))
        asked.assert_called_with(*sources, cusparselt="800")


# The search


@pytest.fixture
def probing(monkeypatch):
    """Times are made up: of the configs the second, of the algorithms number 1 is the fastest, and slower than both."""
    monkeypatch.setattr(small, "candidates", lambda shape, rows: CONFIGS if rows <= small.MOST_ROWS else [])
    times = {0: 4.0, 1: 1.0, 2: 3.0, 3: 2.0} | dict(zip(CONFIGS, (0.5, 0.25), strict=True))
    clock = lambda self, way: contextlib.nullcontext(lambda: times[getattr(way, "alg_id", way)])  # noqa: E731
    monkeypatch.setattr(Probe, "timed", clock)


def search():
    """With time for every candidate, on a busy machine too."""
    problem = {"N": 128, "K": 1024, "B": 16, "dtype": "bfloat16"}
    return Found(tuple(tune.run(problem, torch.device("cpu"), seconds=600)))


def test_a_search_tries_every_algorithm_every_config_and_the_librarys_pick(probing):
    found = search()
    assert found.best().way == found.best(Config).way == CONFIGS[1]
    assert found.best(Setting).way.alg_id == 1
    assert [trial.way for trial in found.trials[:3]] == [*CONFIGS, Setting()]
    settings = [trial.way for trial in found.trials if isinstance(trial.way, Setting)]
    assert {setting.alg_id for setting in settings} == {0, 1, 2, 3}
    assert {setting.split_k for setting in settings} == {1, -1, 2, 4}
    assert not any(trial.wrong or trial.refused for trial in found.trials)
    assert all(abs(trial.error.rms_ratio - 1) < 0.1 for trial in found.trials)


@pytest.mark.parametrize("fault", ["the next kernel fails", "an accelerator's error"])
def test_a_broken_context_ends_the_search_as_no_refusal_does(probing, monkeypatch, fault):
    tried, broken = [], torch.AcceleratorError("CUDA error: an illegal instruction was encountered")

    def breaking(x, buffer, shape, way, out=None, bias=None):
        tried.append(way.alg_id)
        if way.alg_id == 1:
            monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock(side_effect=broken))
            raise broken if "accelerator" in fault else RuntimeError("CUDA error: internal error")
        return multiply(x, buffer, shape, way, out, bias)

    multiply = cslt.multiply
    monkeypatch.setattr(cslt, "multiply", breaking)
    with pytest.raises(BrokenContextError, match=r"illegal instruction|internal error"):
        search()
    assert tried[-1] == 1  # nothing was tried in the broken context
