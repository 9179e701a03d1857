"""Which code measured what stands side by side."""

import pandas as pd
import pytest

from blockshock_lib import records
from blockshock_lib.manifest import ROOT
from blockshock_lib.report.findings import versions


def frame(**codes):
    return pd.DataFrame([dict(phase=phase, code=code, optimizer="") for phase, code in codes.items()])


def test_works_of_different_sources_are_named():
    told = versions.of_works(frame(phase1="bbb/2", phase3="aaa/1"))
    assert told == {"forward": "bbb/2", "step": "aaa/1"}
    assert versions.sentence(told) == (
        "Measured with different code (forward bbb/2, step aaa/1): compare within one work alone."
    )


@pytest.mark.parametrize("codes", [("aaa/1", "aaa/1"), ("aaa/1", "bbb/1"), ("", "")])
def test_of_the_same_sources_nothing_is_said_whatever_the_commit(codes):
    assert versions.of_works(frame(phase1=codes[0], phase3=codes[1])) == {}


def test_alone_nothing_is_said():
    assert versions.of_works(frame(phase1="aaa/1")) == versions.of_works(pd.DataFrame()) == {}
    assert versions.of_works(frame(phase1="aaa/1", phase2="bbb/2")) == {}
    assert versions.sentence({}) == ""


def test_what_is_not_known_is_said_so():
    assert versions.of_works(frame(phase1="", phase3="aaa/1")) == {"forward": "unknown", "step": "aaa/1"}


def test_runs_put_together_name_every_code():
    both = pd.concat([frame(phase1="aaa/1", phase3="aaa/1"), frame(phase1="bbb/2")])
    assert versions.of_works(both)["forward"] == "aaa/1 and bbb/2"


def test_the_shipped_phases_are_told_as_their_records_say():
    folders = [ROOT / "outputs" / "reference" / f"phase{n}-cuda" for n in (1, 3)]
    code = [records.read(next((folder / "records").glob("*.json")))["context"]["code"]["sources"] for folder in folders]
    told = versions.of_works(records.load(*folders))
    assert bool(told) is (code[0] != code[1])
    assert all(code[place] in told[work] for place, work in enumerate(told))
