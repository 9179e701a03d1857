"""The timeline: what is drawn is what was counted."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from blockshock_lib import records
from blockshock_lib.manifest import ROOT
from blockshock_lib.report import plots
from blockshock_lib.report.timeline import plots as trace_plots
from blockshock_lib.report.timeline import tables, traces
from tests.report.timeline import chrome

REFERENCE = ROOT / "outputs" / "reference"


def words(fig):
    return " ".join(text.get_text().replace("\n", " ") for text in fig.findobj(Text))


@pytest.fixture(scope="module")
def cuda():
    return traces.read(REFERENCE / "phase1-cuda"), records.load(REFERENCE / "phase1-cuda")


@pytest.fixture(scope="module")
def cpu():
    return traces.read(REFERENCE / "phase1-cpu"), records.load(REFERENCE / "phase1-cpu")


def test_the_title_is_the_share_of_exposed_communication_over_all_ranks(cuda):
    fig = plots.timeline(*cuda)
    table = tables.exposed(cuda[0])
    rows = table[table["method"].eq("Block-Shock")]
    share = 100 * rows["exposed (ms)"].sum() / rows["span (ms)"].sum()
    assert f"Block-Shock: {share:.0f}% of the time is exposed communication" in words(fig) and share > 1


def test_a_panel_a_method_and_a_line_a_rank(cuda):
    fig = plots.timeline(*cuda)
    titles = [ax.get_title(loc="left").split(":")[0] for ax in fig.axes]
    assert titles == list(dict.fromkeys(tables.exposed(cuda[0])["method"])) and len(titles) == 7
    assert [[label.get_text() for label in ax.get_yticklabels()] for ax in fig.axes] == [
        ["rank 0"],
        *[["rank 0", "rank 1"]] * 6,
    ]
    assert "40960x40960, B=4096" in words(fig) and "no claim" not in words(fig)


def test_one_method_alone(cuda):
    fig = plots.timeline(*cuda, method="row_parallel")
    rows = tables.exposed(cuda[0]).query("method == 'B1 row-parallel'")
    share = 100 * rows["exposed (ms)"].sum() / rows["span (ms)"].sum()
    assert len(fig.axes) == 1 and f"B1 row-parallel: {share:.0f}% of the time" in words(fig)
    assert "no traces" in words(plots.timeline(*cuda, method="nobody"))


def bars(ax, pale):
    """(left, right, middle) of every bar that is counted, or of the pale ones."""
    found = []
    for group in ax.collections:
        if (group.get_alpha() < 1) == pale:
            for path in group.get_paths():
                (x0, y0), (x1, y1) = path.get_extents().get_points()
                found.append((x0, x1, (y0 + y1) / 2, tuple(group.get_facecolor()[0][:3])))
    return found


def test_the_bars_are_the_stretches(tmp_path):
    chrome.write(tmp_path, chrome.calls(0, 90, 10))
    chrome.write(tmp_path, chrome.calls(0, 80, 20), rank=1)
    work = traces.read(tmp_path)
    (ax,) = plots.timeline(work).axes
    blue = np.array([0, 0x72, 0xB2]) / 255
    for pale, starts in ((True, [0]), (False, [0.1, 0.2])):
        drawn = [bar for bar in bars(ax, pale) if np.allclose(bar[3], blue)]
        wanted = [(s, s + (0.09 if rank == 0 else 0.08)) for rank in (0, 1) for s in starts]
        assert np.allclose(sorted((b[0], b[1]) for b in drawn), sorted(wanted))
        assert {round(bar[2]) for bar in drawn} == {0, 1}
    hatched = [group for group in ax.collections if group.get_hatch() and "/" in group.get_hatch()]
    assert hatched and all(group.get_facecolor()[0][0] > 0.8 for group in hatched)


def test_time_counts_from_where_the_drawing_begins(tmp_path):
    chrome.write(
        tmp_path, [chrome.event("gemm", 0, 100), chrome.event("ncclX", 100, 910), *chrome.calls(1010, 100, 10, 2)]
    )
    chrome.write(tmp_path, chrome.calls(900, 100, 10), rank=1)
    (ax,) = plots.timeline(traces.read(tmp_path)).axes
    assert min(bar[0] for bar in bars(ax, True)) == pytest.approx(0, abs=1e-9)
    assert max(bar[1] for bar in bars(ax, False)) == pytest.approx(0.33) and ax.get_xlim()[1] < 0.4


def test_communication_under_compute_is_drawn_apart(tmp_path):
    chrome.write(tmp_path, [*chrome.calls(0, 50, 10, 2), chrome.event("other", 100, 40, tid=8)])
    fig = plots.timeline(traces.read(tmp_path))
    assert "communication under compute" in words(fig)
    chrome.write(tmp_path, chrome.calls(0, 50, 10, 2))
    assert "communication under compute" not in words(plots.timeline(traces.read(tmp_path)))


def test_a_cpu_makes_no_claim_with_its_records_or_without(cpu):
    for args in (cpu, cpu[:1]):
        assert "no claim about speed: CPU" in words(plots.timeline(*args))


def test_ranks_played_by_one_gpu_make_no_claim(tmp_path, cuda):
    work, frame = cuda
    assert "no claim about speed: emulated" in words(plots.timeline(work, frame.assign(emulated=True)))


def test_it_says_which_clock_it_used(tmp_path, cuda):
    assert "The ranks share one clock" in words(plots.timeline(*cuda))
    chrome.write(tmp_path, chrome.calls(0, 90, 10), base=None)
    chrome.write(tmp_path, chrome.calls(0, 80, 20), rank=1)
    said = words(plots.timeline(traces.read(tmp_path)))
    assert "no common clock" in said and "share one clock" not in said
    for rank in (0, 1):
        chrome.write(tmp_path, chrome.calls(0, 90, 10), rank=rank, method="row_parallel")
    said = words(plots.timeline(traces.read(tmp_path)))
    assert "share one clock" in said and "Without one: Block-Shock." in said
    chrome.write(tmp_path / "alone", [chrome.event("gemm", 0, 1)])
    assert "One rank was traced." in words(plots.timeline(traces.read(tmp_path / "alone")))


@pytest.mark.filterwarnings("ignore:skipped")
def test_without_traces_or_with_damaged_ones_it_says_so(tmp_path):
    assert "this run holds no traces" in words(plots.timeline(traces.read(tmp_path), pd.DataFrame()))
    chrome.write(tmp_path, []).write_bytes(b"x")
    assert "all 1 traces are damaged" in words(plots.timeline(traces.read(tmp_path)))
    chrome.write(tmp_path, chrome.calls(0, 90, 10), method="dense")
    assert "1 damaged trace left out." in words(plots.timeline(traces.read(tmp_path)))


def test_of_several_cases_the_longest_is_drawn(tmp_path):
    chrome.write(tmp_path, chrome.calls(0, 90, 10))
    chrome.write(tmp_path, chrome.calls(0, 400, 100), case="ba9876543210")
    fig = plots.timeline(traces.read(tmp_path))
    assert "20% of the time" in words(fig) and "1 other case not drawn" in words(fig)


@pytest.mark.parametrize("run", ["cpu", "cuda"])
def test_it_is_small_has_alternative_text_and_stays_inside_its_edges(run, request):
    fig = plots.timeline(*request.getfixturevalue(run))
    assert "Block-Shock rank 1: " in fig.alt and "exposed communication" in fig.alt
    assert len(plots.png(fig)) < 120_000
    for text in fig.texts:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= fig.bbox.x1
    for legend in fig.legends:
        box = legend.get_window_extent()
        assert box.x1 <= fig.bbox.x1 and not any(box.overlaps(ax.get_window_extent()) for ax in fig.axes)


def test_the_kinds_are_told_apart_without_colour():
    looks = {kind: (below, hatch) for kind, (below, _, _, hatch) in trace_plots._LOOKS.items()}
    assert len({*looks.values()}) == len(looks)


def test_the_lane_of_compute_is_where_the_legend_says(cuda):
    fig = plots.timeline(*cuda, method="block_shock")
    (ax,) = fig.axes
    middle = {
        tuple(group.get_facecolor()[0][:3]): ax.transData.transform(path.get_extents().get_points().mean(axis=0))[1]
        for group in ax.collections
        for path in group.get_paths()[:1]
    }
    compute, sent = (
        max(y for face, y in middle.items() if np.allclose(face, to_rgb(trace_plots._LOOKS[kind][2])))
        for kind in (traces.COMPUTE, tables.EXPOSED)
    )
    assert compute < sent and "compute (lower lane)" in words(fig)
