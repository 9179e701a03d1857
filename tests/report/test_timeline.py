"""Where the time went: sums that one can do by hand, and the shipped traces."""

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.report import timeline
from blockshock_lib.studies.linear.axes import AXES
from tests.report import chrome
from tests.report.frames import words

NONE = pd.DataFrame()


def draw(folder):
    return timeline.timeline(NONE, AXES, folder)


def test_ranks_that_do_not_meet_have_spans_of_their_own_and_stretches_agree_with_a_count_on_a_grid(tmp_path):
    chrome.write(tmp_path, [chrome.event("gemm", 0, 90)])
    chrome.write(tmp_path, [chrome.event("gemm", 5_000_000, 40)], rank=1)
    table = timeline.exposed(NONE, AXES, tmp_path)
    assert list(table["span (ms)"]) == pytest.approx([0.09, 0.04]) and list(table["idle (%)"]) == [0, 0]
    rng, grid = np.random.default_rng(0), np.arange(0.5, 80)
    for _ in range(30):
        begin = rng.integers(0, 60, 16)
        work = pd.DataFrame({"start_ms": begin, "duration_ms": rng.integers(1, 12, 16), "name": "x"})
        work = work.assign(case="c", method="m", rank=0, kind=["compute", "communication"] * 8)
        times = begin[:, None], (begin + work["duration_ms"]).to_numpy()[:, None]
        runs = (times[0] <= grid) & (grid < times[1])
        busy = {"compute": runs[::2].any(axis=0), "communication": runs[1::2].any(axis=0)}
        busy["exposed"] = busy["communication"] & ~busy["compute"]
        busy["idle"] = (begin.min() <= grid) & (grid < times[1].max()) & ~runs.any(axis=0)
        parts = timeline.stretches(work)
        took = (parts["end_ms"] - parts["start_ms"]).groupby(parts["kind"]).sum()
        assert all(took.get(kind, 0) == hit.sum() for kind, hit in busy.items())


def test_the_bars_are_the_stretches(tmp_path):
    chrome.write(tmp_path, chrome.calls(0, 60, 40, count=1) + chrome.calls(100, 90, 10, count=2))
    chrome.write(tmp_path, chrome.calls(0, 50, 50, count=1) + chrome.calls(100, 80, 20, count=2), rank=1)
    (ax,) = draw(tmp_path).axes
    blue = [group for group in ax.collections if np.allclose(group.get_facecolor()[0][:3], [0, 0x72 / 255, 0xB2 / 255])]
    boxes = [path.get_extents() for group in blue for path in group.get_paths()]
    drawn = sorted((int(box.ymin), box.xmin, box.xmax) for box in boxes)
    # From the end of the first collective on, where the second call begins, until a communication has ended.
    assert np.allclose(drawn, [(0, 0, 0.09), (0, 0.1, 0.19), (1, 0, 0.08), (1, 0.1, 0.18)])
    assert ax.get_xlim() == pytest.approx((0, 1.03 * 0.1))
    hatched = [group for group in ax.collections if group.get_hatch() and "/" in group.get_hatch()]
    assert hatched and all(group.get_facecolor()[0][0] > 0.8 for group in hatched)


@pytest.mark.filterwarnings("ignore:skipped")
def test_without_traces_or_with_damaged_ones_it_says_so(tmp_path):
    assert "this run holds no traces" in words(draw(tmp_path))
    chrome.write(tmp_path, []).write_bytes(b"x")
    assert "all 1 traces are damaged" in words(draw(tmp_path))
    chrome.write(tmp_path, chrome.calls(0, 90, 10), method="dense")
    assert "1 damaged trace left out." in words(draw(tmp_path))
