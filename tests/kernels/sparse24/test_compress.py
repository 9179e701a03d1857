"""The compressor against the mask and a fake of the library. On a GPU: tests/gpu."""

from unittest import mock

import pytest
import torch

from blockshock_lib.kernels.sparse24 import compress, cslt, masks
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.kernels.sparse24.pattern import Pattern

from . import fake_cusparselt

MASKS = [("uniform", "1010"), ("random", ""), ("transposable", "checkerboard"), ("transposable", "random")]
TRANSPOSABLE = MASKS[2:]
CPU = torch.device("cpu")


def mask_of(mask, shape):
    return masks.make(Mask("", *mask), shape, seed=3)


def weight_of(shape):
    """Finite weights, none of them zero."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1]))
    return (weight + weight.sign()).bfloat16()


def same(ours, wanted):
    return ours.shape == wanted.shape and torch.equal(ours.view(torch.int16), wanted.view(torch.int16))


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(cslt, "unsupported", lambda device, dtype: "")
    monkeypatch.setattr(torch, "_cslt_compress", fake_cusparselt.compress_in_its_order)
    return lambda reason: monkeypatch.setattr(compress, "known", lambda device: reason)


def both(weight, pattern):
    """W [N, K] and W^T packed, their values in one pass."""
    packed = cslt.blank(pattern, weight.dtype), cslt.blank(pattern.t(), weight.dtype)
    compress.values_of_both(weight, pattern, *(one.values for one in packed))
    return packed


def packed_forms(weight, keep):
    pattern = Pattern.of(keep)
    return [cslt.pack(weight, keep), *(both(weight, pattern) if pattern.transposable else ())]


@pytest.mark.parametrize("mask", MASKS, ids=" ".join)
def test_a_packed_weight_is_byte_for_byte_the_librarys(library, monkeypatch, mask):
    keep, weight = mask_of(mask, (128, 192)), weight_of((128, 192))
    weight[torch.rand(weight.shape) < 0.3] = 0  # kept all the same
    library("another order")
    theirs = packed_forms(weight, keep)
    library("")
    monkeypatch.setattr(torch, "_cslt_compress", None)  # not asked
    ours = packed_forms(weight, keep)
    assert len(ours) == len(theirs) == (3 if mask in TRANSPOSABLE else 1)
    for one, other in zip(ours, theirs, strict=True):
        assert same(one.data[0], other.data[0]) and (one.shape, one.dtype) == (other.shape, other.dtype)


def golden(keep):
    """The formula as it was read off the library: nibble number i belongs to this row and group of four."""
    n, k = keep.shape
    out = [0] * (n * k // 8)
    for i in range(n * k // 4):
        r8, gh, gl, r, tile, block = i & 1, i >> 1 & 1, i >> 2 & 3, i >> 4 & 7, i >> 7 & 3, i >> 9
        rb, kb = divmod(block, k // 32)
        row, group = 64 * rb + 16 * tile + 8 * r8 + r, 8 * kb + 4 * gh + gl
        first, second = keep[row, 4 * group : 4 * group + 4].nonzero().flatten().tolist()
        out[i // 2] |= (first | second << 2) << 4 * (i % 2)
    return torch.tensor(out, dtype=torch.uint8)


@pytest.mark.parametrize("shape", [(64, 64), (64, 192), (192, 64), (128, 320)])
@pytest.mark.parametrize("mask", [("uniform", "0110"), *MASKS[1:]], ids=" ".join)
def test_the_bytes_are_those_of_the_formula(mask, shape):
    keep = mask_of(mask, shape)
    assert torch.equal(compress.metadata(Pattern.of(keep)), golden(keep))


def known_with(monkeypatch, made):
    monkeypatch.setattr(torch, "_cslt_compress", made)
    return compress._known.__wrapped__(CPU)


def swapped(dense):
    buffer = fake_cusparselt.compress_in_its_order(dense)
    buffer.view(torch.uint8).view(-1)[-2:] = buffer.view(torch.uint8).view(-1)[-2:].flip(0)
    return buffer


@pytest.mark.parametrize("made", [fake_cusparselt.compress, swapped, lambda dense: dense])
def test_a_library_with_another_order_is_not_taken_for_known(monkeypatch, made):
    assert "in another order" in known_with(monkeypatch, made)
    assert known_with(monkeypatch, fake_cusparselt.compress_in_its_order) == ""
    reason = known_with(monkeypatch, mock.Mock(side_effect=RuntimeError("no\nmore")))
    assert reason == "cuSPARSELt does not compress on cpu: no"
