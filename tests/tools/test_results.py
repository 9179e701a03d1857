"""README and docs/results say what the records say."""

from types import SimpleNamespace

import pytest

from blockshock_lib import studies
from blockshock_lib.notebook import terminal
from blockshock_lib.runs import rules
from blockshock_lib.runs.manifest import REFERENCE
from tests.report import frames
from tests.studies.gpt.test_saved import timed
from tools import results


@pytest.mark.long
def test_the_committed_pages_say_what_the_shipped_records_say():
    assert results.stale() == [], "make findings"


def test_an_altered_page_is_stale_and_written_again(tmp_path, monkeypatch, capsys):
    page, readme, loud = tmp_path / "docs" / "results" / "linear.md", tmp_path / "README.md", []

    def written():
        loud.append(len(terminal._works))
        return {page: "3 rows", readme: "No: 0.77x."}

    monkeypatch.setattr(results, "written", written)
    readme.write_text("old")
    assert results.stale() == [page, readme]
    assert results.main(["--check"]) == 1 and readme.read_text() == "old" and not page.exists()
    assert capsys.readouterr().out.count("is not what the records say: make findings") == 2
    assert results.main(["--chekc"]) == 2 and results.main() == 0
    assert results.main(["--check"]) == 0 and readme.read_text() == "No: 0.77x."
    page.write_text("3 rowz")
    assert results.stale() == [page]
    assert loud == [0, 1, 1, 1, 0], "a command is silent while it works"


def test_a_page_says_of_a_run_its_rules_what_it_can_claim_and_what_it_lacks():
    study, frame = studies.load("gpt"), timed()
    own = {
        "phase": "gpt_latency",
        "verdict": "twin: smallest difference to claim: 0.4% · 3",
        "params": {"timing": {"groups": 2}},
    }
    own["rules"] = rules.of(study, own["phase"])
    assert results.note(own, study, frame) == "smallest difference to claim: 0.4%"
    few = frame[frame["group"].eq(0) | frame["work"].ne("step")].assign(timed=frame["work"])
    assert results.note(own, study, few).endswith("0.4%; 1 of 2 groups: step, width=384, ranks=4")
    assert results.note(own | {"rules": None}, study, frame).startswith("its rules were not kept; ")
    assert results.note(own | {"reason": "stopped"}, study, frame).endswith("0.4%; stopped")
    said = "PASS · A again differs from A in 1 of 2 cells (0.96x [0.9, 0.99] at b); smallest difference to claim: 9% · "
    off = results.note(
        own | {"verdict": f"{said}RUNS LIE APART: time: outputs/x -3% against the others · y"}, study, frame
    )
    assert "A again differs from A in 1 of 2 cells (0.96x [0.9, 0.99] at b); smallest" in off
    assert off.endswith("RUNS LIE APART: time: one run -3% against the others")
    differ = results.note(own | {"verdict": "x · runs differ, by no more: time: outputs/x -3%"}, study, few)
    assert "runs differ, by no more: time: one run -3%" in differ
    assert results.note(own | {"rules": {"digest": "x"}}, study, frame).startswith("judged by other rules")


def test_readme_leaves_long_conditions_to_the_page_and_keeps_short_ones():
    said = "Down to 4 (track 3) for +0.0454 (1 seed) nats (384 wide, 100M tokens)."
    assert results.ASIDE.sub("", said) == "Down to 4 (track 3) for +0.0454 (1 seed) nats."


def test_a_run_that_has_an_older_one_beside_it_is_set_against_it(monkeypatch):
    about = dict(counts=True, setting="x", manifest={"phase": "phase1", "reference": "x"})
    source, further = (SimpleNamespace(folder=REFERENCE / f"phase1-cuda{number}", **about) for number in ("", "-2"))
    found = SimpleNamespace(setting="x", sources=[source, further], study=studies.load("linear"))
    how = dict(ns=(4096, 8192), bs=(16, 256), groups=3, repeats=3, noise=0.001, group_effect=0.001)
    quicker = {("block_shock", n, b): 3.0 for n in how["ns"] for b in how["bs"]}
    old, new = frames.make(**how, seed=1), frames.make(**how, seed=2, run="b", speedup=quicker)
    monkeypatch.setattr(results.records, "load", lambda *runs: new if len(runs) > 1 else old)
    said = results._before(found)
    assert "4 of its 4 cases were measured anew in 2" in said and "| H1 | refuted: " in said and "| supported: " in said
    (line,) = [line for line in said.splitlines() if line.startswith("| Block-Shock |")]
    _, before, now, change, *_, up, down, time = map(str.strip, line.strip(" |").split("|"))
    assert float(change) == pytest.approx(3, rel=0.02) and float(now) > float(before) and (up, down) == ("4", "0")
    assert float(time) == pytest.approx(1 / 3, rel=0.02)
    source.folder = REFERENCE / "phase1-cpu"
    assert results._before(found) == ""
