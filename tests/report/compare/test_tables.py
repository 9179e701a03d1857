"""The rows of a comparison as text."""

import pandas as pd
import pytest

from blockshock_lib.report.compare import changes, tables
from tests.report import frames

SMALL = dict(ns=(4096,), bs=(16, 64), methods=("dense", "row_parallel"), repeats=4, groups=3)


@pytest.fixture(scope="module")
def rows():
    a = frames.make(**SMALL)
    b = frames.fail(
        frames.make(**SMALL, speedup={("dense", 4096, 16): 0.5}), "row_parallel", reason="<script>x</script>"
    )
    return changes.compare(a, b).rows


def test_values_carry_their_unit_and_ratios_their_interval(rows):
    table = tables.readable(rows)
    (kernel,) = table.query("what == 'kernel time' and method == 'A dense' and B == 16").to_dict("records")
    assert kernel["outcome"] == "regression" and kernel["groups"] == "3 and 3"
    assert kernel["run a"].endswith(" ms") and kernel["b / a"].startswith("2.00x [")
    (weight,) = table.query("what == 'weight' and method == 'A dense' and B == 16").to_dict("records")
    assert weight["run a"] == "33,554,432 B" and weight["b / a"] == "1.0000x"


def test_what_has_no_ratio_shows_none_but_says_why(rows):
    check = tables.readable(rows).iloc[0]
    assert (check["what"], check["b / a"], check["groups"]) == ("check", "–", "–")
    assert check["note"].startswith("passed → failed")


def test_only_columns_that_differ_are_shown(rows):
    assert "mask" not in tables.readable(rows)
    both = pd.concat([rows, rows.assign(mask="random")], ignore_index=True)
    assert list(tables.readable(both)["mask"].unique()) == ["checkerboard", "random"]


def test_a_row_in_words(rows):
    said = [tables.told(row) for row in rows.to_dict("records")]
    assert any(text.startswith("kernel time of A dense at 4096x4096, B=16: 2.00x [") for text in said)
    assert "check of B1 row-parallel at 4096x4096, B=64: passed → failed: <script>x</script>" in said


def test_what_a_record_says_stays_text_on_a_page(rows):
    page = tables.page(tables.readable(rows))
    assert "<script" not in page and "&lt;script&gt;x" in page
