"""Every table and figure of a shipped run is what its committed notebook shows, drawn by earlier code."""

import html
import json
import re

import pandas as pd
import pytest

from blockshock_lib.runs import records
from blockshock_lib.studies.linear import STUDY
from tests.studies.linear.report.shipped import REFERENCE
from tools.drawn import plain

PHASES = [f"phase{number}-{device}" for device in ("cpu", "cuda") for number in range(4)]
BEFORE = "phase1-cuda-before"  # schema 1, five groups
AGAIN = {"phase1-cuda": ["phase1-cuda", "phase1-cuda-2"]}  # of a reference of several runs, by its first
ASKED = re.compile(r'\.(table|figure)\("([^"]+)"(, run\.source)?\)')


def loaded(*runs):
    return records.load(*(REFERENCE / one for run in runs for one in AGAIN.get(run, [run])))


def cells(folder):
    """(kind, name, whether the traces are asked for too, HTML) of each table and figure that the notebook shows."""
    (notebook,) = folder.glob("*.ipynb")
    for cell in json.loads(notebook.read_text())["cells"]:
        if found := ASKED.search("".join(cell["source"])):
            yield *found.groups(), "".join(cell["outputs"][0]["data"]["text/html"])


def differing(frame, folder, kind):
    made, wrong, count = {"table": STUDY.tables, "figure": STUDY.figures}[kind], [], 0
    with pd.option_context("display.max_colwidth", None, "display.max_rows", None):
        for what, name, traced, shown in cells(folder):
            if what != kind:
                continue
            drawn, count = made[name](frame, *[folder] * bool(traced)), count + 1
            if kind == "table":
                same = plain(drawn._repr_html_()) == plain(shown)
            else:
                same = drawn.alt == html.unescape(re.search('<img alt="([^"]*)"', shown)[1])
            wrong += [] if same else [name]
    assert count
    return wrong


@pytest.mark.parametrize("run", [*PHASES[:7], BEFORE, pytest.param(PHASES[7], marks=pytest.mark.long)])
def test_a_shipped_runs_tables_are_those_of_its_notebook(run):
    assert differing(loaded(run), REFERENCE / run, "table") == []


@pytest.mark.long
@pytest.mark.parametrize("run", [*PHASES[1:4], *PHASES[5:], BEFORE])
def test_a_shipped_runs_figures_say_what_they_said_in_its_notebook(run):
    assert differing(loaded(run), REFERENCE / run, "figure") == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["table", "figure"])
def test_the_shipped_findings_are_those_of_their_notebook(kind):
    assert differing(loaded(*PHASES[4:]), REFERENCE / "findings", kind) == []
