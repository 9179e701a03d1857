"""README and docs/results say what the records say."""

import dataclasses
from types import SimpleNamespace

import pandas as pd
import pytest

from blockshock_lib import studies
from blockshock_lib.studies.linear import STUDY
from tools import results


@pytest.mark.long
def test_the_committed_pages_say_what_the_shipped_records_say():
    assert results.stale() == [], "make findings"


def test_an_altered_page_is_stale_and_written_again(tmp_path, monkeypatch, capsys):
    quick = dataclasses.replace(STUDY, results=lambda frame: f"{len(frame)} rows")
    monkeypatch.setattr(studies, "load", lambda name: quick)
    monkeypatch.setattr(studies, "names", lambda: ("linear",))
    monkeypatch.setattr(results, "ROOT", tmp_path)
    run = {"run": "outputs/reference/x", "started": "2030-01-02 03:04", "code": "1234567", "versions": "torch 9"}
    mine, other = (
        SimpleNamespace(counts=True, setting=setting, manifest={"phase": "phase1"}, row=lambda: run)
        for setting in ("a machine", "another")
    )
    frame, said = pd.DataFrame(index=range(3)), "No: 0.77x."
    found = SimpleNamespace(main=frame, setting="a machine", sentence=said, sources=[mine, other], study=STUDY)
    monkeypatch.setattr(results, "Findings", lambda *asked: found)
    readme, page = tmp_path / "README.md", tmp_path / "docs" / "results" / "linear.md"
    readme.write_text(f"# Title\n{results.BEGIN}\nold\n{results.END}\nand more\n")
    assert results.stale() == [page, readme]
    assert results.main(["--check"]) == 1 and readme.read_text().startswith(f"# Title\n{results.BEGIN}\nold")
    assert capsys.readouterr().out.count("is not what the records say: make findings") == 2
    assert results.main(["--chekc"]) == 2 and results.main() == 0
    assert results.main(["--check"]) == 0
    assert results.stale() == []
    assert "(docs/results/linear.md)" in readme.read_text() and "| No: 0.77x. |" in readme.read_text()
    assert readme.read_text().startswith("# Title\n") and readme.read_text().endswith(f"{results.END}\nand more\n")
    assert "\n3 rows\n" in page.read_text() and quick.question in page.read_text()
    link = "[outputs/reference/x](../../outputs/reference/x/phase1_forward.ipynb)"
    assert page.read_text().count(f"| {link} | 2030-01-02 03:04 | 1234567 | torch 9 |") == 1
    page.write_text(page.read_text().replace("rows", "rowz"))
    assert results.stale() == [page]
