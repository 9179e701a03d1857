"""The sweep of the small-batch kernel's configurations, and what small.py says of the recorded one."""

import contextlib
import json
from statistics import mean
from types import SimpleNamespace

import pytest
import torch

from benchmarks import small_product
from benchmarks.small_product import grid, line, measure
from blockshock_lib.kernels.sparse24 import small
from blockshock_lib.kernels.sparse24.plans import Setting
from blockshock_lib.kernels.sparse24.small import Config
from blockshock_lib.kernels.tuning.search import Error

RECORDED = small_product.ROOT / "benchmarks" / "measured" / "small_product-nvidia-h200.json"


@pytest.mark.parametrize("rows", [1, 8, 64, 128])
@pytest.mark.parametrize("n", [64, 1024, 40960])
def test_the_grid_holds_what_fits_and_every_candidate(n, rows):
    found = grid(n, rows)
    assert len(found) == len(set(found))
    assert all(config.fits(small.eights(rows)) for config in found)
    assert all(config.split == 1 or config.split * 128 * config.unroll <= n for config in found)
    assert set(small.candidates((n, n), rows)) <= set(found)


@pytest.fixture
def gpu(monkeypatch):
    """Stands in for the GPU: times by configuration, and what was compiled, checked and closed."""
    seen = SimpleNamespace(prepared=[], checked=[], closed=0, wrong=None, timed=[])

    class Probe:
        def __init__(self, shape, rows, dtype, device):
            assert dtype == torch.bfloat16

        def check(self, config):
            seen.checked.append(config)
            return Error(9.0, 9.0) if config == seen.wrong else Error(1.0, 1.0)

        @contextlib.contextmanager
        def timed(self, config):
            seen.timed.append(config)
            yield lambda: 1 / (1 + seen.prepared.index(config))  # the last one is the fastest

        def close(self):
            seen.closed += 1

    found = SimpleNamespace(best=lambda kind: SimpleNamespace(ms=0.5) if kind is Setting else None)
    monkeypatch.setattr(small_product, "Probe", Probe)
    monkeypatch.setattr(small_product.tune, "problem_of", lambda *key: key)
    monkeypatch.setattr(small_product.tune, "searched", lambda key, device: found)
    monkeypatch.setattr(small, "prepare", lambda configs, *_: seen.prepared.__setitem__(slice(None), configs))
    return seen


def test_every_configuration_is_compiled_checked_and_timed_and_the_fastest_comes_first(gpu):
    row = measure(1024, 16, torch.device("cuda", 0))
    configs = grid(1024, 16)
    assert gpu.prepared == gpu.checked == gpu.timed == configs and gpu.closed == 1
    assert (row["n"], row["b"], row["cslt_ms"]) == (1024, 16, 0.5)
    assert row["configs"] == [[*config, 1 / (1 + i)] for i, config in reversed(list(enumerate(configs)))]
    assert line(row).startswith(f"  1024   16    0.5000  {1 / len(configs):.4f} {tuple(configs[-1])}")


def test_a_wrong_configuration_ends_the_benchmark(gpu):
    gpu.wrong = Config(1, 1, 1, 4, 4)
    with pytest.raises(RuntimeError, match="is wrong for 1024x1024, B=16"):
        measure(1024, 16, torch.device("cuda", 0))
    assert gpu.closed == 1


@pytest.fixture(scope="module")
def recorded():
    """(N, B, ms of cuSPARSELt, config -> ms) of each size of the sweep that small.py's choices rest on."""
    rows = json.loads(RECORDED.read_text())["rows"]
    return [(r["n"], r["b"], r["cslt_ms"], {Config(*c): ms for *c, ms in r["configs"]}) for r in rows]


def test_the_best_candidate_is_nearly_the_best_of_all(recorded):
    assert len({config for *_, times in recorded for config in times}) >= 80
    behind = []
    for n, b, _, times in recorded:
        found = small.candidates((n, n), b)
        assert set(found) <= set(times), "a candidate that the sweep has not timed"
        behind.append(min(times[config] for config in found) / min(times.values()) - 1)
    assert 0.02 < max(behind) < 0.0235 and mean(behind) < 0.005


def test_the_kernel_was_faster_than_the_tuned_library_at_every_size_by_default_too_and_that_near_the_best(recorded):
    speed = [library / min(times.values()) for *_, library, times in recorded]
    assert min(speed) > 1.45 and max(speed) < 2.85
    assert {b for _, b, *_ in recorded} == {8, 16, 32, 64, small.MOST_ROWS}
    assert min(n for n, *_ in recorded) == 1024 and max(n for n, *_ in recorded) == 40960
    for n, b, library, times in recorded:
        mine = times[small.default((n, n), b)]
        assert mine < library
        # One default serves up to N = 5792: at B = 128 it is 4096's best, and smaller weights want more splits.
        assert mine < (1.4 if n < 4096 and b == 128 else 1.11) * min(times.values()), (n, b)
