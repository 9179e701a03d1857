"""What every figure promises, and that what is drawn is what was measured."""

import io
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.report import figures, machine_plots, plots, verdicts
from blockshock_lib.studies.linear.axes import AXES
from blockshock_lib.studies.linear.methods import METHODS
from blockshock_lib.studies.linear.report.plots import one_gpu
from tests.report import frames
from tests.report.frames import SORTING, sorting, title, words
from tests.studies.linear.report.shipped import shipped

time_over, ratio_heatmap, roofline, which_to_use = (
    partial(figure, axes=AXES)
    for figure in (plots.time_over, plots.ratio_heatmap, machine_plots.roofline, plots.which_to_use)
)
RUNS = {
    "gpu": dict(ns=(4096, 8192, 16384, 40960), bs=(16, 256, 4096), repeats=3),
    "cpu": dict(ns=(256, 512), bs=(16,), device="cpu", groups=2, repeats=3, noise=0.2),
    "one method of its own": dict(ns=(4096,), bs=(16,), methods=("my_new_method",), groups=1, repeats=1),
    "rectangular": dict(ns=(), bs=(16,), features=((4096, 16384), (8192, 32768)), groups=2, repeats=3),
}
SMALL = dict(ns=(4096, 8192), bs=(16, 4096), methods=("dense", "row_parallel", "block_shock"), repeats=6)
OF_FRAME = (time_over, ratio_heatmap, roofline, which_to_use)


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
    assert figure is not time_over or name != "rectangular" or fig.axes[0].get_xlabel() == "√(in · out features)"
    for text in fig.texts:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= fig.bbox.x1, f"{text.get_text()!r} runs over the edge"


@pytest.mark.parametrize("figure", OF_FRAME)
def test_a_figure_of_another_study_names_its_methods_and_sizes(figure):
    fig = figure(sorting(groups=3, repeats=4), axes=SORTING)
    assert "no claim" not in words(fig) and "Shares" in fig.alt + words(fig)
    assert "forward" not in words(fig) and "Block-Shock" not in words(fig)


def test_methods_that_bring_no_look_differ_in_colour_and_marker_and_keep_theirs():
    axes, names = replace(SORTING), ["whole", "shared", "row_parallel_rs", "block_shock_fp32", "newcomer"]
    looks = {name: axes.look(name) for name in axes.ordered(names)}
    for part in ("colour", "marker"):
        shipped = {getattr(look, part) for look in METHODS.values()}
        assert len({getattr(look, part) for look in looks.values()} - shipped - {"8"}) == len(names)
    assert looks["whole"].label == "Sorts alone" and looks["newcomer"].label == "newcomer"
    again = replace(axes)
    assert again.ordered(names[::-1]) and {name: again.look(name) for name in names} == looks
    more = [again.look(str(number)) for number in range(15)]
    assert len({*more, *looks.values()}) == 20 == len({(one.colour, one.marker) for one in (*more, *looks.values())})


def test_a_line_of_time_is_the_ratio_of_the_verdict_with_its_interval_and_on_a_cpu_no_kernel_time(frame):
    panel = time_over(frame).axes[0]
    table = verdicts.ratio(frame, AXES, "block_shock", "row_parallel")
    ours = table[table["batch"].eq(16)].sort_values("size")
    lines = {line.get_color(): line for line in panel.lines if len(line.get_xdata()) == 2}
    assert len(lines) == len(frames.METHODS) and np.allclose(lines["#D55E00"].get_ydata(), ours["ratio"])
    assert np.allclose(lines["#0072B2"].get_ydata(), 1) and panel.get_ylabel() == "time over B1's"
    bars = next(bar for bar in panel.collections if np.allclose(bar.get_color()[0][:3], [0xD5 / 255, 0x5E / 255, 0]))
    assert np.allclose([part[:, 1] for part in bars.get_segments()], ours[["low", "high"]])
    rest = frame[frame["method"].ne("row_parallel")]
    assert time_over(rest).axes[0].get_ylabel() == "time over A's", "without the baseline over the first method"
    fig = time_over(frames.make((256, 512), (16,), device="cpu", kernel=True, groups=2, repeats=2))
    assert "time of a forward, plain calls" in words(fig) and "kernel" not in fig.alt.lower()


def test_the_fastest_is_named_with_its_lead_and_what_no_interval_tells_from_it_is_a_tie():
    names = dict(methods=("dense", "row_parallel", "block_shock"), ns=(4096, 8192), bs=(16,), groups=3, repeats=4)
    exact = dict(noise=0, group_effect=0)
    alone = {(name, 4096, 16): by for name, by in (("dense", 3), ("row_parallel", 2), ("block_shock", 1))}
    frame = frames.make(**names, **exact, speedup=alone)
    same = frames.make(**names)
    twins = same[same["method"].eq("row_parallel")].assign(method="dense")
    tie = pd.concat([same[same["method"].ne("dense")], twins], ignore_index=True)
    tie = pd.concat([frame[frame["in_features"].eq(4096)], tie[tie["in_features"].eq(8192)]], ignore_index=True)
    first, second = plots.fastest(tie, AXES, "forward_kernel").to_dict("records")
    speeds = verdicts.ratio(tie, AXES, first["next"], first["best"][0]).iloc[0]
    assert len(first["best"]) == 1 and first["ratio"] == pytest.approx(speeds["ratio"]) and first["low"] > 1
    assert {*second["best"]} == {"dense", "row_parallel"} and second["next"] == "block_shock"
    fig = which_to_use(tie)
    assert "tie: " in words(fig) and "of 2 cases, a tie in 1; Block-Shock in none" in title(fig)
    single = plots.fastest(frames.make(**names | {"groups": 1}), AXES, "forward_kernel")
    assert set(single["best"].map(len)) == {3} and set(single["next"]) == {""}, "one group tells nothing apart"
    assert "tie:A,B1,Block-Shock" in "".join(words(which_to_use(frames.make(**names | {"groups": 1}))).split()), "named"


