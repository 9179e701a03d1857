import pandas as pd
import pytest

from blockshock_lib.explore import what_if
from tests.report import frames
from tests.report.training_frames import training_frame


@pytest.fixture(scope="module")
def frame():
    first = frames.make((4096, 16384), (16, 4096), groups=3, repeats=3, noise=0.001)
    return pd.concat([first, training_frame((16384,), (4096,), groups=2, repeats=2)], ignore_index=True)


def test_the_static_figure_stands_before_the_view(frame, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("blockshock_lib.explore.view.display", shown.append)
    what_if.what_if_view(frame)
    assert shown[0].data.startswith('<div class="bs-static') and "<img" in shown[0].data
    assert "s 2, link (GB/s) as measured, compress time as measured" in shown[0].data


def test_a_slider_draws_once_and_says_what_is_asked(frame):
    view = what_if.make(frame)
    assert view.drawn == 1
    view.controls["link"].value = 100.0
    assert view.drawn == 2 and "link (GB/s) 100" in view.figure.value
    view.controls["compress"].value = 0.0
    assert view.drawn == 3 and "compress time free" in view.figure.value


def test_a_faster_kernel_lifts_every_case(frame):
    view = what_if.make(frame, s=1.0)
    assert "faster than B1 in 0 of 4 cases" in view.figure.value
    view.controls["s"].value = 3.0
    assert "faster than B1 in 4 of 4 cases" in view.figure.value


def test_without_records_of_phase_1_it_says_that_there_is_nothing():
    assert "nothing to draw" in what_if.make(pd.DataFrame()).figure.value
