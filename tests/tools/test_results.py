"""README and docs/results say what the records say."""

import pytest

from blockshock_lib import studies
from blockshock_lib.runs import code
from tools import results


@pytest.mark.long
def test_the_committed_pages_say_what_the_shipped_records_say():
    assert results.stale() == [], "make findings"


def test_an_altered_page_is_stale_and_written_again(tmp_path, monkeypatch, capsys):
    page, readme = tmp_path / "docs" / "results" / "linear.md", tmp_path / "README.md"
    monkeypatch.setattr(results, "written", lambda: {page: "3 rows", readme: "No: 0.77x."})
    readme.write_text("old")
    assert results.stale() == [page, readme]
    assert results.main(["--check"]) == 1 and readme.read_text() == "old" and not page.exists()
    assert capsys.readouterr().out.count("is not what the records say: make findings") == 2
    assert results.main(["--chekc"]) == 2 and results.main() == 0
    assert results.main(["--check"]) == 0 and readme.read_text() == "No: 0.77x."
    page.write_text("3 rowz")
    assert results.stale() == [page]


def test_a_page_says_of_a_run_that_parts_are_missing_and_that_its_rules_are_others():
    study = studies.load("gpt")
    own = {"verdict": "gpt_latency: INCOMPLETE 17 of 18 · checks", "rules": {"digest": code.rules(study)["digest"]}}
    assert results.note(own, study) == "holds 17 of 18 records"
    assert results.note(own | {"rules": None}, study).endswith("; judged by other rules than stood before it")
    assert results.note(own | {"verdict": "PASS"}, study) == ""
