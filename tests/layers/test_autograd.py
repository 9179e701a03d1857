"""The node around every layer: autocast, batches without a row, and inputs of another dtype."""

import pytest
import torch

from blockshock_lib import launch
from blockshock_lib.layers.emulated import Emulated
from tests.layers import autograd_tasks as tasks
from tests.layers.tasks import K, N
from tests.layers.test_backward import RUNNABLE, ranks
from tests.layers.test_training import CASES

COMPILED = [
    case for case in CASES if case[:2] in (("column_parallel", "checkerboard"), ("block_shock", "checkerboard"))
]
HOW = pytest.mark.parametrize("cases, backend", [(CASES, ""), (COMPILED, "aot_eager")], ids=["eager", "aot_eager"])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with launch.WorkerGroup(2, logs=tmp_path_factory.mktemp("logs")) as group:
        yield group


@HOW
def test_autocast_casts_x_and_leaves_the_layer_its_own_dtype(cases, backend, pair):
    assert pair.call(tasks.under_autocast, cases, backend, seconds=120) == [[], []]


@pytest.mark.parametrize("name", ["row_parallel", "block_shock"])
def test_under_autocast_the_gradient_of_x_has_the_dtype_of_x(name, pair):
    for seen in pair.call(tasks.kept_dtypes, name, seconds=60):
        assert len(seen) == 8
        for (_, dtype), dtypes in seen.items():
            assert dtypes == (torch.bfloat16, dtype, torch.bfloat16)


@HOW
def test_an_empty_batch_gives_what_nn_linear_gives(cases, backend, pair):
    assert pair.call(tasks.empty_batches, cases, backend, seconds=120) == [[], []]


@pytest.mark.parametrize("name", RUNNABLE)
def test_an_empty_batch_reaches_no_product_and_no_collective(name):
    w, bias = torch.randn(N, K), torch.randn(N)
    model = Emulated(ranks(name, w, bias, "checkerboard", 2))

    def fails(*_):
        raise AssertionError("a piece of the layer was called")

    for layer in model.layers:
        layer.local = layer.local_dx = layer.local_dw = layer.combine = layer.combine_dx = fails
    x = torch.empty(2, 0, K, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == (2, 0, N) and x.grad.shape == x.shape
    assert all(p.grad.shape == p.shape and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", RUNNABLE)
def test_x_of_another_dtype_is_refused_outside_autocast_and_both_are_named(name):
    layer = ranks(name, torch.randn(N, K).bfloat16(), None, "checkerboard", 1 if name == "dense" else 2)[0]
    with pytest.raises(ValueError, match=r"x is torch\.float32, the layer torch\.bfloat16"):
        layer(torch.randn(3, K))
    with torch.autocast("cpu"), pytest.raises(ValueError, match=r"x is torch\.int64"):
        layer(torch.ones(3, K, dtype=torch.int64))
