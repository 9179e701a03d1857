"""dX's collective runs beside dW, or before it. That the gradients are right both ways: test_training.py, on ranks."""

import pytest
import torch

from blockshock_lib.comm import Group, Pending
from blockshock_lib.layers import BlockShockLinear, RowParallelLinear
from blockshock_lib.layers.emulated import Emulated
from blockshock_lib.params import Mask

OVERLAPPED, IN_TURN = ["dX starts", "dW", "dX arrives"], ["dX starts", "dX arrives", "dW"]


@pytest.fixture(params=[RowParallelLinear, BlockShockLinear])
def layer(request):
    torch.manual_seed(0)
    weight, mask = torch.randn(128, 64).double(), Mask.named("checkerboard")
    return Emulated([request.param(weight, mask=mask, group=Group(rank, 2)) for rank in range(2)])


@pytest.fixture
def seen(layer, monkeypatch):
    """The layer's steps as they happen."""
    events = []

    class Work:
        def wait(self):
            events.append("dX arrives")

    start_dx, local_dw = layer.start_dx, layer.local_dw

    def start(partials):
        events.append("dX starts")
        return Pending(start_dx(partials).wait(), Work())

    def dw(*args):
        events.append("dW")
        return local_dw(*args)

    monkeypatch.setattr(layer, "start_dx", start)
    monkeypatch.setattr(layer, "local_dw", dw)
    return events


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("asked, order", [(True, OVERLAPPED), (False, IN_TURN)])
def test_the_order_asked_for_goes_before_the_layers_own(layer, seen, own, asked, order):
    layer.overlap = own
    with torch.no_grad():
        layer.backward(torch.ones(8, 128).double(), torch.ones(8, 64).double(), overlap=asked)
    assert seen == order


@pytest.mark.parametrize("own, order", [(True, OVERLAPPED), (False, IN_TURN)])
def test_a_users_backward_follows_the_layers_order(layer, seen, own, order):
    assert layer.overlap
    layer.overlap = own
    layer(torch.ones(8, 64).double().requires_grad_()).sum().backward()
    assert seen == order
