import pandas as pd
import pytest

from blockshock_lib.studies.linear.explore import what_if_view
from tests.report import frames
from tests.studies.linear.report.shipped import shipped


@pytest.fixture(scope="module")
def frame():
    first = frames.make((4096, 16384), (16, 4096), groups=3, repeats=3, noise=0.001)
    return pd.concat([first, shipped("phase3-cuda")], ignore_index=True)


def test_a_faster_kernel_lifts_every_case(frame):
    view = what_if_view(frame, s=1.0)
    assert "faster than B1 in 0 of 4 cases" in view.figure.value
    view.controls["s"].value = 3.0
    assert "faster than B1 in 4 of 4 cases" in view.figure.value


def test_without_records_of_phase_1_it_says_that_there_is_nothing():
    assert "nothing to draw" in what_if_view(pd.DataFrame()).figure.value
