import json
import re
import shutil

import nbformat
import pytest
from bs4 import BeautifulSoup
from nbformat import v4

from blockshock_lib import manifest, records
from blockshock_lib.errors import RecordError
from blockshock_lib.report.pages import page
from tests.faults import hostile

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture
def notebook(tmp_path):
    widget = v4.new_output(
        "display_data", {WIDGET: {"model_id": "1", "version_major": 2}, "text/plain": "100% 3/3 cases"}
    )
    bare = v4.new_output("display_data", {WIDGET: {"model_id": "2", "version_major": 2}})
    error = v4.new_output(
        "error", ename="RankError", evalue="rank 1 failed", traceback=["Traceback: \x1b[31mrank 1\x1b[0m"]
    )
    image = v4.new_output("display_data", {"image/png": PIXEL}, metadata={})
    shown = v4.new_output("display_data", {"text/html": f'<img alt="a chart" src="data:image/png;base64,{PIXEL}">'})
    cells = [
        v4.new_markdown_cell(
            "# A question\n\nSee [the law](https://example.org/law). $x^2$\n\n```mermaid\ngraph TD\n```"
        ),
        v4.new_code_cell("run()", execution_count=1, outputs=[widget, bare, image, shown]),
        v4.new_code_cell("boom()", execution_count=2, outputs=[error]),
    ]
    book = v4.new_notebook(cells=cells)
    book.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {"1": {}}, "version_major": 2}}
    path = tmp_path / "phase0.ipynb"
    nbformat.write(book, path)
    return path


def test_the_page_lies_beside_the_notebook_and_nothing_else_does(notebook):
    target = page.write_html(notebook)
    assert target == notebook.with_suffix(".html")
    assert sorted(path.name for path in notebook.parent.iterdir()) == ["phase0.html", "phase0.ipynb"]


def test_the_page_fetches_nothing(notebook):
    text = page.write_html(notebook).read_text(encoding="utf-8")
    fetched = re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)\s*=\s*[\"'](?!data:)[^\"']*", text)
    assert fetched == []
    assert not re.search(r"cdnjs|unpkg|jsdelivr|@import|import\(", text)
    assert "default-src 'none'" in text


def test_the_page_shows_images_and_errors_and_no_dead_progress_bar(notebook):
    text = page.write_html(notebook).read_text(encoding="utf-8")
    assert PIXEL in text and 'alt="a chart"' in text
    assert "100% 3/3 cases" not in text
    assert "Traceback" in text
    assert "widget-view" not in text and "widget-state" not in text


def test_the_notebook_itself_is_left_as_it_is(notebook):
    before = notebook.read_bytes()
    page.write_html(notebook)
    assert notebook.read_bytes() == before


def test_a_page_that_cannot_be_written_leaves_the_old_one(notebook, monkeypatch):
    target = page.write_html(notebook)
    before = target.read_text(encoding="utf-8")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(records.os, "replace", fail)
    with pytest.raises(RecordError, match="disk full"):
        page.write_html(notebook)
    assert target.read_text(encoding="utf-8") == before
    assert sorted(path.name for path in notebook.parent.iterdir()) == ["phase0.html", "phase0.ipynb"]


def soup_of(path, *cells):
    nbformat.write(v4.new_notebook(cells=list(cells)), path)
    return BeautifulSoup(page.write_html(path).read_text(encoding="utf-8"), "html.parser")


def code(*outputs, source="run()", count=3):
    return v4.new_code_cell(source, execution_count=count, outputs=list(outputs))


def test_the_page_needs_no_template_of_nbconvert(notebook, monkeypatch):
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda *_: [])
    monkeypatch.setattr("nbconvert.exporters.templateexporter.jupyter_path", lambda *_: [])
    assert page.write_html(notebook).exists()


def test_code_is_folded_and_coloured_and_its_toggle_says_of_which_cell(tmp_path):
    soup = soup_of(tmp_path / "a.ipynb", code(source="import os\nx = 'a'  # why"), code(source=""))
    (fold,) = soup.find_all("details")
    assert not fold.has_attr("open") and fold.summary.get_text() == "Code of cell 3 · 2 lines"
    assert fold.code.get_text().strip() == "import os\nx = 'a'  # why"
    assert {"kn", "s1", "c1"} <= {name for span in fold.find_all("span") for name in span.get("class", [])}
    assert soup.find("button", id="code") and soup.find("button", id="theme")


def test_headings_are_in_order_and_listed(tmp_path):
    text = v4.new_markdown_cell("# The *title*\n\n### Too deep\n\n# Another\n\n#### Deeper\n\n## Last & <b>bold</b>")
    soup = soup_of(
        tmp_path / "a.ipynb", text, code(v4.new_output("display_data", {"text/html": "<h1>no heading</h1>"}))
    )
    assert soup.title.get_text() == soup.h1.get_text() == "The title" and len(soup.find_all("h1")) == 1
    found = [(tag.name, tag.get_text()) for tag in soup.main.find_all(re.compile("^h[1-6]$"))]
    assert found == [("h2", "Too deep"), ("h2", "Another"), ("h3", "Deeper"), ("h2", "Last & bold")]
    for link in soup.nav.find_all("a"):
        assert soup.find(id=link["href"].removeprefix("#")).get_text() == link.get_text()
    assert len(soup.nav.find_all("a")) == 3 and soup.html["lang"] == "en"


