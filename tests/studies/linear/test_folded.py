"""D folded: right in a chain of layers whose order its neighbours keep, and nowhere else; alone: layers/test_layers."""

import gc
import weakref
from functools import partial
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


def test_a_chain_undoes_the_orders_at_its_ends_alone():
    first, second, x = (draw(*shape, dtype=F64) for shape in ((128, 64), (64, 128), (3, 64)))
    n, k = orders(Mask.named("checkerboard"), 128, 64)
    assert torch.equal(n, orders(Mask.named("checkerboard"), 64, 128)[1]), "what one leaves the next is given"
    models = [Threads(partial(built, "folded_dense", "checkerboard", w, None)) for w in (first, second)]
    given = x[:, k]
    for model in models:
        given = model.each(lambda one, given=given: one(given).detach())[0]
    torch.testing.assert_close(given[:, k.argsort()], x @ first.T @ second.T)


def test_what_it_is_given_counts_as_no_methods_memory_and_is_freed_with_the_case():
    own = on(asked("phase3"), phase="phase3", optimizer="sgd", methods=("folded_dense",))
    own.prepare("folded_dense")
    assert "folded" in vars(own), "made before the peak of a method is read"
    assert torch.equal(own.folded.batch(1), own.batch(1)[:, own.folded._columns])
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
