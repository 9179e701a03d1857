"""Every table and figure of a shipped run is what its committed notebook shows, drawn by earlier code."""

import html
import json
import re

import pandas as pd
import pytest

from blockshock_lib.runs import manifest, records, reference
from blockshock_lib.studies.linear import STUDY
from tests.studies.linear.report.shipped import REFERENCE
from tools.drawn import plain

PHASES = [f"phase{number}-{device}" for device in ("cpu", "cuda") for number in range(4)]
BEFORE = "phase1-cuda-before"  # schema 1, five groups
ASKED = re.compile(r'\.(table|figure)\("([^"]+)"(, run\.source)?\)')


def loaded(*runs):
    """The records of these runs and of the others of their references."""
    firsts = [REFERENCE / run for run in runs]
    return records.load(*(one for run in firsts for one in (run, *reference.others(run, manifest.read(run)))))


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


TABLES = [(run, "table") for run in (*PHASES, BEFORE, "findings")]
# The one of phase 0 is that of its answer.
FIGURES = [(run, "figure") for run in (*PHASES, BEFORE, "findings") if "phase0" not in run]


@pytest.mark.parametrize(
    "run, kind", TABLES[:7] + [pytest.param(*one, marks=pytest.mark.long) for one in TABLES[7:] + FIGURES]
)
def test_tables_and_figures_of_a_shipped_run_are_those_of_its_notebook(run, kind):
    frame = loaded(*([*PHASES[4:], "phase3-cuda-5"] if run == "findings" else [run]))  # -5: its sixth case
    assert differing(frame, REFERENCE / run, kind) == []
