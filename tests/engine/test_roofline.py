"""Ceilings are measured, and the least time of a piece follows from them."""

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.engine.roofline import Ceilings, compute, link, measure
from blockshock_lib.engine.timing import Timer
from blockshock_lib.studies.linear.methods.method import Cost

CEILINGS = Ceilings(copy_bandwidth=4300, gemm_rate=989, allreduce_bandwidth=302)


def test_a_piece_takes_the_longer_of_its_arithmetic_and_its_bytes():
    assert compute(Cost(989e9, 0, 0, 0, 0, 0), CEILINGS) == pytest.approx(1)
    assert compute(Cost(989e9, 4300e6, 4300e6, 0, 0, 0), CEILINGS) == pytest.approx(2)


def test_without_a_measured_link_nothing_is_said_of_what_is_sent():
    sent = Cost(0, 0, 0, 302e6, 0, 0)
    assert link(sent, CEILINGS) == pytest.approx(1) and link(sent, CEILINGS._replace(allreduce_bandwidth=0)) == 0
    assert link(sent._replace(sent=0), CEILINGS) == 0


def test_ceilings_are_measured_on_a_cpu_too():
    found = measure(Timer(torch.device("cpu"), Group()), torch.float32, repeats=1)
    assert found.copy_bandwidth > 0 and found.gemm_rate > 0 and found.allreduce_bandwidth == 0
