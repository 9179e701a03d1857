"""The table of docs/compositions.md is what four ranks find: no cell is wrong, and no row is old or missing."""

import pytest

from tests.layers.compositions import BEGIN, COMPOSITIONS, END, METHODS, PAGE, proven

HOW = "write docs/compositions.md anew: python -m tests.layers.compositions"


def committed():
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0].split("\n")


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_composition_is_right_or_refused_as_the_table_says(four, name):
    row, sentence = proven(four, name)
    assert row in committed() and sentence in committed(), HOW


def test_the_table_has_these_rows_alone():
    rows = [line.split("|")[1].strip() for line in committed() if line.startswith("|")]
    assert rows == ["composition", "---", *COMPOSITIONS], HOW
    assert committed()[1].count("|") == len(METHODS) + 2
