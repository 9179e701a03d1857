import re

import nbformat
import pytest
from nbformat import v4

from blockshock_lib.report import page

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

    monkeypatch.setattr(page.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        page.write_html(notebook)
    assert target.read_text(encoding="utf-8") == before
    assert sorted(path.name for path in notebook.parent.iterdir()) == ["phase0.html", "phase0.ipynb"]
