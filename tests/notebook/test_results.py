"""README and docs/results say what the records say."""

import dataclasses
from types import SimpleNamespace

import pandas as pd
import pytest

from blockshock_lib import studies
from blockshock_lib.notebook import results
from blockshock_lib.studies.linear import STUDY


def stale():
    return [path for path, text in results.written().items() if not path.is_file() or path.read_text("utf-8") != text]


@pytest.mark.long
def test_the_committed_pages_say_what_the_shipped_records_say():
    assert stale() == [], "make findings"


def test_an_altered_page_is_stale_and_written_again(tmp_path, monkeypatch):
    quick = dataclasses.replace(STUDY, results=(lambda frame: "No: 0.77x.", lambda frame: f"{len(frame)} rows"))
    monkeypatch.setattr(studies, "load", lambda name: quick)
    monkeypatch.setattr(studies, "names", lambda: ("linear",))
    monkeypatch.setattr(results, "ROOT", tmp_path)
    found = SimpleNamespace(main=pd.DataFrame(index=range(3)), setting="a machine")
    monkeypatch.setattr(results, "Findings", lambda *asked: found)
    readme, page = tmp_path / "README.md", tmp_path / "docs" / "results" / "linear.md"
    readme.write_text(f"# Title\n{results.BEGIN}\nold\n{results.END}\nand more\n")
    assert stale() == [page, readme]
    results.main()
    assert stale() == []
    assert "(docs/results/linear.md)" in readme.read_text() and "| No: 0.77x. |" in readme.read_text()
    assert readme.read_text().startswith("# Title\n") and readme.read_text().endswith(f"{results.END}\nand more\n")
    assert page.read_text().endswith("\n3 rows\n") and quick.question in page.read_text()
    page.write_text(page.read_text().replace("rows", "rowz"))
    assert stale() == [page]
