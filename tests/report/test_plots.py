"""What every figure promises, and that what is drawn is what was measured."""

import io
from functools import partial

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.report import figures, machine_plots, plots, verdicts
from blockshock_lib.report.frames import summary
from blockshock_lib.studies.linear.axes import AXES
from tests.report import frames
from tests.report.frames import title, words
from tests.studies.linear.report.shipped import shipped

time_vs_n, ratio_heatmap, roofline = (
    partial(figure, axes=AXES) for figure in (plots.time_vs_n, plots.ratio_heatmap, machine_plots.roofline)
)
RUNS = {
    "gpu": dict(ns=(4096, 8192, 16384, 40960), bs=(16, 256, 4096), repeats=3),
    "cpu": dict(ns=(256, 512), bs=(16,), device="cpu", groups=2, repeats=3, noise=0.2),
    "rectangular": dict(ns=(), bs=(16,), features=((4096, 16384), (8192, 32768)), groups=2, repeats=3),
}
SMALL = dict(ns=(4096, 8192), bs=(16, 4096), methods=("dense", "row_parallel", "block_shock"), repeats=6)


OF_FRAME = (time_vs_n, ratio_heatmap, roofline)


@pytest.fixture(scope="module")
def runs():
    return {name: frames.make(**run) for name, run in RUNS.items()}


@pytest.fixture(scope="module")
def frame():
    return frames.make((4096, 8192), (16, 64, 256, 1024, 4096), repeats=4)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("figure", OF_FRAME)
def test_every_figure_is_small_has_alternative_text_and_stays_inside_its_edges(figure, name, runs):
    fig = figure(runs[name])
    assert len(fig.alt) > 40 and len(figures.png(fig)) < 80_000
    assert figure is not time_vs_n or name != "rectangular" or fig.axes[0].get_xlabel() == "√(in · out features)"
    for text in fig.texts:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= fig.bbox.x1, f"{text.get_text()!r} runs over the edge"


@pytest.mark.parametrize("figure", OF_FRAME)
def test_one_method_is_enough(figure):
    for method in ("block_shock", "my_new_method"):
        assert figure(frames.make((4096,), (16,), methods=(method,), groups=1, repeats=1)).alt


def test_a_line_of_time_goes_through_its_methods_medians(frame):
    panel = time_vs_n(frame).axes[0]
    table = summary(frame, AXES, "forward_kernel")
    ours = table[table["method"].eq("block_shock") & table["batch"].eq(16)].sort_values("size")
    lines = {line.get_color(): line for line in panel.lines if len(line.get_xdata()) == 2}
    assert len(lines) == len(frames.METHODS) and np.allclose(lines["#D55E00"].get_ydata(), ours["median"])


def test_on_a_cpu_no_figure_of_time_says_kernel_time():
    cpu = frames.make((256, 512), (16,), device="cpu", kernel=True, groups=2, repeats=2)
    fig = time_vs_n(cpu)
    assert fig.axes[0].get_ylabel() == "time of a forward, plain calls" and "kernel" not in fig.alt.lower()


def test_the_title_of_a_heat_map_counts_what_the_intervals_exclude():
    parity = 1 / verdicts.ratio(frames.make(**SMALL), AXES, "row_parallel", "block_shock")["ratio"]
    mixed = frames.make(**SMALL, speedup={("block_shock", 4096, 16): parity[0], ("block_shock", 8192, 4096): 1.6})
    said = title(ratio_heatmap(mixed))
    assert said.startswith("Is Block-Shock faster? Sometimes faster here") and said.endswith("; 1 undecided.")
    assert "of 4 cases 1 faster, by 35%; 2 slower, by " in said


def test_only_decided_cells_are_coloured():
    mesh = ratio_heatmap(frames.make(**SMALL, groups=1)).axes[0].collections[0]
    assert np.allclose(mesh.get_array(), 0), "one group decides nothing"
    assert (ratio_heatmap(frames.make(**SMALL)).axes[0].collections[0].get_array() < 0).all()


def test_the_roof_is_the_lower_of_bandwidth_and_gemm_rate():
    run = frames.make((4096,), (256,), repeats=4)
    ceilings = machine_plots.ceilings(run)
    roof = next(line for line in roofline(run).axes[0].lines if line.get_linestyle() == "-")
    x, y = np.array(roof.get_xdata()), np.array(roof.get_ydata())
    assert np.allclose(y, np.minimum(ceilings["copy_bandwidth"] * x / 1e3, ceilings["gemm_rate"]))


