"""Tables and figures of all phases' records together, and what would have to change for the answer to change."""

import math

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.report import figures
from blockshock_lib.studies.linear.report import bars, findings, law, law_plots
from blockshock_lib.studies.linear.report.findings import WhatIf
from tests.report import frames
from tests.studies.linear.report.shipped import faster, shipped

TABLES = ("law_table", "step_law_table", "where_table", "needs_table", "batch_table", "compress_table")
FIGURES = {"law_check": law_plots.law_check, "where": bars.where_figure, "parity": law_plots.parity}


@pytest.fixture(scope="module")
def first():
    return frames.make((4096, 8192, 16384), (16, 64, 256, 4096), groups=3, repeats=4)


@pytest.fixture(scope="module")
def both(first):
    trained = shipped("phase3-cuda", repeats=2).assign(code="")
    return pd.concat([first, trained[trained["in_features"].eq(40960)]], ignore_index=True)


@pytest.fixture(scope="module")
def cpu():
    return frames.make((256, 512), (16, 64), device="cpu", groups=2, repeats=3, kernel=True)


@pytest.fixture(scope="module")
def what_if(both):
    return WhatIf(both)


def test_each_hypothesis_has_its_verdict_by_setting(both, cpu):
    assert list(findings.answer_table(both)["verdict"]) == ["refuted", "not applicable", "supported"]
    assert list(findings.answer_table(cpu)["verdict"]) == ["undecided"] * 3


def test_without_phase_3_the_answer_on_training_says_what_to_make(first):
    assert findings.answer_table(first).loc["H2", "why"] == "no record of phase3 yet: make phase3"


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_a_row_a_case_and_no_hole_and_without_times_says_what_to_make(name, both):
    table = getattr(findings, name)(both)
    assert len(table) >= 2 and "nothing to show" not in table and not table.isna().any().any()
    (said,) = getattr(findings, name)(pd.DataFrame())["nothing to show"]
    assert "make phase" in said


def test_no_interval_is_not_taken_for_one_that_holds_the_law():
    alone = frames.make((4096,), (16,), groups=1, repeats=4)
    assert set(findings.law_table(alone)["law inside the interval"]) == {"–"}


def test_forward_and_step_of_different_code_are_marked(both, monkeypatch):
    assert findings.CODE not in findings.where_table(both) and findings.CODE not in findings.answer_table(both)
    monkeypatch.setattr(law, "codes", lambda frame: {"forward": "new", "step": "old"})
    table = findings.where_table(both)
    assert list(table[findings.CODE]) == ["new" if work == "forward" else "old" for work in table["work"]]
    assert list(findings.answer_table(both)[findings.CODE]) == ["new", "old", "new"]
    assert "different code (forward new, step old)" in law_plots.what_if(WhatIf(both)()).alt


def drawn(figure):
    assert figures.png(figure).startswith(b"\x89PNG") and len(figure.alt) > 40
    return figure.alt


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_of_nothing_says_so_and_a_cpus_makes_no_claim(name, cpu):
    assert "nothing to draw" in drawn(FIGURES[name](pd.DataFrame()))
    alt = drawn(FIGURES[name](cpu))
    assert "no claim" in alt.split(".")[0] and "no claim about speed: CPU" in alt


def test_what_if_calls_faster_only_what_its_interval_bears_out_and_nothing_on_a_cpu(what_if, cpu):
    table = what_if(s=2.0)
    table.loc[table["work"].eq("forward"), ["then", "low", "high"]] = [1.0002, 0.98, 1.02]
    assert "1.00 to 1.00 of B1's speed: faster than B1 in 0 of 12" in law_plots.what_if(table).alt
    assert "no claim" in drawn(law_plots.what_if(WhatIf(cpu)(s=2.0))).split(".")[0]


def test_with_the_s_that_is_needed_the_forwards_are_equal(what_if):
    for row in what_if.law.itertuples(index=False):
        then = what_if(s=row.s_needed)
        assert then.loc[then["case"].eq(row.case), "then"].item() == pytest.approx(1, abs=1e-6)


def test_no_s_will_do_where_communication_alone_is_longer_than_b1(first):
    slow = first.copy()
    slow.loc[slow["method"].eq("block_shock") & slow["metric"].eq("forward_kernel"), "value"] *= 50
    assert law.law_rows(slow)["s_needed"].isna().all()


def test_as_measured_changes_nothing_and_compression_moves_the_step_that_recompresses_alone(what_if):
    table = what_if()
    assert np.allclose(table["ratio"], table["then"]) and set(table["work"]) == {"forward", "step"}
    table = what_if(compress=0.0)
    moved = table[~np.isclose(table["ratio"], table["then"])]
    assert set(moved["method"]) == {"block_shock_recompress"} and (moved["then"] > moved["ratio"]).all()


def test_the_allowed_compress_time_makes_t1_as_fast_as_t3_and_b1(both):
    # T1 with cheap products: then compression is all that it loses by.
    cheap = faster(both, 1.15, "block_shock_recompress")
    table = findings.compress_needs(cheap)
    assert table["for_t3"].gt(0).all()
    for rival in ("t3", "b1"):
        assert np.allclose(table["t1"] - table["compress"] + table[f"for_{rival}"], table[rival])


@pytest.mark.parametrize(
    "ratio, found",
    [
        ((2, 2, 2), [(0, math.inf)]),
        ((0.5, 0.5, 0.5), []),
        ((0.5, 2, 2), [(64, math.inf)]),
        ((2, 0.5, 2), [(0, 64), (512, math.inf)]),
        ((2, 2, 0.5), [(0, 512)]),
        ((0.5, 2, 0.5), [(64, 512)]),
    ],
)
def test_every_stretch_that_wins_is_told(ratio, found):
    told = findings.stretches(np.array([16.0, 256.0, 1024.0]), np.array(ratio, float))
    assert np.allclose(np.ravel(told), np.ravel(found)) and len(told) == len(found)


def test_without_times_there_is_nothing_to_ask():
    nothing = WhatIf(pd.DataFrame())
    assert nothing.law.empty and nothing.steps.empty and nothing().empty


def test_an_interval_moves_with_its_ratio(what_if):
    now, then = what_if(), what_if(s=2.0)
    assert (now["low"].lt(now["ratio"]) & now["high"].gt(now["ratio"])).all()
    assert np.allclose(then["high"] / then["low"], now["high"] / now["low"])


def test_a_slow_link_costs_the_shipped_step_what_it_costs_by_hand():
    """B1 gathers its dX, which sends half of what Block-Shock's all-reduce does."""
    table = WhatIf(shipped("phase3-cuda", repeats=99))(link=25.0)
    row = table[table["size"].eq(40960) & table["optimizer"].eq("sgd") & table["method"].eq("block_shock")]
    assert row["then"].item() == pytest.approx(53.6 / 68.5, rel=0.005)
