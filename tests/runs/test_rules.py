"""What decides a verdict changes the digest of the rules; what is only said does not."""

import re
import shutil
from types import SimpleNamespace

import pytest

from blockshock_lib import studies
from blockshock_lib.runs import rules

LIBRARY = rules.code.HERE / "blockshock_lib"


@pytest.fixture
def tree(tmp_path):
    for name in ("report", "studies/gallery"):
        shutil.copytree(LIBRARY / name, tmp_path / "blockshock_lib" / name, ignore=shutil.ignore_patterns("__py*"))
    return tmp_path


def edit(tree, name, old, new):
    path = tree / "blockshock_lib" / name
    text = path.read_text("utf-8")
    assert re.search(old, text), "the planted change finds its place"
    path.write_text(re.sub(old, new, text, count=1), "utf-8")


DECIDES = {
    "a number of a rule": ("studies/gallery/hypotheses.py", r"(\nBLOCK, LEAST.*) 1\.5,", r"\1 1.6,"),
    "the rule as it is worded": ("studies/gallery/hypotheses.py", r"(?s)(_RULE_P3 = .*?)Supported", r"\1Upheld"),
    "what it calls of its study": ("studies/gallery/report.py", r"(?s)(def ratios\(.*?\n    )(\w+ =)", r"\1pass; \2"),
    "an interval": ("report/interval.py", r"\nMACHINE = 0\.014", "\nMACHINE = 0.010"),
    "valid samples": ("report/frames.py", r"(\n    outcome = checks\()", r"\n    frame = frame\1"),
}
SAID = {
    "a docstring": ("report/interval.py", r'"""Of each cell\'s ratio\.', '"""Of every ratio.'),
    "a comment": ("report/interval.py", r"# A reach that exp\(\) cannot hold", "# What exp() cannot hold"),
    "what runs say of each other": ("report/reruns.py", r"(def sentences\(.*\n)", r"\1    return []\n"),
    "the answer": ("studies/gallery/report.py", r"(def answer\(.*\n)", r"\1    return ''\n"),
    "another phase's rule": ("studies/gallery/losses.py", r"(def p6a\(.*\n)", r"\1    return None\n"),
    "a table of the study": ("studies/gallery/methods.py", r"\A", "NEW = 1\n"),
}


@pytest.mark.parametrize("change", [*DECIDES, *SAID])
def test_the_digest_is_of_what_decides_a_phases_verdicts(tree, change):
    gallery = studies.load("gallery")
    before = rules.of(gallery, "gallery_speed", tree)
    assert before["digest"] == rules.of(gallery, "gallery_speed")["digest"] and len(before["digest"]) == 12
    edit(tree, *(DECIDES | SAID)[change])
    after = rules.of(gallery, "gallery_speed", tree)
    assert (before["digest"] != after["digest"]) == (change in DECIDES)


def test_the_files_are_those_that_hold_a_rule_of_the_phase_or_what_it_calls():
    named = {name: rules.of(studies.load("gallery"), name)["file"] for name in ("gallery_speed", "gallery_accuracy")}
    assert "studies/gallery/hypotheses.py" in named["gallery_speed"] and "losses.py" not in named["gallery_speed"]
    assert "studies/gallery/losses.py" in named["gallery_accuracy"] and "report/verdicts.py" in named["gallery_speed"]


def test_a_study_elsewhere_counts_with_its_own_file_and_what_it_imports(tmp_path, monkeypatch):
    text = "from blockshock_lib.report.verdicts import ratio\nMOST = 1\n\ndef least(frame):\n    return ratio, MOST\n"
    (tmp_path / "planted_rules.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("BLOCKSHOCK_STUDIES", "planted=planted_rules:STUDY")
    import planted_rules

    planted = SimpleNamespace(name="planted", hypotheses={"phase": (planted_rules.least,)})
    before = rules.of(planted, "phase")
    (tmp_path / "planted_rules.py").write_text(text.replace("MOST = 1", "MOST = 2"))
    after = rules.of(planted, "phase")
    assert before["digest"] != after["digest"] and before["file"] == after["file"] and before["commit"] == ""
    assert "planted_rules.py, " in before["file"] and "blockshock_lib/report/verdicts.py" in before["file"]
