"""Every table and figure of every study: of no record it gives no number, of no real GPU no claim about speed."""

from functools import cache

import pandas as pd
import pytest

from blockshock_lib import studies
from blockshock_lib.report import frames
from tests.report.frames import words
from tests.studies.linear.report.shipped import REFERENCE, shipped

EVERY = {name: studies.load(name) for name in studies.names()}
TRACED = "timeline", "exposed"
NO_TIME = "checks", "loss"  # what they draw is in no unit of time


def named(kind):
    return [(study, name) for study, of in EVERY.items() for name in getattr(of, kind)]


def said(study, name, frame, folder):
    return words(EVERY[study].figures[name](frame, *[folder] * (name in TRACED)))


@cache
def drawn(name):
    """The words of a figure of a shipped run of GPUs that has something to draw, its records and its folder."""
    for folder in (REFERENCE / f"phase{number}-cuda" for number in (1, 2, 3)):
        frame = shipped(folder.name, 1)
        if not frame["metric"].eq("energy").any():  # of before it was measured
            joules = frame[frame["metric"].eq("forward_kernel")].assign(metric="energy", detail="forward_kernel")
            frame = pd.concat([frame, joules], ignore_index=True)
        if "nothing to draw" not in (text := said("linear", name, frame, folder)):
            return text, frame, folder
    pytest.fail(f"no shipped run has anything to draw of {name}")


@pytest.mark.parametrize("study, name", named("tables"))
def test_a_table_of_nothing_has_no_number(study, name, tmp_path):
    for nothing in (pd.DataFrame(), frames.complete(pd.DataFrame(), EVERY[study].axes)):
        table = EVERY[study].tables[name](nothing, *[tmp_path] * (name in TRACED))
        assert not table.select_dtypes("number").notna().any(axis=None)
    if study == "linear":  # nor does the frame of a phase that measured other things end it
        EVERY[study].tables[name](shipped("phase0-cpu"), *[tmp_path] * (name in TRACED))


@pytest.mark.parametrize("study, name", named("figures"))
def test_a_figure_of_nothing_says_so(study, name, tmp_path):
    for nothing in (pd.DataFrame(), frames.complete(pd.DataFrame(), EVERY[study].axes)):
        assert "nothing to draw" in said(study, name, nothing, tmp_path)


@pytest.mark.parametrize("name", EVERY["linear"].figures)
def test_what_no_check_passed_is_not_drawn_and_only_gpus_make_a_claim(name, tmp_path):
    text, frame, folder = drawn(name)
    wrong = frame.assign(value=frame["value"].mask(frame["metric"].eq("check"), 0.0))
    assert name == "checks" or "nothing to draw" in said("linear", name, wrong, tmp_path)
    assert "no claim" not in text
    for change, why in (({"device": "cpu"}, "CPU"), ({"emulated": True}, "emulated")):
        assert name in NO_TIME or f"no claim about speed: {why}" in said("linear", name, frame.assign(**change), folder)
