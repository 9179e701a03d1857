import numpy as np
import pytest
from matplotlib.text import Text

from blockshock_lib.report import ratio_plots, verdicts
from tests.report import frames
from tests.report.training_frames import training_frame

SMALL = dict(ns=(4096, 8192), bs=(16, 4096), methods=("dense", "row_parallel", "block_shock"), repeats=6)


def title(fig):
    return fig.texts[0].get_text().replace("\n", " ")


def test_the_title_counts_what_the_intervals_exclude():
    assert title(ratio_plots.ratio_heatmap(frames.make(**SMALL))) == (
        "Block-Shock is slower than B1 row-parallel in all 4 cells"
    )
    parity = 1 / verdicts.ratio(frames.make(**SMALL), "row_parallel", "block_shock")["ratio"]
    mixed = frames.make(**SMALL, speedup={("block_shock", 4096, 16): parity[0], ("block_shock", 8192, 4096): 1.6})
    assert title(ratio_plots.ratio_heatmap(mixed)) == (
        "Against B1 row-parallel, Block-Shock is slower in 2, faster in 1, undecided in 1 of 4 cells"
    )


@pytest.mark.parametrize("change", [{"device": "cpu"}, {"emulated": True}])
def test_without_a_claim_the_title_says_neither_faster_nor_slower(change):
    fig = ratio_plots.ratio_heatmap(frames.make(**SMALL).assign(**change))
    assert "faster" not in title(fig) and "slower" not in title(fig)


def test_every_cell_carries_its_interval():
    frame = frames.make(**SMALL)
    drawn = [text.get_text() for text in ratio_plots.ratio_heatmap(frame).findobj(Text)]
    for row in verdicts.ratio(frame, "row_parallel", "block_shock").to_dict("records"):
        ratio, _, interval = verdicts.interval_text(row).partition(" ")
        assert ratio.replace("x", "×") in drawn and interval in drawn


def test_each_optimizer_has_a_panel_with_its_own_cells():
    frame = training_frame(ns=(4096, 16384), bs=(256, 4096), methods=("row_parallel", "block_shock"))
    fig = ratio_plots.ratio_heatmap(frame, metric="step_kernel")
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["SGD", "AdamW"]
    table = verdicts.ratio(frame, "row_parallel", "block_shock", "step_kernel")
    for ax, optimizer in zip(fig.axes, ("sgd", "adamw"), strict=True):
        drawn = {text.get_text() for text in ax.texts}
        for row in table[table["optimizer"].eq(optimizer)].to_dict("records"):
            assert verdicts.interval_text(row).partition(" ")[2] in drawn
    assert title(fig) == "Block-Shock is slower than B1 row-parallel in all 8 cells"


def test_only_decided_cells_are_coloured():
    frame = frames.make(**SMALL, groups=1)
    mesh = ratio_plots.ratio_heatmap(frame).axes[0].collections[0]
    assert np.allclose(mesh.get_array(), 0), "one group decides nothing"
    mesh = ratio_plots.ratio_heatmap(frames.make(**SMALL)).axes[0].collections[0]
    assert (mesh.get_array() < 0).all()


def test_s_is_the_dense_product_over_the_sparse_one_of_the_same_size():
    frame = frames.make(**SMALL, noise=1e-4, group_effect=1e-4)
    point = ratio_plots.law_points(frame).set_index(["in_features", "batch"]).loc[(8192, 4096)]
    assert point["s"] == pytest.approx(1.97 * 0.369 / 0.467, rel=1e-3)
    assert point["s_low"] < point["s"] < point["s_high"]
    wide = ratio_plots.law_points(frame.assign(world_size=4)).set_index(["in_features", "batch"]).loc[(8192, 4096)]
    assert wide["s"] == pytest.approx(point["s"] / 2), "four ranks: each 2:4 product is half as large"


def test_the_law_counts_cases_below_2_by_their_interval():
    assert "below 2 in all 4 cases" in title(ratio_plots.law(frames.make(**SMALL)))
    fast = frames.make(**SMALL, speedup={("block_shock", 8192, 4096): 1.6})
    assert "its interval below 2 in 3 of 4 cases" in title(ratio_plots.law(fast))


def test_a_useless_interval_is_not_written_in_a_cell():
    frame = frames.make(**SMALL, groups=2, group_effect=0.5, seed=1)
    table = verdicts.ratio(frame, "row_parallel", "block_shock")
    useless = int((table["high"] / table["low"]).gt(100).sum())
    assert useless > 0
    drawn = [text.get_text() for text in ratio_plots.ratio_heatmap(frame).findobj(Text)]
    assert drawn.count("[no interval]") == useless
    assert max(map(len, (text for text in drawn if text.startswith("[")))) < 20


def test_the_axes_of_the_law_follow_its_points_and_its_two_labels_stay_apart():
    wild = ratio_plots.law(frames.make(**SMALL, groups=2, group_effect=0.5, seed=1))
    fast = ratio_plots.law(frames.make(**SMALL, speedup={("block_shock", 8192, 4096): 40}))
    points = ratio_plots.law_points(frames.make(**SMALL, groups=2, group_effect=0.5, seed=1))
    assert points["s_high"].max() > 100, "the factory must give a useless interval"
    assert wild.axes[0].get_xlim()[1] == pytest.approx(1.2 * max(2, points["s"].max()))
    assert wild.axes[0].get_ylim()[1] == pytest.approx(1.2 * max(1, points["ratio"].max()))
    for fig in (wild, fast):
        fig.draw_without_rendering()
        boxes = [text.get_window_extent() for text in fig.axes[0].texts if "s ≤" in text.get_text()]
        assert len(boxes) == 2 and not boxes[0].overlaps(boxes[1])


def test_the_law_names_both_reasons_for_points_above_its_line():
    words = ratio_plots.law(frames.make(**SMALL)).alt
    assert "communication that costs both" in words and "more than half of A's time" in words
