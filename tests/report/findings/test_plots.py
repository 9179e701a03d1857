import pandas as pd
import pytest

from blockshock_lib.predict import scaling
from blockshock_lib.report import figures
from blockshock_lib.report.findings import plots, versions
from blockshock_lib.report.findings.needs import Parts, needs, what_if
from tests.report import frames
from tests.report.training_frames import training_frame


@pytest.fixture(scope="module")
def both():
    first = frames.make((4096, 8192, 16384), (16, 64, 256, 4096), groups=3, repeats=3)
    return pd.concat([first, training_frame((16384,), (4096,), groups=3, repeats=2)], ignore_index=True)


def drawn(figure):
    assert figures.png(figure).startswith(b"\x89PNG") and len(figure.alt) > 40
    return figure


@pytest.mark.parametrize("name", ["law_check", "where", "parity"])
def test_a_figure_of_nothing_says_so(name):
    assert "nothing to draw" in drawn(getattr(plots, name)(pd.DataFrame())).alt


@pytest.mark.parametrize("name", ["law_check", "where", "parity"])
def test_a_cpus_figure_makes_no_claim(name):
    cpu = frames.make((256, 512), (16, 64), device="cpu", groups=2, repeats=3, kernel=True)
    alt = drawn(getattr(plots, name)(cpu)).alt
    assert "no claim" in alt.split(".")[0] and "no claim about speed: CPU" in alt


def test_the_laws_figure_counts_the_cases_that_it_holds_in(both):
    assert "of 12 cases" in drawn(plots.law_check(both)).alt


def test_each_case_is_a_point_over_s(both):
    ax = drawn(plots.parity(both)).axes[0]
    points = [line for line in ax.lines if line.get_marker() not in ("None", "", None)]
    assert len(points) == 12


def test_bars_stand_for_the_forward_and_for_the_step_of_each_optimizer(both):
    figure = drawn(plots.where(both))
    assert [ax.get_title(loc="left").split(",")[0] for ax in figure.axes] == [
        "forward",
        "training step with SGD",
        "training step with AdamW",
    ]
    assert "compress" in figure.alt and "step SGD Block-Shock:" in figure.alt
    looks = [(p.get_facecolor(), p.get_hatch()) for p in figure.axes[0].get_legend().get_patches()]
    assert len(set(looks)) == len(looks) > 8, "two parts look alike in the legend"
    assert "forward collective + bias" in figure.alt and "forward beyond its product" in figure.alt


def test_figures_of_forward_and_step_say_where_their_code_differs(both, monkeypatch):
    said = "different code (forward new, step old)"
    assert "different code" not in plots.where(both).alt + plots.what_if(what_if(Parts.of(both))).alt
    monkeypatch.setattr(versions, "of_works", lambda frame: {"forward": "new", "step": "old"})
    assert said in drawn(plots.where(both)).alt and said in drawn(plots.what_if(what_if(Parts.of(both)))).alt


def test_the_sizes_of_a_single_batch_stand_side_by_side():
    first = frames.make((4096, 16384), (4096,), groups=3, repeats=2)
    both = pd.concat([first, training_frame((4096, 16384), (4096,), groups=3, repeats=2)], ignore_index=True)
    figure = drawn(plots.what_if(what_if(Parts.of(both))))
    for ax in figure.axes:
        places = [tuple(line.get_xdata()) for line in ax.lines if line.get_linestyle() == ":"]
        assert sorted(places) == [(4096,), (16384,)]


def test_what_if_calls_faster_only_what_its_interval_bears_out(both):
    table = what_if(Parts.of(both), s=2.0)
    forward = table["work"].eq("forward")
    table.loc[forward, ["then", "low", "high"]] = [1.0002, 0.98, 1.02]
    assert "1.00 to 1.00 of B1's speed: faster than B1 in 0 of 12" in plots.what_if(table).alt


def test_the_s_of_parity_is_what_the_cases_need(both):
    needed = needs(both)["s_needed"]
    assert f"Parity takes s of {needed.min():.2f} to {needed.max():.2f};" in plots.parity(both).alt


def test_what_if_has_a_panel_a_work(both):
    figure = drawn(plots.what_if(what_if(Parts.of(both), s=2.0), "s 2"))
    assert len(figure.axes) == 5 and "s 2" in figure.alt and "not measured" in figure.alt


def test_what_if_makes_no_claim_on_a_cpu():
    cpu = frames.make((256, 512), (16, 64), device="cpu", groups=2, repeats=3, kernel=True)
    assert "no claim" in drawn(plots.what_if(what_if(Parts.of(cpu), s=2.0))).alt.split(".")[0]


def test_a_prediction_says_that_it_is_one(both):
    plan = scaling.plan(both, "2x NVIDIA H200")
    figure = drawn(plots.prediction(plan.larger, plan.note))
    assert figure.alt.startswith("PREDICTION, not measured") and "PREDICTED" in figure.axes[0].get_ylabel()
    assert drawn(plots.prediction(plan.larger.iloc[:0], "")).alt.startswith("PREDICTION")
