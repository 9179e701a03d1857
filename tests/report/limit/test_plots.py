"""The figure says how far each way is from its floor, and claims nothing where it may not."""

import pandas as pd
from matplotlib.text import Text

from blockshock_lib.report import figures, plots
from tests.report import frames
from tests.report.limit import frames as limit


def words(fig):
    return " ".join(text.get_text().replace("\n", " ") for text in fig.findobj(Text))


def test_a_panel_a_size_and_a_line_a_way_with_a_marker_of_its_own():
    fig = plots.limit_figure(limit.make())
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["N = 4096", "N = 16384"]
    lines = [line for line in fig.axes[1].get_lines() if line.get_marker() not in ("", "None")]
    assert len(lines) == 4 and len({(line.get_marker(), line.get_color()) for line in lines}) == 4
    small = next(line for line in lines if len(line.get_xdata()) == 2)
    assert list(small.get_xdata()) == [16, 64] and 1.1 < small.get_ydata()[0] < 1.3
    assert len(figures.png(fig)) < 80_000


def test_the_legend_lies_inside_a_narrow_figure_and_names_every_way():
    fig = plots.limit_figure(limit.make())
    fig.canvas.draw()
    box = fig.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= fig.bbox.width and box.y0 >= 0
    assert len(fig.legends) == 1 and len(fig.legends[0].get_texts()) == 4


def test_the_title_compares_the_faster_way_with_the_stock_op_and_the_text_holds_the_numbers():
    fig = plots.limit_figure(limit.make())
    assert "The faster 2:4 product takes 1.2 to" in words(fig) and "the stock op" in words(fig)
    assert "2:4, small-batch kernel 1.2" in fig.alt and "B=64" in fig.alt


def test_a_cpu_makes_no_claim_and_an_empty_frame_says_so():
    cpu = plots.limit_figure(frames.make(ns=(256,), bs=(16,), device="cpu", kernel=True))
    assert "no claim about speed: CPU" in words(cpu) and "times its floor" not in words(cpu)
    for nothing in (pd.DataFrame(), frames.make(timed=False)):
        assert "nothing to draw" in words(plots.limit_figure(nothing))