def test_the_matrix_counts_checks_of_every_method_and_what_failed_is_in_the_title():
    run = shipped("phase0-cpu")
    alt = plots.check_matrix(run, AXES).alt
    assert alt.startswith("195 of 245 checks passed, none failed")
    assert "D permuted dense, random: 0/5." in alt and "Block-Shock, checkerboard: 5/5." in alt
    first, second = run.index[run["metric"].eq("check") & run["method"].eq("block_shock")][:2]
    run.loc[first, "value"] = 0.0
    run.loc[second, ["status", "value", "reason"]] = ["oom", float("nan"), "planted"]
    assert plots.check_matrix(run, AXES).alt.startswith("2 of 245 checks did not pass")
    assert "nothing was checked" in plots.check_matrix(run.iloc[:0], AXES).alt


def floors(device="cuda"):
    """One case of a dry run: a product with its link, and the link, ms."""
    columns = ("method", "floor_link", "floor_whole", "bound", "unsupported")
    rows = [
        ("dense", 0.0, 0.03, "arithmetic", ""),
        ("row_parallel", 0.02, 0.035, "link", ""),
        ("block_shock", 0.02, 0.032, "link", ""),
        ("permuted_dense", float("nan"), float("nan"), "", "mask random is not periodic"),
    ]
    case = dict(in_features=4096, out_features=4096, batch=256, mask="random", workload="gaussian", optimizer="")
    case |= dict(device=device, emulated=False, world_size=2, dtype="bf16", work="forward")
    return pd.DataFrame(rows, columns=columns).assign(**case)


def test_a_floor_is_the_larger_bound_of_the_product_and_the_link_after_it():
    fig = machine_plots.floors_figure(floors(), AXES, "outputs/reference/phase1-cuda")
    (ax,) = fig.axes
    order = [tick.get_text() for tick in ax.get_yticklabels()]
    assert order == ["Block-Shock", "D permuted dense", "B1 row-parallel", "A dense"]
    ends = {round(bar.get_y() + 0.34): bar.get_x() + bar.get_width() for bar in ax.patches}  # the last bar of a line
    assert ends == pytest.approx({0: 0.032, 2: 0.035, 3: 0.03})
    assert "bound by the link" in words(fig) and "bound by arithmetic" in words(fig)
    assert "cannot run: mask random is not periodic" in words(fig) and "Ceilings: outputs/reference" in words(fig)
    assert "Block-Shock: 32 µs (link 20 µs; link binds)." in fig.alt
    assert "no claim about speed: CPU" in words(machine_plots.floors_figure(floors("cpu"), AXES))
    assert "nothing to draw" in words(machine_plots.floors_figure(floors().assign(floor_whole=float("nan")), AXES))


def test_measured_times_are_dots_beside_the_floors_and_change_the_title():
    times = pd.Series({"row_parallel": 0.05, "block_shock": 0.08})
    table = floors().assign(measured=lambda rows: rows["method"].map(times))
    fig = machine_plots.floors_figure(table, AXES, "c", "outputs/reference/phase1-cuda")
    (ax,) = fig.axes
    dots = {(*line.get_xdata(), *line.get_ydata()) for line in ax.lines if line.get_marker() == "o"}
    assert {dot for dot in dots if len(dot) == 2 and dot[0] > 0} == {(0.08, 0), (0.05, 2)}
    assert title(fig).endswith("measured, it has 0.62 of its speed") and ax.get_xlim()[1] > 0.08
    assert "Block-Shock: 32 µs" in fig.alt and "80 µs measured" in fig.alt and "Dots: medians of outputs" in words(fig)
    assert "measured" not in title(machine_plots.floors_figure(table, AXES, "c"))


def test_the_legend_of_floors_is_whole_where_every_bound_is_drawn():
    fig = machine_plots.floors_figure(floors().assign(world_size=8, measured=0.1), AXES, "c", "r")
    fig.savefig(io.BytesIO())
    legend = fig.axes[0].get_legend()
    box = legend.get_window_extent()
    assert len(legend.get_texts()) == 3 and box.x0 >= 0 and box.x1 <= fig.bbox.width
