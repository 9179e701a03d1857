import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from blockshock_lib.report import labels, plots
from blockshock_lib.report.training import plots as training_plots
from blockshock_lib.report.training import tables
from tests.report import frames
from tests.report.training_frames import training_frame

FIGURES = {
    "pieces": plots.pieces_figure,
    "pieces of a pass": lambda frame: plots.pieces_figure(frame, "pass"),
    "loss": plots.loss_curves,
    "memory": plots.training_memory,
    "ratio": lambda frame: plots.ratio_heatmap(frame, metric="step_kernel"),
    "time": lambda frame: plots.time_vs_n(frame, metric="step_kernel"),
}
SPEED = [name for name in FIGURES if name not in ("loss", "pieces of a pass")]


def words(fig):
    return " ".join(text.get_text().replace("\n", " ") for text in fig.findobj(Text))


def titles(fig):
    return [ax.get_title(loc="left") for ax in fig.axes if ax.get_title(loc="left")]


@pytest.fixture(scope="module")
def run():
    return training_frame(groups=2, repeats=2)


@pytest.fixture(scope="module")
def cpu():
    return training_frame(device="cpu", ns=(256, 512), bs=(16, 64), groups=2, repeats=2)


@pytest.mark.parametrize("name", FIGURES)
def test_no_data_gives_a_figure_that_says_so(name, run):
    nothing = frames.make((4096,), (16,), groups=1, repeats=1)
    nothing = nothing[~nothing["unit"].isin(["ms", "B"])]
    failed = run
    for method in run["method"].unique():
        failed = frames.fail(failed, method)
    for frame in (pd.DataFrame(), run.iloc[:0], nothing, failed):
        assert "nothing to draw" in words(FIGURES[name](frame))


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "pieces of a pass"])
def test_every_figure_is_small_has_alternative_text_and_stays_inside_its_edges(name, run, cpu):
    for frame in (run, cpu, run[run["method"].isin(["block_shock", "dense"])]):
        fig = FIGURES[name](frame)
        assert len(fig.alt) > 40 and len(plots.png(fig)) < 80_000
        boxes = [text.get_window_extent() for text in fig.texts]
        assert all(box.x0 >= 0 and box.x1 <= fig.bbox.x1 for box in boxes)
        for legend in fig.legends:
            assert not any(legend.get_window_extent().overlaps(box) for box in boxes if box.height)


@pytest.mark.parametrize("name", SPEED)
def test_cpu_and_emulated_figures_say_that_they_make_no_claim(name, run, cpu):
    assert "no claim about speed: CPU" in words(FIGURES[name](cpu))
    assert "no claim about speed: emulated" in words(FIGURES[name](run.assign(emulated=True)))
    assert "no claim" not in words(FIGURES[name](run))


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "pieces of a pass"])
def test_optimizers_never_share_a_panel(name, run):
    found = titles(FIGURES[name](run))
    assert any("SGD" in title for title in found) and any("AdamW" in title for title in found)
    assert all(("SGD" in title) != ("AdamW" in title) for title in found)


def test_pieces_rest_and_hidden_add_up_to_the_whole(run):
    table = training_plots.step_pieces(run)
    pieces = table[list(training_plots._LOOKS)].sum(axis=1)
    total = pieces + table[training_plots.REST] - table[training_plots.HIDDEN]
    assert np.allclose(total, table["whole"])
    overlapped = table["method"].ne("dense")
    assert (table.loc[overlapped, training_plots.HIDDEN] > 0).all(), "dX's all-reduce hides behind dW in these records"
    slow = run["value"].mask(run["metric"].eq("step_kernel"), run["value"] * 3)
    table = training_plots.step_pieces(run.assign(value=slow))
    assert (table[training_plots.HIDDEN] == 0).all() and (table[training_plots.REST] > 0).all()


def test_each_panel_draws_the_whole_of_its_own_optimizer_and_shape(run):
    table = training_plots.step_pieces(run)
    for ax in plots.pieces_figure(run).axes:
        optimizer, shape, _ = ax.get_title(loc="left").split(", ")
        own = table[table["optimizer"].map(labels.optimizer).eq(optimizer) & table["shape"].eq(shape)]
        own = own[own["batch"].eq(4096)].set_index("method")["whole"]
        assert np.allclose(ax.lines[0].get_xdata(), own[labels.methods_in(own.index)[::-1]].astype(float))


def test_every_piece_that_took_time_is_in_the_legend_and_no_other(run):
    fig = plots.pieces_figure(run[run["method"].isin(["row_parallel", "block_shock"])])
    named = {text.get_text() for text in fig.legends[0].get_texts()}
    assert "refresh" in named and not named & {"compress", "re-mask"}


