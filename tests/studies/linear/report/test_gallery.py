"""The notebook's pictures and proofs are of the masks that the layers use."""

import pytest

from blockshock_lib.kernels.sparse24 import masks, packing
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.studies.linear.report import gallery
from tests.cases import MASKS

FAMILIES = [Mask.named(name) for name in MASKS]


def test_every_family_proves_itself_and_only_transposable_ones_are_2_to_4_both_ways():
    table = gallery.proofs(FAMILIES)
    assert (table[["complementary", "sum exact", "2:4 along inputs"]] == "yes").all(axis=None)
    assert list(table.index[table["2:4 along outputs"] == "yes"]) == ["checkerboard", "transposable_random"]
    assert (table["packed / dense"] == 9 / 16).all()


unpack = packing.unpack
FAULTS = {
    "the two groups of a byte change places": lambda values, found: unpack(values, (found >> 4) | (found << 4)),
    "a weight is lost": lambda values, found: unpack(values.masked_fill(values == values[3, 5], 0), found),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_term_that_does_not_come_back_whole_breaks_the_proof(monkeypatch, fault):
    monkeypatch.setattr(packing, "unpack", FAULTS[fault])
    with pytest.raises(ValueError, match="mask random breaks its promise"):
        gallery.proofs([Mask.named("random")])


def test_a_family_that_promises_2_to_4_both_ways_must_keep_it(monkeypatch):
    right = masks.make
    monkeypatch.setattr(masks, "make", lambda mask, *a, **k: right(Mask.named("random"), *a, **k))
    with pytest.raises(ValueError, match="mask checkerboard breaks its promise"):
        gallery.proofs([Mask.named("checkerboard")])
