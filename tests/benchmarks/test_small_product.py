"""What small.py says of the recorded sweep of the small-batch kernel's configurations."""

import json
from statistics import mean

import pytest

from benchmarks import small_product
from blockshock_lib.kernels.sparse24 import small
from blockshock_lib.kernels.sparse24.small import Config

RECORDED = small_product.ROOT / "benchmarks" / "measured" / "small_product-nvidia-h200.json"


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
    assert {b for _, b, *_ in recorded} == {8, 16, 32, 64, small.TILE_ROWS}
    assert min(n for n, *_ in recorded) == 1024 and max(n for n, *_ in recorded) == 40960
    for n, b, library, times in recorded:
        mine = times[small.default((n, n), b)]
        assert mine < library
        # One default serves up to N = 5792: at B = 128 it is 4096's best, and smaller weights want more splits.
        assert mine < (1.4 if n < 4096 and b == 128 else 1.11) * min(times.values()), (n, b)
