import re

import pandas as pd
import pytest
from matplotlib.text import Text

from blockshock_lib import manifest, params, predict
from blockshock_lib.report import figures, floor_plots

REFERENCE = manifest.ROOT / "outputs" / "reference"


def words(fig):
    return " ".join(text.get_text().replace("\n", " ") for text in fig.findobj(Text))


@pytest.fixture(scope="module")
def h200():
    return manifest.read(REFERENCE / "phase1-cuda")["machine"]


def table(card, hardware="cuda", **settings):
    asked = {"sweep.n": [4096], "sweep.b": [256]} | settings
    return predict.plan(params.load("phase1", asked, choose={"hardware": hardware}), card)


def test_every_bar_is_the_larger_bound_of_the_product_and_the_link_after_it(h200):
    rows = table(h200).set_index("method")
    ax = floor_plots.floors_figure(table(h200)).axes[0]
    order = [tick.get_text() for tick in ax.get_yticklabels()]
    ends = [max(p.get_x() + p.get_width() for p in ax.patches if abs(p.get_y() + 0.34 - i) < 0.01) for i in range(7)]
    assert order[-1] == "A dense" and order[1] == "Block-Shock"
    assert ends[1] == pytest.approx(rows.loc["block_shock", "floor_whole"])
    assert ends[-1] == pytest.approx(rows.loc["dense", "floor_whole"])


def test_each_part_has_a_hatch_of_its_own_and_the_text_says_what_binds(h200):
    fig = floor_plots.floors_figure(table(h200), "outputs/reference/phase1-cuda")
    assert len({hatch for _, hatch in floor_plots.BINDS.values()}) == 3
    assert "bound by the link" in words(fig) and "bound by arithmetic" in words(fig)
    assert "Ceilings: outputs/reference/phase1-cuda" in words(fig).replace("Ceilings:  ", "Ceilings: ")
    us = r"\d+(\.\d)? µs"
    assert re.search(rf"Block-Shock: {us} \(bytes {us}, arithmetic {us}, link {us}; link binds\)", fig.alt)
    assert len(figures.png(fig)) < 80_000


def test_a_method_that_cannot_run_says_so_in_its_place(h200):
    fig = floor_plots.floors_figure(table(h200, **{"layers.mask": "random"}))
    assert "cannot run: mask random is not periodic" in words(fig)


def test_a_cpu_makes_no_claim_and_no_ceilings_give_a_figure_that_says_so():
    card = manifest.read(REFERENCE / "phase1-cpu")["machine"]
    cpu = table(card, "cpu")
    assert "no claim about speed: CPU" in words(floor_plots.floors_figure(cpu))
    for nothing in (pd.DataFrame(), cpu.assign(floor_whole=float("nan"))):
        assert "nothing to draw" in words(floor_plots.floors_figure(nothing))
