"""The figure of a comparison: readable at 20 cases x 7 methods, and every regression marked."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from blockshock_lib.report import plots
from blockshock_lib.report.compare import changes
from blockshock_lib.report.compare import plots as compare_plots
from tests.report import frames

SMALL = dict(ns=(4096, 8192), bs=(16, 4096), methods=("dense", "row_parallel", "block_shock"), repeats=4, groups=5)
WIDE = dict(ns=(4096, 8192, 16384, 40960), bs=(16, 64, 256, 1024, 4096), repeats=2, groups=3)


def compared(a, b):
    return changes.compare(a, b).rows


def draw(rows):
    return compare_plots.ratios(rows, "old", "new", "How to read it.")


def words(fig):
    return " ".join(text.get_text().replace("\n", " ") for text in fig.findobj(Text))


def marks(fig, kind):
    return sum(line.get_marker() == kind for ax in fig.axes for line in ax.lines)


def test_every_time_has_its_mark_in_its_methods_panel():
    rows = compared(frames.make(**SMALL, seed=1), frames.make(**SMALL, seed=2))
    fig = draw(rows)
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["A", "B1", "Block-Shock"]
    assert [marks_in(ax) for ax in fig.axes] == [8, 8, 8]
    assert [label.get_text() for label in fig.axes[0].get_yticklabels()] == [
        f"N={n}, B={b}" for n in (4096, 8192) for b in (16, 4096)
    ]
    assert "No regression from a to b" in words(fig)


def marks_in(ax):
    return sum(line.get_marker() in "oXv" and len(line.get_xdata()) == 1 for line in ax.lines)


def test_regressions_are_counted_in_the_title_and_marked_where_they_are():
    slow = {("row_parallel", 8192, 4096): 1 / 1.3, ("block_shock", 4096, 16): 1.4}
    b = frames.fail(frames.make(**SMALL, seed=1, speedup=slow), "dense", n=4096, batch=16)
    b.loc[b["metric"].eq("weight_bytes") & b["method"].eq("block_shock") & b["n"].eq(8192), "value"] *= 1.1
    fig = draw(compared(frames.make(**SMALL, seed=1), b))
    said = words(fig)
    assert "b is worse than a in 4 cells: check in 1, kernel time in 1, call time in 1, weight in 2" in said
    assert marks(fig, "X") == 2 and marks(fig, "v") == 2
    texts = [[text.get_text().strip() for text in ax.texts] for ax in fig.axes]
    assert texts == [["check"], [], ["weight", "weight"]]
    assert [len(ax.patches) for ax in fig.axes] == [1, 1, 2], "shaded cells"
    lines = [[round(line.get_ydata()[0]) for line in ax.lines if line.get_marker() in "Xv"] for ax in fig.axes]
    assert lines == [[], [3, 3], [0, 0]], "on the line of their case"
    assert "kernel time of B1 row-parallel at 8192x8192, B=4096: 1.300x" in fig.alt
    assert "check of A dense at 4096x4096, B=16: passed → failed" in fig.alt


def test_a_mark_stands_at_its_ratio_with_its_interval_cut_at_the_edge():
    slow = frames.make(**SMALL, seed=1, speedup={("dense", 4096, 16): 1 / 1.5})
    ax = draw(compared(frames.make(**SMALL, seed=1), slow)).axes[0]
    rows = compared(frames.make(**SMALL, seed=1), slow)
    places = sorted(line.get_xdata()[0] for line in ax.lines if line.get_marker() == "X")
    assert places == pytest.approx(sorted(rows[rows["outcome"].eq("regression")]["ratio"]))


def test_an_interval_wider_than_the_axis_is_cut_at_its_edge_and_counted():
    few = SMALL | {"groups": 2, "group_effect": 0.02}
    rows = compared(frames.make(**few, seed=1), frames.make(**few, seed=2))
    assert rows["high"].max() > 100, "the factory must give a useless interval"
    fig = draw(rows)
    low, high = fig.axes[0].get_xlim()
    ends = np.concatenate([line.get_xdata() for line in fig.axes[0].lines if line.get_marker() == "None"])
    assert ends.min() >= low * (1 - 1e-9) and ends.max() <= high * (1 + 1e-9) and high < 2
    assert f"{int((rows['high'] > high).sum())} intervals run over the edge" in words(fig)


def test_twenty_cases_of_seven_methods_stay_readable():
    fig = draw(compared(frames.make(**WIDE, seed=1), frames.make(**WIDE, seed=2)))
    assert len(fig.axes) == 7 and len(fig.axes[0].get_yticklabels()) == 20
    fig.draw_without_rendering()
    boxes = [label.get_window_extent() for label in fig.axes[0].get_yticklabels()]
    assert not any(one.overlaps(other) for one, other in zip(boxes[1:], boxes, strict=False))
    assert max(fig.get_size_inches()) < 14 and len(plots.png(fig)) < 120_000
    for text in fig.texts:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= fig.bbox.x1 and box.y0 >= 0
    for ax in fig.axes:
        for label in [*ax.get_xticklabels(), ax.xaxis.label]:
            assert not any(label.get_window_extent().overlaps(text.get_window_extent()) for text in fig.texts)


def test_of_more_cases_than_fit_those_with_regressions_are_drawn_and_the_rest_is_counted():
    masks = [f"mask{i}" for i in range(45)]
    many = dict(ns=(4096,), bs=(16,), methods=("dense",), masks=masks, groups=2, repeats=1)
    a, b = frames.make(**many, seed=1), frames.fail(frames.make(**many, seed=2), "dense", mask="mask44")
    fig = draw(compared(a, b))
    names = [label.get_text() for label in fig.axes[0].get_yticklabels()]
    assert len(names) == compare_plots.MOST and "N=4096, B=16, mask44" in names
    assert "5 cases with smaller changes are not drawn." in words(fig)


def test_cpu_and_emulated_runs_say_that_they_make_no_claim():
    cpu = frames.make(ns=(256,), bs=(16,), device="cpu", groups=2, repeats=2)
    assert "no claim about speed: CPU" in words(draw(compared(cpu, cpu)))
    emulated = frames.make(ns=(4096,), bs=(16,), emulated=True, groups=2, repeats=2)
    assert "no claim about speed: emulated" in words(draw(compared(emulated, emulated)))


def test_without_times_there_is_nothing_to_draw_unless_something_regressed():
    checks = frames.make(ns=(4096,), bs=(16,), methods=("dense", "row_parallel"), groups=1, timed=False)
    assert "nothing to draw" in words(draw(compared(checks, checks)))
    assert "nothing to draw" in words(draw(compared(pd.DataFrame(), pd.DataFrame())))
    fig = draw(compared(checks, frames.fail(checks, "dense")))
    assert "b is worse than a in 1 cell: check in 1" in words(fig) and len(fig.axes) == 1 and plots.png(fig)


def test_of_a_training_run_the_step_is_drawn_and_a_slower_forward_is_named():
    a = trained(frames.make(**SMALL, seed=1))
    b = a.copy()
    hit = b["method"].eq("dense") & b["n"].eq(4096) & b["batch"].eq(16)
    b.loc[hit & b["metric"].eq("forward_kernel"), "value"] *= 1.5
    b.loc[hit & b["metric"].eq("step_kernel"), "value"] *= 1.2
    fig = draw(compared(a, b))
    assert [marks_in(ax) for ax in fig.axes] == [8, 8, 8] and marks(fig, "X") == 1
    assert [[text.get_text().strip() for text in ax.texts] for ax in fig.axes] == [["kernel time"], [], []]
    both = pd.concat([a.assign(optimizer=name, case=a["case"] + name) for name in ("adamw", "sgd")])
    names = [label.get_text() for label in draw(compared(both, both)).axes[0].get_yticklabels()]
    assert names[0] == "N=4096, B=16, SGD" and names[-1] == "N=8192, B=4096, AdamW"
    (legend,) = [ax.get_legend() for ax in fig.axes if ax.get_legend()]
    said = [text.get_text() for text in legend.get_texts()]
    assert "kernel time, step" in said and "call time, step" in said and "kernel time" not in said


def trained(frame):
    forward = frame[frame["metric"].isin(["forward_kernel", "forward_call"])]
    step = forward.assign(metric=forward["metric"].str.replace("forward", "step"), value=3 * forward["value"])
    return pd.concat([frame, step], ignore_index=True).assign(phase="phase3", optimizer="sgd")
