"""Which calls of a kernel count. What a trace holds is in test_experiment.py."""

import pytest

from blockshock_lib.engine import profile


def test_the_first_call_does_not_count_and_what_is_not_in_every_call_counts_whole():
    waited = [(30.0, 1000.0), (0.0, 12_000.0), (20.0, 2000.0)]  # in no order
    assert profile.ms_a_call(waited) == pytest.approx(1.5)
    twice = [(0, 9000.0), (1, 9000.0), (2, 1000.0), (3, 2000.0), (4, 1000.0), (5, 2000.0)]
    assert profile.ms_a_call(twice) == pytest.approx(3.0)
    assert profile.ms_a_call([(start, 3000.0) for start in range(4)]) == pytest.approx(4.0)
