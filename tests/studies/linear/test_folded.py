"""D folded: right in the order that its neighbours keep, in a chain of layers too, and nowhere else."""

import gc
import weakref
from unittest import mock

import pytest
import torch

from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.studies.linear import problem
from blockshock_lib.studies.linear.folded import orders
from tests.layers.ranks import Threads, built, draw
from tests.studies.linear.measuring import asked, measured
from tests.studies.linear.measuring import problem as on

F64 = torch.float64


def layer(mask, w, bias, world):
    return Threads(lambda group: built("folded_dense", mask, w, bias, group), world)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("mask", ["checkerboard", "uniform_1100", "uniform_1010", "uniform_1001"])
def test_product_and_gradients_are_those_of_a_dense_layer_in_the_permuted_order(mask, world):
    w, bias, x, dy = (draw(*shape, dtype=F64) for shape in ((128, 256), (128,), (12, 256), (12, 128)))
    n, k = orders(Mask.named(mask), *w.shape)
    model = layer(mask, w, bias[n], world)
    y, dx = model.passes(x[:, k], dy[:, n])
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(y, (x @ w.T + bias)[:, n], **close)
    torch.testing.assert_close(dx, (dy @ w)[:, k], **close)
    torch.testing.assert_close(model.dense(lambda one: one.weight.grad), dy.T @ x, **close)
    torch.testing.assert_close(model.layers[0].bias.grad, dy.sum(0)[n], **close)


def test_a_chain_undoes_the_orders_at_its_ends_alone():
    first, second, x = (draw(*shape, dtype=F64) for shape in ((128, 64), (64, 128), (3, 64)))
    n, k = orders(Mask.named("checkerboard"), 128, 64)
    assert torch.equal(n, orders(Mask.named("checkerboard"), 64, 128)[1]), "what one leaves the next is given"
    models = [layer("checkerboard", w, None, 2) for w in (first, second)]
    given = x[:, k]
    for model in models:
        given = model.each(lambda one, given=given: one(given).detach())[0]
    torch.testing.assert_close(given[:, k.argsort()], x @ first.T @ second.T)


def test_what_it_is_given_counts_as_no_methods_memory_and_is_freed_with_the_case():
    own = on(asked("phase3"), phase="phase3", optimizer="sgd", methods=("folded_dense",))
    own.prepare("folded_dense")
    assert own._folded is not None, "made before the peak of a method is read"
    assert torch.equal(own.folded().batch(1), own.batch(1)[:, own._folded._columns])
    gone = weakref.ref(own)
    gc.disable()
    try:
        del own
        assert gone() is None, "no circle keeps a case's tensors until the garbage is looked for"
    finally:
        gc.enable()


def checks(phase, **changes):
    rows = measured(asked(phase), methods=("permuted_dense", "folded_dense"), **changes)
    return {row["method"]: (row["status"], row["value"]) for row in rows if row["metric"] == "check"}


@pytest.mark.parametrize("phase", ["phase0", "phase1", "phase2", "phase3"])
@pytest.mark.parametrize("mask", ["checkerboard", "uniform_1010"])
def test_it_passes_the_gate_of_every_method_and_an_order_that_is_not_undone_does_not(phase, mask):
    changes = {"mask": mask, "optimizer": "sgd" if phase == "phase3" else ""}
    assert checks(phase, **changes)["folded_dense"] == ("ok", 1)
    wrong = lambda mask, *features: [torch.arange(count) for count in features]  # noqa: E731
    with mock.patch.object(problem, "orders", wrong):
        found = checks(phase, **changes)
    assert found["permuted_dense"] == ("ok", 1) != found["folded_dense"]