def test_the_least_energy_is_that_of_the_widest_work():
    frame = frames.make((4096,), (16,), methods=("dense", "row_parallel"), repeats=2)
    joules = {("dense", "forward_kernel"): 9.0, ("row_parallel", "forward_kernel"): 1.0}
    joules |= {("dense", "step_kernel"): 10.0, ("row_parallel", "step_kernel"): 20.0}
    rows = frame[frame["metric"].eq("forward_kernel") & frame["repeat"].eq(0)]
    more = [
        rows[rows["method"].eq(method)].assign(metric="energy", unit="J", detail=work, value=value)
        for (method, work), value in joules.items()
    ]
    fig = which_to_use(pd.concat([frame, *more], ignore_index=True), metric="energy", title="Least")
    assert title(fig).startswith("Least: A in 1 of 1 cases") and "B1 2.00×" in words(fig) and "joules" in fig.alt


def test_the_timed_way_of_a_product_is_the_one_that_is_named_on_one_gpu():
    run = shipped("phase1-cuda-before", repeats=2)
    run = run[run["in_features"].eq(4096) & run["batch"].isin([16, 256])].reset_index(drop=True)
    fig = one_gpu(run)
    assert title(fig) == "On one GPU: 2:4 small in 1 of 2 cases, dense in 1"
    planned = run["metric"].eq("product_by_kernel") & run["detail"].eq("cslt")
    sooner = one_gpu(run.assign(value=run["value"].mask(planned, run["value"] / 9)))
    assert "2:4 in 1 of 2 cases" in title(sooner)
    assert "nothing to draw" in words(one_gpu(run[run["method"].ne("block_shock")]))


def test_the_title_of_a_heat_map_counts_what_the_intervals_exclude_and_that_alone_is_coloured():
    parity = 1 / verdicts.ratio(frames.make(**SMALL), AXES, "row_parallel", "block_shock")["ratio"]
    mixed = frames.make(**SMALL, speedup={("block_shock", 4096, 16): parity[0], ("block_shock", 8192, 4096): 1.6})
    said = title(ratio_heatmap(mixed))
    assert said.startswith("Is Block-Shock faster? Sometimes faster here") and said.endswith("; 1 undecided.")
    assert "of 4 cases 1 faster, by 35%; 2 slower, by " in said
    one, three = (ratio_heatmap(frames.make(**SMALL, groups=n)).axes[0].patches for n in (1, 3))
    assert {(patch.get_facecolor(), patch.get_hatch()) for patch in one} == {((1, 1, 1, 1), "////")}, "decides nothing"
    assert all(patch.get_facecolor()[0] > patch.get_facecolor()[2] and not patch.get_hatch() for patch in three)


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
        ("permuted_dense", float("nan"), float("nan"), "", f"mask random is not periodic{', and more' * 6}"),
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
    cut = "cannot run: mask random is not periodic, and more, and more, and more, and more, …"
    assert cut in words(fig) and "Ceilings: outputs/reference" in words(fig)
    assert "Block-Shock: 32 µs (link 20 µs; link binds)." in fig.alt
    assert "no claim about speed: CPU" in words(machine_plots.floors_figure(floors("cpu"), AXES))
    assert "nothing to draw" in words(machine_plots.floors_figure(floors().assign(floor_whole=float("nan")), AXES))


def test_measured_times_are_dots_beside_the_floors_and_change_the_title_and_the_legend_is_whole():
    times = pd.Series({"row_parallel": 0.05, "block_shock": 0.08})
    table = floors().assign(measured=lambda rows: rows["method"].map(times))
    fig = machine_plots.floors_figure(table, AXES, "c", "outputs/reference/phase1-cuda")
    (ax,) = fig.axes
    dots = {(*line.get_xdata(), *line.get_ydata()) for line in ax.lines if line.get_marker() == "o"}
    assert {dot for dot in dots if len(dot) == 2 and dot[0] > 0} == {(0.08, 0), (0.05, 2)}
    assert title(fig).endswith("measured, it has 0.62 of its speed") and ax.get_xlim()[1] > 0.08
    assert "Block-Shock: 32 µs" in fig.alt and "80 µs measured" in fig.alt and "Dots: medians of outputs" in words(fig)
    assert "measured" not in title(machine_plots.floors_figure(table, AXES, "c"))
    fig = machine_plots.floors_figure(floors().assign(world_size=8, measured=0.1), AXES, "c", "r")
    fig.savefig(io.BytesIO())
    legend = fig.axes[0].get_legend()
    box = legend.get_window_extent()
    assert len(legend.get_texts()) == 3 and box.x0 >= 0 and box.x1 <= fig.bbox.width
