"""Where the time went: sums that one can do by hand, and the shipped traces."""

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.files import ROOT
from blockshock_lib.report import timeline, traces
from blockshock_lib.runs import records
from blockshock_lib.studies.linear.axes import AXES
from tests.report import chrome
from tests.report.frames import words

REFERENCE = ROOT / "outputs" / "reference"


def draw(work, frame):
    return timeline.timeline(work, AXES, frame)


def test_the_first_call_is_left_out_for_the_ranks_only_met_at_its_end(tmp_path):
    # Rank 1 starts 900 us late, so rank 0's first all-reduce takes 910 us.
    chrome.write(
        tmp_path,
        [chrome.event("gemm", 0, 100), chrome.event("ncclAllReduce", 100, 910), *chrome.calls(1010, 100, 10, 2)],
    )
    chrome.write(tmp_path, chrome.calls(900, 100, 10), rank=1)
    work = traces.read(tmp_path, AXES)
    table = timeline.exposed(work, AXES)
    assert set(table["clock"]) == {"shared"} and table["span (ms)"].to_numpy() == pytest.approx([0.22, 0.22])
    assert table["exposed (%)"].to_numpy() == pytest.approx([9.1, 9.1])
    parts = timeline.stretches(work)
    assert parts["start_ms"].min() == pytest.approx(0.9), "drawn from when both were at work"
    lead = parts[~parts["counted"]]
    assert lead["end_ms"].max() == pytest.approx(1.01) == parts.loc[parts["counted"], "start_ms"].min()


def test_ranks_without_a_common_clock_have_spans_of_their_own(tmp_path):
    chrome.write(tmp_path, chrome.calls(0, 90, 10), base=None)
    chrome.write(tmp_path, chrome.calls(5_000_000, 40, 10), rank=1)
    table = timeline.exposed(traces.read(tmp_path, AXES), AXES)
    assert set(table["clock"]) == {"own"}
    assert list(table["span (ms)"]) == pytest.approx([0.2, 0.1]) and list(table["exposed (%)"]) == [10, 20]


def test_gloo_counts_as_communication_and_what_hides_it_as_compute(tmp_path):
    events = [chrome.op("aten::mm", 0, 50), chrome.gloo(50, 10)]
    chrome.write(tmp_path, [*events, chrome.op("aten::mm", 70, 30), chrome.gloo(90, 40), chrome.op("add", 140, 10)])
    row = timeline.exposed(traces.read(tmp_path, AXES), AXES).iloc[0]
    assert row["span (ms)"] == pytest.approx(0.09) and row["communication (ms)"] == pytest.approx(0.04)
    assert row["exposed (ms)"] == pytest.approx(0.03) and row["idle (ms)"] == pytest.approx(0.02)


def test_stretches_agree_with_a_count_on_a_grid():
    rng, grid = np.random.default_rng(0), np.arange(0.5, 80)
    for _ in range(30):
        begin = rng.integers(0, 60, 16)
        work = pd.DataFrame({"start_ms": begin, "duration_ms": rng.integers(1, 12, 16), "name": "x", "device": "cuda"})
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
    chrome.write(tmp_path, chrome.calls(0, 90, 10))
    chrome.write(tmp_path, chrome.calls(0, 80, 20), rank=1)
    (ax,) = draw(traces.read(tmp_path, AXES), pd.DataFrame()).axes
    blue = [group for group in ax.collections if np.allclose(group.get_facecolor()[0][:3], [0, 0x72 / 255, 0xB2 / 255])]
    for pale, starts in ((True, [0]), (False, [0.1, 0.2])):
        paths = [path for group in blue if (group.get_alpha() < 1) == pale for path in group.get_paths()]
        drawn = sorted((int(box.ymin), box.xmin, box.xmax) for box in (path.get_extents() for path in paths))
        assert np.allclose(drawn, [(rank, s, s + 0.09 - 0.01 * rank) for rank in (0, 1) for s in starts])
    hatched = [group for group in ax.collections if group.get_hatch() and "/" in group.get_hatch()]
    assert hatched and all(group.get_facecolor()[0][0] > 0.8 for group in hatched)


def test_a_cpu_makes_no_claim_with_its_records_or_without_nor_do_ranks_played_by_one_gpu():
    cpu, cuda = (REFERENCE / f"phase1-{name}" for name in ("cpu", "cuda"))
    for frame in (records.load(cpu), pd.DataFrame()):
        assert "no claim about speed: CPU" in words(draw(traces.read(cpu, AXES), frame))
    emulated = records.load(cuda).assign(emulated=True)
    assert "no claim about speed: emulated" in words(draw(traces.read(cuda, AXES), emulated))


@pytest.mark.filterwarnings("ignore:skipped")
def test_without_traces_or_with_damaged_ones_it_says_so(tmp_path):
    assert "this run holds no traces" in words(draw(traces.read(tmp_path, AXES), pd.DataFrame()))
    chrome.write(tmp_path, []).write_bytes(b"x")
    assert "all 1 traces are damaged" in words(draw(traces.read(tmp_path, AXES), pd.DataFrame()))
    chrome.write(tmp_path, chrome.calls(0, 90, 10), method="dense")
    assert "1 damaged trace left out." in words(draw(traces.read(tmp_path, AXES), pd.DataFrame()))
