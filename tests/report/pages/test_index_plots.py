"""The small figure of a run shows the widest work that the run timed."""

import pytest

from blockshock_lib.report.pages import index_plots
from tests.report import frames
from tests.report.training_frames import training_frame

ONE = dict(ns=(4096,), bs=(256,), groups=2)


@pytest.mark.parametrize("phase, work", [("phase2", "a forward and dX"), ("phase3", "a training step")])
def test_a_training_runs_picture_is_of_its_whole_work(phase, work):
    picture = index_plots.picture(training_frame(**ONE, phase=phase, loss_steps=2), phase)
    assert f"kernel time of {work}" in picture.alt and picture.png
    calls = index_plots.picture(training_frame(**ONE, phase=phase, loss_steps=2, kernel=False), phase)
    assert f"call time of {work}" in calls.alt


def test_a_forward_runs_picture_is_of_a_forward_and_an_untimed_ones_of_its_checks():
    assert "kernel time of a forward" in index_plots.picture(frames.make(**ONE), "phase1").alt
    assert "check" in index_plots.picture(frames.make(**ONE, timed=False, phase="phase0"), "phase0").alt.lower()
    assert index_plots.picture(frames.make(**ONE).iloc[:0], "phase3").alt == "no figure: no records"
