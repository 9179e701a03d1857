"""What every figure promises: it says what it shows and no more, and never fails for lack of data."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from blockshock_lib.report import plots
from tests.report import frames

OF_FRAME = (
    plots.time_vs_n,
    plots.ratio_heatmap,
    plots.stacked,
    plots.memory_bars,
    plots.roofline,
    plots.law,
)
RUNS = {
    "gpu": dict(ns=(4096, 8192, 16384, 40960), bs=(16, 256, 4096), repeats=3),
    "cpu": dict(ns=(256, 512), bs=(16,), device="cpu", groups=2, repeats=3, noise=0.2),
    "emulated": dict(ns=(4096,), bs=(16, 64), emulated=True, groups=2, repeats=3),
    "rectangular": dict(ns=(), bs=(16,), features=((4096, 16384), (8192, 32768)), groups=2, repeats=3),
}


@pytest.fixture(scope="module")
def runs():
    return {name: frames.make(**run) for name, run in RUNS.items()}


def words(fig):
    return " ".join(text.get_text().replace("\n", " ") for text in fig.findobj(Text))


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("figure", OF_FRAME)
def test_every_figure_is_small_has_alternative_text_and_stays_inside_its_edges(figure, name, runs):
    fig = figure(runs[name])
    assert len(fig.alt) > 40
    assert len(plots.png(fig)) < 80_000
    for text in fig.texts:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= fig.bbox.x1, f"{text.get_text()!r} runs over the edge"


@pytest.mark.parametrize("figure", OF_FRAME)
def test_cpu_and_emulated_figures_say_that_they_make_no_claim(figure, runs):
    assert "no claim about speed: emulated on one GPU" in words(figure(runs["emulated"]))
    cpu = words(figure(runs["cpu"]))
    assert "no claim about speed: CPU" in cpu or "nothing to draw" in cpu
    assert "no claim" not in words(figure(runs["gpu"]))


@pytest.mark.parametrize("figure", OF_FRAME)
def test_no_data_gives_a_figure_that_says_so(figure, runs):
    failed = frames.make((4096,), (16,), groups=1, repeats=1)
    for method in frames.METHODS:
        failed = frames.fail(failed, method)
    for frame in (pd.DataFrame(), runs["gpu"].iloc[:0], failed):
        assert "nothing to draw" in words(figure(frame))


@pytest.mark.parametrize("figure", OF_FRAME)
def test_a_single_method_is_enough_not_to_fail(figure):
    for method in ("block_shock", "my_new_method"):
        assert figure(frames.make((4096,), (16,), methods=(method,), groups=1, repeats=1)).alt


def test_masks_are_counted_for_the_title():
    tile = np.kron(np.eye(2, dtype=bool), np.ones((2, 2), dtype=bool))
    stripes = np.tile([True, True, False, False], (4, 1))
    assert "All 2 masks are 2:4 along the inputs, 1 of them along the outputs too" in words(
        plots.masks_figure({"checkerboard": tile, "uniform_1100": stripes})
    )
    broken = tile.copy()
    broken[0, 0] = False
    assert "1 of 2 masks are 2:4 along the inputs" in words(plots.masks_figure({"a": broken, "b": tile}))
    assert "nothing to draw" in words(plots.masks_figure({}))
