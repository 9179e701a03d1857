import base64
import json
import re
import subprocess
from urllib.parse import unquote

import nbformat
import numpy as np
import pandas as pd
import pytest
from bs4 import BeautifulSoup
from nbformat import v4

from blockshock_lib.files import ROOT
from blockshock_lib.notebook.pages import page, sanitise
from blockshock_lib.runs import lock
from tests.faults import hostile

WIDGET = "application/vnd.jupyter.widget-view+json"


def write(folder, *cells):
    path = folder / "phase0.ipynb"
    nbformat.write(v4.new_notebook(cells=list(cells)), path)
    return path


def run(*outputs):
    return v4.new_code_cell("run()", execution_count=1, outputs=list(outputs))


def soup_of(notebook):
    return BeautifulSoup(page.write_html(notebook).read_text(encoding="utf-8"), "html.parser")


def test_the_page_shows_images_and_errors_and_no_dead_progress_bar(tmp_path):
    data = {WIDGET: {"model_id": "1", "version_major": 2}, "text/plain": "100% 3/3 cases"}
    image = f'<img alt="a chart" src="data:image/png;base64,{hostile.PIXEL}">'
    bars = [v4.new_output("display_data", given) for given in (data, {WIDGET: data[WIDGET]}, {"text/html": image})]
    error = v4.new_output("error", ename="RankError", evalue="x", traceback=["Traceback: \x1b[31mrank 1\x1b[0m"])
    text = str(soup_of(write(tmp_path, v4.new_markdown_cell("# A <'\"&"), run(*bars), run(error))))
    assert hostile.PIXEL in text and 'alt="a chart"' in text and "Traceback" in text
    assert "100% 3/3 cases" not in text and "widget-view" not in text


def test_code_is_folded_unless_its_cell_says_that_it_is_shown(tmp_path):
    cells = run(), v4.new_code_cell("1 + 1", execution_count=2, metadata={"tags": ["shown"]})
    folds = soup_of(write(tmp_path, *cells)).find_all("details", class_="code")
    assert [fold.has_attr("open") for fold in folds] == [False, True]


@pytest.mark.parametrize(
    "facts, tone, state",
    [
        ({}, "good", None),
        ({"status": "running"}, "good", None),
        ({"verdict": "phase1: FAIL · x"}, "bad", None),
        ({"status": "interrupted", "verdict": "phase1 interrupted: <b>"}, "warn", "interrupted"),
        ({"status": "failed", "verdict": "phase1 failed: x"}, "bad", "failed"),
    ],
)
def test_the_verdict_of_the_manifest_is_at_the_top(tmp_path, facts, tone, state):
    notebook = write(tmp_path)
    assert soup_of(notebook).find(class_="verdict") is None, "made up without a manifest"
    hostile.noted(tmp_path, **{"started": "2026-11-20T17:07:16+01:00"} | facts)
    lock.hold(tmp_path)  # a run that says it is running and has no owner is read as interrupted
    box = soup_of(notebook).header.find(class_="verdict")
    assert tone in box["class"] and "CPU, 2 cores" in box.get_text() and "2026-11-20 16:07 UTC" in box.get_text()
    assert (hostile.KNOWN | facts)["verdict"].split(" · ")[0] in box.get_text()
    assert (box.find(class_="state").get_text() if state else box.find(class_="state")) == state
    lock.release(tmp_path)


def test_a_notebook_that_begins_with_its_answer_has_no_second_verdict_unless_it_did_not_end_well(tmp_path):
    said = run(v4.new_output("display_data", {"text/html": '<div class="answer"><p class="sentence">Never.</p></div>'}))
    notebook = write(tmp_path, v4.new_markdown_cell("# Q"), said)
    for status, boxes in (("completed", 0), ("failed", 1), ("interrupted", 1)):
        hostile.noted(tmp_path, status=status)
        soup = soup_of(notebook)
        assert len(soup.find_all(class_="verdict")) == boxes
        assert soup.main.find(class_="sentence").get_text() == "Never." and "CPU, 2 cores" in soup.header.get_text()


