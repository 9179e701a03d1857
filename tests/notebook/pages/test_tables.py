import numpy as np
import pandas as pd
import pytest
from bs4 import BeautifulSoup

from blockshock_lib.notebook.pages import sanitise


def shown(frame):
    """The table of a page for what pandas writes of this frame; its rows of texts, the header first."""
    soup = BeautifulSoup(sanitise.clean(frame.to_html(), cell="a"), "html.parser")
    return soup, [[cell.get_text() for cell in row.find_all(["td", "th"])] for row in soup.find_all("tr")]


@pytest.mark.parametrize(
    ("numbers", "texts", "unit"),
    [
        ([0.01401, np.nan, 0.5], ["14.01", "–", "500"], "µs"),
        ([0.01401, 5.874, 12.5], ["0.01401", "5.874", "12.5"], "ms"),
        (["0.014–0.5", "0.001–12", "–"], ["14–500", "1–12,000", "–"], "µs"),
        (["not measured", "1 (itself)", "0.2"], ["not measured", "1 (itself)", "200"], "µs"),
    ],
)
def test_a_time_has_one_unit_a_table_by_its_size_and_no_nan(numbers, texts, unit):
    _, rows = shown(pd.DataFrame({"t (ms)": numbers, "is": ["a"] * 3}))
    assert rows == [[f"t ({unit})", "is"], *([text, "a"] for text in texts)]


def test_all_times_of_a_table_have_the_same_unit():
    _, rows = shown(pd.DataFrame({"a (ms)": [0.02, 0.03], "b (ms)": [2.0, 0.1], "GiB": [0.02, 0.03]}))
    assert rows == [["a (µs)", "b (µs)", "GiB"], ["20", "2000", "0.02"], ["30", "100", "0.03"]]


def test_large_numbers_have_marks_small_ones_powers_and_words_stay():
    texts = ["5874000", "40960", "4096", "0.000016", "-0.5000", "4096x4096", "0.77x [0.75, 0.78]"]
    _, rows = shown(pd.DataFrame({"n": texts}))
    assert [row[0] for row in rows[1:]] == ["5,874,000", "40,960", "4096", "1.6e-5", "-0.5", *texts[5:]]


def test_an_index_of_numbers_goes_a_named_one_becomes_columns_and_an_empty_table_a_word():
    named = pd.DataFrame({"m": ["a", "a", "b"], "t": ["y", "z", "y"], "x": [1, 2, 3]}).set_index(["m", "t"])
    soup, rows = shown(named)
    assert rows == [["m", "t", "x"], ["a", "y", "1"], ["a", "z", "2"], ["b", "y", "3"]]
    assert not soup.find(rowspan=True)
    assert shown(named.reset_index())[1] == rows
    assert shown(named.iloc[:0])[0].get_text() == "none" and not shown(named.iloc[:0])[0].find("table")


@pytest.mark.parametrize(
    "rows",
    [
        "<td>1<td>2<td rowspan=3>3<tr><td>4<tr><td rowspan=9>5",
        "<td>1e999999999<td>9e-99",
        "<td rowspan=2>1<tr><tr><tr>",
        "<td><table><thead><tr><th>n</table>",
        "<td rowspan=9999>" * 30 + "<tr>" * 9,
    ],
)
def test_a_table_that_no_library_writes_is_shown_all_the_same(rows):
    text = sanitise.clean(f"<table><thead><tr><th>t (ms)<th>x</thead><tr>{rows}</table>", cell="a")
    assert "t (ms)" in text or ("t (µs)" in text and len(text) < 5000)


def test_a_row_that_begins_as_the_one_above_says_it_faintly():
    soup, _ = shown(pd.DataFrame({"shape": ["8x8", "8x8", "9x9"], "B": [1, 2, 2], "x": [5, 5, 5]}))
    faint = [[cell.get_text() for cell in row.find_all(class_="same")] for row in soup.tbody.find_all("tr")]
    assert faint == [[], ["8x8"], []] and "pin" in soup.table["class"]
    long = shown(pd.DataFrame({"claim": ["a sentence that is far too long to stay beside a number"], "x": [1]}))
    assert "pin" not in long[0].table["class"]
