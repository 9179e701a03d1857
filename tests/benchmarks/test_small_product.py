"""What small.py says of the recorded sweep of the small-batch kernel's configurations."""

import json
from statistics import mean

from blockshock_lib.files import ROOT
from blockshock_lib.kernels.sparse24 import small
from blockshock_lib.kernels.sparse24.small import Config

ROWS = json.loads((ROOT / "benchmarks/measured/small_product-nvidia-h200.json").read_text())["rows"]
# (N, B, ms of cuSPARSELt, config -> ms) of each size of the sweep that small.py's choices rest on.
RECORDED = [(r["n"], r["b"], r["cslt_ms"], {Config(*c): ms for *c, ms in r["configs"]}) for r in ROWS]


def test_the_best_candidate_is_nearly_the_best_of_all():
    assert len({config for *_, times in RECORDED for config in times}) >= 80
    behind = []
    for n, b, _, times in RECORDED:
        found = small.candidates((n, n), b)
        assert set(found) <= set(times), "a candidate that the sweep has not timed"
        behind.append(min(times[config] for config in found) / min(times.values()) - 1)
    assert 0.02 < max(behind) < 0.0235 and mean(behind) < 0.005


def test_the_kernel_was_faster_than_the_tuned_library_at_every_size_by_default_too_and_that_near_the_best():
    for n, b, library, times in RECORDED:
        assert 1.45 < library / min(times.values()) < 2.85
        mine = times[small.default((n, n), b)]
        assert mine < library
        # One default serves up to N = 5792: at B = 128 it is 4096's best, and smaller weights want more splits.
        assert mine < (1.4 if n < 4096 and b == 128 else 1.11) * min(times.values()), (n, b)