def test_a_headings_name_is_made_of_its_words_and_never_one_of_the_pages_own(tmp_path):
    text = "# T\n## Time of a step\n## Time of a step\n## Contents\n## µ\n### s/2 & more"
    soup = soup_of(write(tmp_path, v4.new_markdown_cell(text)))
    names = [tag["id"] for tag in soup.main.find_all(["h2", "h3"])]
    assert names == ["time-of-a-step", "time-of-a-step-2", "contents-2", "part", "s-2-more"]
    assert [link["href"] for link in soup.find(id="contents").ol.find_all("a")] == [f"#{name}" for name in names[:4]]


def test_a_page_links_to_what_lies_beside_it_and_in_a_zip_to_nothing_else(tmp_path):
    folder = hostile.small_run(tmp_path / "out" / "reference" / "a")
    (tmp_path / "out" / "index.html").touch()
    (notebook,) = folder.glob("*.ipynb")
    beside = {"Notebook": notebook.name, "Records": "records", "Traces": "traces", "Manifest": "manifest.json"}
    for alone, links in ((False, {"Runs": "../../index.html"} | beside), (True, beside)):
        soup = BeautifulSoup(page.render(notebook, alone), "html.parser")
        assert {link.get_text(): link["href"] for link in soup.find(class_="links").find_all("a")} == links


SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg"><text>one = 1</text><use href="#a"/><path style="fill: url(#h)"/>{}</svg>'
)


@pytest.mark.parametrize(
    "active",
    [
        *("", "<script>1</script>", '<rect onload="x()"/>', "<foreignObject/>", '<image href="https://x.org/a.png"/>'),
        *("<a href='#x'/>", "<style>@import 'x'</style>", "<rect fill='url(https://x.org/#a)'/>", "<svg:script/>"),
        *("<animate attributeName='href'/>", "<x xmlns:y='z' y:href=\"data:text/html,x\"/>", "&#60;script&#62;"),
    ],
)
def test_an_svg_is_an_image_only_where_nothing_in_it_is_active(active):
    data = base64.b64encode(SVG.format(active).encode()).decode()
    html = sanitise.clean(f'<img class="bs-figure" alt="it" src="data:image/svg+xml;base64,{data}">', cell="a")
    assert ("<img" in html) == (not active) and ("no embedded PNG" in html) == bool(active)


def test_a_verdicts_line_becomes_a_list(tmp_path):
    line = v4.new_output("stream", name="stdout", text="phase1: PASS · a <b> · c\n")
    assert [one.get_text() for one in soup_of(write(tmp_path, run(line))).select(".output li")] == [
        "phase1: PASS",
        "a <b>",
        "c",
    ]


def test_very_long_output_is_cut_and_says_so(tmp_path):
    long = v4.new_output("stream", name="stdout", text="x" * 3_000_000)
    soup = soup_of(write(tmp_path, run(long, v4.new_output("display_data", {"text/html": "<p>x</p>" * 400_000}))))
    text = soup.main.get_text()
    assert "2900000 more characters are left out" in text and "3200000 characters is left out" in text
    assert len(str(soup)) < 200_000


@pytest.mark.parametrize("name", sorted(path.parent.name for path in hostile.REFERENCE.parent.glob("*/*.ipynb")))
def test_the_pages_of_the_reference_runs_are_as_drawn_now_are_small_and_show_every_figure(name):
    source = next((hostile.REFERENCE.parent / name).glob("*.ipynb"))
    text, committed = page.render(source), source.with_suffix(".html").read_text("utf-8")
    assert text == committed, "stale: python -m tools.refresh_reference outputs/reference/<run>"
    assert len(text.encode()) < 1_500_000
    soup = BeautifulSoup(text, "html.parser")
    shown = json.dumps(json.loads(source.read_text())["cells"])  # what a widget keeps for itself is no output
    assert len(soup.find_all("img")) == shown.count(";base64,") > 0
    assert all(len(image["alt"]) > 40 for image in soup.find_all("img"))
    none = [p for p in soup.find_all("p", class_="note") if p.get_text().startswith("Nothing to list: no row of ")]
    assert len(soup.find_all("table")) + len(none) == source.read_text().count("<table") > 0
    assert not [cell for cell in soup.find_all("td") if cell.get_text() in ("NaN", "nan", "None")]


