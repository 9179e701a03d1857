import numpy as np
import pytest

from blockshock_lib.report import cells, time_plots
from tests.report import frames


@pytest.fixture(scope="module")
def frame():
    return frames.make((4096, 8192), (16, 64, 256, 1024, 4096), repeats=4)


def test_each_panel_holds_one_line_a_method_through_its_medians(frame):
    fig = time_plots.time_vs_n(frame)
    panels = [ax for ax in fig.axes if ax.get_title(loc="left").startswith("B = ")]
    assert len(panels) == 5
    table = cells.summary(frame, "forward_kernel")
    ours = table[table["method"].eq("block_shock") & table["batch"].eq(16)].sort_values("size")
    lines = {line.get_color(): line for line in panels[0].lines if len(line.get_xdata()) == 2}
    assert len(lines) == len(frames.METHODS)
    assert np.allclose(lines["#D55E00"].get_ydata(), ours["median"])
    assert all(ax.get_xscale() == ax.get_yscale() == "log" for ax in panels)


def test_the_title_counts_the_cells_in_which_a_method_has_the_lowest_median(frame):
    title = time_plots.time_vs_n(frame).texts[0].get_text().replace("\n", " ")
    table = cells.summary(frame, "forward_kernel").pivot(index="case", columns="method", values="median")
    first = table.drop(columns="dense").idxmin(axis=1).value_counts()
    assert first.index[0] == "row_parallel"
    assert title == (
        f"By median, B1 row-parallel is the fastest multi-GPU method in {first['row_parallel']} of 10 cells, "
        "Block-Shock in none"
    )
    ours = time_plots.time_vs_n(
        frames.make((4096,), (16,), groups=2, repeats=2, speedup={("block_shock", 4096, 16): 9})
    )
    assert "Block-Shock is the fastest multi-GPU method in 1 of 1 cells" in ours.texts[0].get_text().replace("\n", " ")


def test_methods_are_named_once_in_the_legend(frame):
    fig = time_plots.time_vs_n(frame)
    assert not any(ax.texts for ax in fig.axes)
    assert len(fig.axes[-1].get_legend().get_texts()) == len(frames.METHODS)


def test_a_legend_below_lies_inside_the_figure():
    fig = time_plots.time_vs_n(frames.make((4096, 8192), (16, 64, 256), groups=2, repeats=2))
    fig.canvas.draw()
    box = fig.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= fig.bbox.width and box.y0 >= 0
    assert len(fig.legends) == 1 and len(fig.legends[0].get_texts()) == len(frames.METHODS)


def test_on_a_cpu_no_figure_of_time_says_kernel_time():
    frame = frames.make((256, 512), (16,), device="cpu", kernel=True, groups=2, repeats=2)
    fig = time_plots.time_vs_n(frame)
    assert fig.axes[0].get_ylabel() == "time of a forward, plain calls"
    assert "kernel" not in fig.alt.lower()
    parts = time_plots.parts(frame)
    assert (parts[["exposed communication", "host overhead"]] == 0).all().all(), "plain calls do not tell them apart"


def test_the_spread_is_drawn_as_a_band(frame):
    fig = time_plots.time_vs_n(frame)
    assert all(len(ax.collections) == len(frames.METHODS) for ax in fig.axes if ax.get_title(loc="left"))


def test_parts_of_a_forward_sum_to_its_call_time(frame):
    table = time_plots.parts(frame)
    total = table["compute"] + table["exposed communication"] + table["host overhead"]
    assert np.allclose(total, table["whole"])
    assert (table["not told apart (no kernel time)"] == 0).all()


def test_a_bar_whose_parts_do_not_add_is_hatched_and_the_subtitle_says_why():
    frame = frames.make((8192,), (4096,), repeats=4, noise=1e-3)
    frame["value"] = frame["value"].mask(frame["metric"].eq("reduce_kernel"), frame["value"] * 0.9)
    assert time_plots.parts(frame)["adds"].all()
    assert "hatched" not in time_plots.stacked(frame).alt
    ours = frame["method"].eq("block_shock")
    slow = frame["value"].mask(ours & frame["metric"].eq("compute_kernel"), frame["value"] * 1.3)
    table = time_plots.parts(frame.assign(value=slow)).set_index("method")
    assert list(table.index[~table["adds"]]) == ["block_shock"]
    fig = time_plots.stacked(frame.assign(value=slow))
    assert "hatched: the parts do not add" in fig.alt
    assert "of Block-Shock's call" not in fig.alt, "no claim from parts that do not add"
    assert sum(bar.get_hatch() == "////" for ax in fig.axes for bar in ax.patches) == (~table["adds"]).sum()


def test_a_cut_batch_may_hide_its_reduction_and_is_not_hatched():
    frame = frames.make((8192,), (4096,), repeats=4, noise=1e-3)
    ours = frame["method"].eq("block_shock")
    slow = frame.assign(value=frame["value"].mask(ours & frame["metric"].eq("compute_kernel"), frame["value"] * 1.2))
    for chunks, adds in (("1", False), ("2", True)):
        cut = slow.assign(detail=slow["detail"].mask(ours & slow["metric"].eq("forward_kernel"), chunks))
        assert time_plots.parts(cut).set_index("method").loc["block_shock", "adds"] == adds


def test_exposed_communication_is_never_drawn_below_0():
    frame = frames.make((8192,), (16,), repeats=4)
    slow = frame["value"].mask(frame["metric"].eq("compute_kernel"), frame["value"] * 3)
    assert (time_plots.parts(frame.assign(value=slow))["exposed communication"] == 0).all()


def test_without_kernel_time_the_rest_is_not_told_apart():
    table = time_plots.parts(frames.make((256,), (16,), device="cpu", groups=1, repeats=3))
    assert np.allclose(table["not told apart (no kernel time)"], table["whole"])
    assert (table[["compute", "exposed communication", "host overhead"]] == 0).all().all()


def test_stacked_draws_the_chosen_batches(frame):
    titles = [ax.get_title(loc="left") for ax in time_plots.stacked(frame, batches=(64,)).axes]
    assert titles == ["N=4096, B=64", "N=8192, B=64"]
    assert "N=8192, B=4096" in [ax.get_title(loc="left") for ax in time_plots.stacked(frame).axes]


@pytest.mark.parametrize(
    "value, text", [(0.00812, "8.1 µs"), (12.7, "13 ms"), (0.4, "400 µs"), (1, "1 ms"), (2500, "2.5 s"), (0, "0")]
)
def test_times_are_written_in_the_nearer_unit(value, text):
    assert time_plots.milliseconds(value) == text
