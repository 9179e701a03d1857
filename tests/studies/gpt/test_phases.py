"""How far a training is, in the unit of its phase."""

import io
import sys
from types import SimpleNamespace

import pytest

from blockshock_lib import studies
from blockshock_lib.notebook import terminal, workbook
from blockshock_lib.params import load
from blockshock_lib.runs.measure import Part
from tests.processes import wait_for


def test_a_training_counts_tokens_from_its_first_losses_on(tmp_path, monkeypatch):
    study, settings = studies.load("gpt"), {"methods": ["spd", "none"], "training.tokens": 40_000_000}
    params = load(study, "gpt_training", settings, choose={"hardware": "cpu"})
    run = SimpleNamespace(study=study, params=params, cases=study.expand(params), folder=tmp_path)
    run.redrawn = run.resumes = False
    one, other = run.cases
    part = Part(tmp_path, other, 0, {"code": {"sources": "abc"}, "machine": ""})
    part.add([{"metric": "train_loss", "repeat": 30_000}])
    part.add([{"metric": "sensitivity", "repeat": 0}])
    (tmp_path / "records" / f"{one.id}-0.json").touch()
    look = workbook._measured(run)
    assert look() == (pytest.approx(40 + 30_000 * 8 * 64 / 1e6), 80, other.label)
    monkeypatch.setattr(terminal, "FIRST", 0.01)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with terminal.working("gpt_training", look, study.phases["gpt_training"].unit):
        assert wait_for(sys.stderr.getvalue).startswith("gpt_training: 55.36 of 80 M tokens, one sync, 64 wide")