@pytest.mark.parametrize(
    "text, html",
    [
        ("plain <b> & 'x'\n", "plain &lt;b&gt; &amp; &#39;x&#39;"),
        ("\x1b[31mred\x1b[0m \x1b[1;38;5;28mof a palette\x1b[39m", "red of a palette"),
        ("\x1b[2K\x1b[1Aup", "up"),
        ("\x1b]8;;https://example.org\x07link\x1b]8;;\x07", "link"),
        ("10%\r50%\r100%\ndone", "100%\ndone"),
        ("windows\r\nlines\r\n", "windows\nlines"),
        ("a\x00\x08\x7fb", "ab"),
        (" \n\t\n", ""),
    ],
)
def test_what_a_terminal_showed_is_what_the_page_shows(text, html):
    assert sanitise.terminal(text) == html


def test_every_link_of_a_shipped_page_leads_to_what_a_fresh_clone_holds():
    shipped = hostile.REFERENCE.parent
    ours = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(ours, cwd=ROOT, text=True, capture_output=True, check=True).stdout.split()
    held = {place for name in listed for place in (ROOT / name, *(ROOT / name).parents)}
    pages = [place for place in held if place.suffix == ".html" and place.is_relative_to(shipped)]
    assert len(pages) == 1 + len([name for name in listed if (ROOT / name).match("outputs/reference/*/manifest.json")])
    for path in pages:
        links = re.findall(r'<a\b[^>]*\shref="(?!#|https?:)([^"]*)"', path.read_text(encoding="utf-8"))
        assert links and not [one for one in links if (path.parent / unquote(one)).resolve() not in held], path


def shown(frame):
    """The table of a page for what pandas writes of this frame; its rows of texts, the header first."""
    soup = BeautifulSoup(sanitise.clean(frame.to_html(), cell="a"), "html.parser")
    return soup, [[cell.get_text() for cell in row.find_all(["td", "th"])] for row in soup.find_all("tr")]


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        ({"t (ms)": [0.01401, np.nan, 0.5]}, ["t (µs)", "14.01", "–", "500"]),
        ({"t (ms)": [0.01401, 5.874, 12.5]}, ["t (ms)", "0.01401", "5.874", "12.5"]),
        ({"t (ms)": ["0.014–0.5", "0.001–12", "–"]}, ["t (µs)", "14–500", "1–12,000", "–"]),
        ({"t (ms)": ["not measured", "1 (itself)", "0.2"]}, ["t (µs)", "not measured", "1 (itself)", "200"]),
        ({"a (ms)": [0.02, 3.0], "b (ms)": [0.3, 0.1]}, ["a (µs) b (µs)", "20 300", "3000 100"]),
        ({"n (ms)": [2.0, 0.1], "GiB": [0.02, 0.03]}, ["n (ms) GiB", "2 0.02", "0.1 0.03"]),
        ({"n": ["5874000", "40960", "4096", "0.000016"]}, ["n", "5,874,000", "40,960", "4096", "1.6e-5"]),
        ({"n": ["-0.5000", "4096x4096", "0.77x [0.75, 0.78]"]}, ["n", "-0.5", "4096x4096", "0.77x [0.75, 0.78]"]),
    ],
)
def test_times_of_a_table_have_one_unit_by_their_size_large_numbers_marks_small_ones_powers_and_words_stay(
    columns, rows
):
    assert [" ".join(row) for row in shown(pd.DataFrame(columns))[1]] == rows


def test_an_index_of_numbers_goes_a_named_one_becomes_columns_and_an_empty_table_a_word():
    named = pd.DataFrame({"m": ["a", "a", "b"], "t": ["y", "z", "y"], "x": [1, 2, 3]}).set_index(["m", "t"])
    soup, rows = shown(named)
    assert rows == [["m", "t", "x"], ["a", "y", "1"], ["a", "z", "2"], ["b", "y", "3"]]
    assert not soup.find(rowspan=True)
    assert shown(named.reset_index())[1] == rows
    empty = shown(named.iloc[:0])[0]
    assert empty.get_text() == "Nothing to list: no row of x, m, t." and not empty.find("table")


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