def test_a_notebook_without_a_title_is_called_as_its_file(tmp_path):
    assert soup_of(tmp_path / "some.ipynb", code()).h1.get_text() == "some"


def test_every_picture_has_words_and_a_figure_keeps_its_own(tmp_path):
    shown = v4.new_output("display_data", {"text/html": f'<img src="data:image/png;base64,{PIXEL}" alt="a &lt;b&gt;">'})
    named = v4.new_output("display_data", {"image/png": PIXEL}, metadata={"image/png": {"alt": "named"}})
    bare = v4.new_output("display_data", {"image/png": PIXEL, "text/plain": "<Figure>"})
    (tmp_path / "x.png").write_bytes(b"\x89PNG")
    text = v4.new_markdown_cell("![](x.png)")
    soup = soup_of(tmp_path / "a.ipynb", code(shown, named, bare), text)
    assert [image["alt"] for image in soup.find_all("img")] == [
        "a <b>",
        "named",
        "figure of cell 3",
        "figure of cell 1",
    ]
    assert all(image["src"].startswith("data:image/png;base64,") for image in soup.find_all("img"))
    assert "<Figure>" not in soup.main.get_text()


def test_a_table_of_pandas_has_headers_a_box_to_scroll_in_and_its_words_to_the_left(tmp_path):
    import pandas as pd

    frame = pd.DataFrame({"why": ["because it is so", "b"], "ms": [1.5, 2.0]}, index=pd.Index(["x", "y"], name="fact"))
    soup = soup_of(tmp_path / "a.ipynb", code(v4.new_output("display_data", {"text/html": frame._repr_html_()})))
    box = soup.find("div", class_="scroll")
    assert box["tabindex"] == "0" and box["aria-label"] == "table of cell 3"
    table = box.table
    assert {header["scope"] for header in table.thead.find_all("th")} == {"col"}
    assert {header["scope"] for header in table.tbody.find_all("th")} == {"row"}
    why, ms = table.tbody.tr.find_all("td")
    assert "left" in why["class"] and "left" not in ms["class"]
    assert "vertical-align" not in soup.main.get_text(), "the style of pandas is not text"


def test_output_of_a_terminal_says_where_it_comes_from(tmp_path):
    lines = [v4.new_output("stream", name="stdout", text=text) for text in ("one\n", "two\n")]
    warning = v4.new_output("stream", name="stderr", text="  0%|  | 0/3\r 50%|= | 1/3\rUserWarning: <b>\n")
    bar = v4.new_output("stream", name="stderr", text="  0%|  | 0/3\r              \r")
    error = v4.new_output("error", ename="RankError", evalue="x", traceback=["\x1b[31mrank 1\x1b[0m failed"])
    soup = soup_of(tmp_path / "a.ipynb", code(*lines, warning), code(bar, count=4), code(error, count=5))
    assert [block.get_text() for block in soup.main.find_all("pre", class_="said")] == [
        *("one\ntwo", "UserWarning: <b>", "rank 1 failed")
    ]
    assert [label.get_text() for label in soup.main.find_all("p", class_="label")] == [
        *("stderr of cell 3", "cell 5 failed with RankError")
    ]
    assert soup.find("span", class_="ansi-red-fg").get_text() == "rank 1"


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
def test_the_verdict_of_the_manifest_is_at_the_top(notebook, facts, tone, state):
    started = {"started": "2026-11-20T17:07:16+01:00"}
    known = json.loads((hostile.REFERENCE / manifest.FILE).read_text()) | started | facts
    (notebook.parent / manifest.FILE).write_text(json.dumps(known))
    soup = BeautifulSoup(page.write_html(notebook).read_text(encoding="utf-8"), "html.parser")
    box = soup.header.find(class_="verdict")
    assert tone in box["class"] and "CPU, 2 cores" in box.get_text() and "2026-11-20 16:07 UTC" in box.get_text()
    assert known["verdict"].split(" · ")[0] in box.get_text()
    assert (box.find(class_="state").get_text() if state else box.find(class_="state")) == state


def test_without_a_manifest_no_verdict_is_made_up(notebook):
    assert 'class="verdict' not in page.write_html(notebook).read_text(encoding="utf-8")


def test_very_long_output_is_cut_and_says_so(tmp_path):
    long = [
        v4.new_output("stream", name="stdout", text="x" * 3_000_000),
        v4.new_output("display_data", {"text/html": "<p>x</p>" * 400_000}),
    ]
    path = tmp_path / "a.ipynb"
    text = soup_of(path, code(*long)).main.get_text()
    assert "2900000 more characters are left out" in text and "3200000 characters is left out" in text
    assert path.with_suffix(".html").stat().st_size < 200_000


@pytest.mark.parametrize("run", sorted(path.name for path in hostile.REFERENCE.parent.iterdir()))
def test_the_pages_of_the_reference_runs_are_small_and_show_every_figure(run, tmp_path):
    source = next((hostile.REFERENCE.parent / run).glob("*.ipynb"))
    target = page.write_html(shutil.copy(source, tmp_path))
    assert target.stat().st_size < 1_000_000
    soup = BeautifulSoup(target.read_text(encoding="utf-8"), "html.parser")
    shown = json.dumps(json.loads(source.read_text())["cells"])  # what a widget keeps for itself is no output
    assert len(soup.find_all("img")) == shown.count("data:image/png;base64") > 0
    assert all(len(image["alt"]) > 40 for image in soup.find_all("img"))
    assert len(soup.find_all("table")) == source.read_text().count("<table") > 0