def test_the_title_gives_the_share_of_recompression_in_t1s_step(run):
    table = training_plots.step_pieces(run)
    row = table[
        table["method"].eq("block_shock_recompress")
        & table["optimizer"].eq("sgd")
        & table["in_features"].eq(16384)
        & table["batch"].eq(4096)
    ].iloc[0]
    share = 100 * (row["compress"] + row["re-mask"]) / row["whole"]
    assert f"with SGD, compressing and re-masking take {share:.0f}% of T1's step" in words(plots.pieces_figure(run))


def test_the_loss_title_gives_block_shocks_gap_to_b1_by_optimizer_else_the_largest_of_any():
    frame = training_frame(ns=(4096,), bs=(256,), groups=1, repeats=1)
    hit = frame["metric"].eq("loss") & frame["method"].eq("block_shock") & frame["repeat"].eq(30)
    hit &= frame["optimizer"].eq("sgd")
    frame["value"] = frame["value"].mask(hit, frame["value"] * 1.25)
    table = tables.loss_table(frame).query("method == 'Block-Shock'").set_index("optimizer")
    gap = table["largest gap to B1 (%)"]
    assert gap["SGD"] > 20 and gap["AdamW"] < 1
    said = f"Largest distance of Block-Shock's loss from B1 row-parallel's at any step: {gap['SGD']:.2g}% SGD"
    assert f"{said}, {gap['AdamW']:.2g}% AdamW" in words(plots.loss_curves(frame))
    alone = words(plots.loss_curves(frame[frame["method"].ne("row_parallel")]))
    assert "Largest distance of Block-Shock's loss from A dense's at any step: 25% SGD" in alone
    others = words(plots.loss_curves(frame[frame["method"].ne("block_shock")]))
    assert "No method's loss is further than" in others and "from B1 row-parallel's" in others


def test_without_a_curve_to_compare_with_the_loss_is_drawn_and_no_gap_is_claimed(run):
    fig = plots.loss_curves(run[~run["method"].isin(["dense", "row_parallel"])])
    assert len(fig.axes) == 2 and "Loss against the step" in words(fig)


def test_a_bar_far_longer_than_the_others_is_cut_and_says_its_time(run):
    step = run["method"].eq("block_shock_torch") & run["metric"].isin(["step_kernel", "compress_kernel"])
    fig = plots.pieces_figure(run.assign(value=run["value"].mask(step, run["value"] * 20)))
    table = training_plots.step_pieces(run)
    for ax in fig.axes:
        cut = [text.get_text() for text in ax.texts if text.get_text().startswith("cut: ")]
        assert len(cut) == 1
        optimizer, shape, _ = ax.get_title(loc="left").split(", ")
        own = table[table["optimizer"].map(labels.optimizer).eq(optimizer) & table["shape"].eq(shape)]
        own = own[own["batch"].eq(4096)].set_index("method")["whole"].astype(float)
        assert cut[0] == f"cut: {training_plots.milliseconds(20 * own['block_shock_torch'])} →"
        rest = own.drop("block_shock_torch").max()
        assert rest < ax.get_xlim()[1] < 2 * rest, "the other bars fill the panel"
    even = run[run["method"].isin(["row_parallel", "column_parallel", "permuted_dense"])]
    assert "cut: " not in words(plots.pieces_figure(even))


def test_what_stands_beyond_the_whole_is_not_called_overlap_alone(run):
    assert "crossed: parts exceed the whole, by overlap or clocks" in words(plots.pieces_figure(run))


def test_dense_lies_broad_below_the_others(run):
    lines = plots.loss_curves(run).axes[0].lines
    dense = [line for line in lines if line.get_color() == labels.style("dense").colour]
    rest = [line for line in lines if line not in dense]
    assert dense and min(d.get_linewidth() for d in dense) > max(line.get_linewidth() for line in rest)
    assert max(d.get_zorder() for d in dense) < min(line.get_zorder() for line in rest)


def test_memory_bars_are_as_long_as_their_parts(run):
    fig = plots.training_memory(run)
    reach = max(patch.get_x() + patch.get_width() for patch in fig.axes[1].patches)
    rows = run[run["method"].eq("block_shock_recompress") & run["optimizer"].eq("adamw") & run["in_features"].eq(16384)]
    rows = rows[rows["batch"].eq(4096) & rows["metric"].eq("peak_bytes_formula")]
    assert reach == pytest.approx(rows["value"].max() / 2**30)
    assert fig.axes[1].get_xlim()[1] > reach
    assert "within 3.0% of the formula" in words(fig)


def test_a_peak_that_no_allocator_keeps_is_not_claimed(run):
    fig = plots.training_memory(run[run["metric"].ne("peak_bytes")])
    assert "by the formula and from its tensors" in words(fig) and "peak measured" not in words(fig)
