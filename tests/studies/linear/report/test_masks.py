"""The notebook's pictures and proofs are of the masks that the layers use."""

import pytest
import torch

from blockshock_lib.kernels.sparse24 import masks, packing
from blockshock_lib.kernels.sparse24.mask import MASKS
from blockshock_lib.studies.linear.report import masks as drawn
from tests import cases
from tests.report.frames import title, words


def test_every_family_proves_itself_and_only_transposable_ones_are_2_to_4_both_ways_and_must_say_so(monkeypatch):
    table = drawn.proofs([MASKS[name] for name in cases.MASKS])
    assert (table[["complementary", "sum exact", "2:4 along inputs"]] == "yes").all(axis=None)
    assert list(table.index[table["2:4 along outputs"] == "yes"]) == ["checkerboard", "transposable_random"]
    assert (table["packed / dense"] == 9 / 16).all()
    monkeypatch.setattr(masks, "make", lambda mask, *a, **k: right(MASKS["checkerboard"], *a, **k))
    with pytest.raises(ValueError, match="mask random is 2:4 along the outputs too: name its family"):
        drawn.proofs([MASKS["random"]])


unpack, right = packing.unpack, masks.make
# What goes wrong -> in which function, how, and of which mask.
FAULTS = {
    "groups of a byte change places": (packing, "unpack", lambda v, m: unpack(v, (m >> 4) | (m << 4)), "random"),
    "2:4 along the inputs alone": (masks, "make", lambda _, *a, **k: right(MASKS["random"], *a, **k), "checkerboard"),
    "a weight is lost": (packing, "unpack", lambda v, m: unpack(v.masked_fill(v == v[3, 5], 0), m), "random"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_term_that_is_not_as_its_family_promises_or_does_not_come_back_whole_breaks_the_proof(monkeypatch, fault):
    *what, mask = FAULTS[fault]
    monkeypatch.setattr(*what)
    with pytest.raises(ValueError, match=f"mask {mask} breaks its promise"):
        drawn.proofs([MASKS[mask]])


CHECKER = torch.eye(2, dtype=torch.bool).repeat_interleave(2, 0).repeat_interleave(2, 1).repeat(4, 4)
STRIPES = torch.tensor([True, True, False, False]).repeat(8, 4)
BROKEN = CHECKER.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(False))


@pytest.mark.parametrize(
    "corners, title",
    [
        ({"stripes": STRIPES}, "stripes is 2:4 along the inputs only"),
        ({"one": CHECKER, "other": STRIPES}, "All 2 masks are 2:4 along the inputs, 1 of them along the outputs too"),
        ({"one": BROKEN, "other": STRIPES}, "1 of 2 masks are 2:4 along the inputs, 0 of them"),
    ],
)
def test_the_title_says_what_the_pixels_are(corners, title):
    assert title in words(drawn.masks_figure(corners))


def test_the_split_is_drawn_as_a_sum_only_where_it_is_one():
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    lost = STRIPES.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(False))
    whole, half = (drawn.split_figure(weight, weight * kept, weight * ~STRIPES) for kept in (STRIPES, lost))
    assert title(whole) == "W = W(0) + W(1)" and "W(0) holds 50% of the weights" in whole.alt
    assert title(half) == "W ≠ W(0) + W(1)"
