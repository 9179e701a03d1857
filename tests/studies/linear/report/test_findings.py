"""Tables and figures of all phases' records together, and what would have to change for the answer to change."""

import pandas as pd
import pytest

from blockshock_lib.report import figures
from blockshock_lib.studies.linear.report import bars, findings, law
from tests.report import frames


@pytest.fixture(scope="module")
def first():
    return frames.make((4096, 8192, 16384), (16, 64, 256, 4096), groups=3, repeats=4)


@pytest.mark.parametrize("name", ["law_table", "needs_table"])
def test_every_table_has_a_row_a_case_and_no_hole_and_without_times_says_what_to_make(name, first):
    table = getattr(findings, name)(first)
    assert len(table) == 12 and "nothing to show" not in table and not table.isna().any().any()
    (said,) = getattr(findings, name)(pd.DataFrame())["nothing to show"]
    assert "make phase" in said


def test_no_interval_is_not_taken_for_one_that_holds_the_law():
    alone = frames.make((4096,), (16,), groups=1, repeats=4)
    assert set(findings.law_table(alone)["law inside the interval"]) == {"–"}


def test_the_parts_of_a_forward_are_drawn_and_a_cpus_make_no_claim(first):
    def drawn(frame):
        figure = bars.where_figure(frame)
        assert figures.png(figure).startswith(b"\x89PNG") and len(figure.alt) > 40
        return figure.alt

    assert "nothing to draw" in drawn(pd.DataFrame()) and "forward B1 row-parallel: forward product" in drawn(first)
    alt = drawn(frames.make((256, 512), (16, 64), device="cpu", groups=2, repeats=3, kernel=True))
    assert "no claim" in alt.split(".")[0] and "no claim about speed: CPU" in alt


def test_with_the_s_that_is_needed_the_forwards_are_equal(first):
    table = law.law_rows(first)
    ours = table["ours_forward"] + table["ours"] * (table["s"] / table["s_needed"] - 1)
    assert ours.to_numpy() == pytest.approx(table["b1_forward"].to_numpy())


def test_no_s_will_do_where_communication_alone_is_longer_than_b1(first):
    slow = first.copy()
    slow.loc[slow["method"].eq("block_shock") & slow["metric"].eq("forward_kernel"), "value"] *= 50
    assert law.law_rows(slow)["s_needed"].isna().all()
