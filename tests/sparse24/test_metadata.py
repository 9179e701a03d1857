from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from blockshock_lib.sparse24 import Pattern, masks, metadata

from . import fake_cusparselt

CPU = torch.device("cpu")
MASKS = [("uniform", "0110"), ("random", ""), ("transposable", "checkerboard"), ("transposable", "random")]
SHAPES = [(64, 64), (64, 192), (192, 64), (128, 320)]


def mask_of(mask, shape):
    return masks.make(SimpleNamespace(family=mask[0], pattern=mask[1]), shape, seed=3)


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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS, ids=" ".join)
def test_the_bytes_are_those_of_the_formula(mask, shape):
    keep = mask_of(mask, shape)
    assert torch.equal(metadata.of(Pattern.of(keep)), golden(keep))


def test_a_part_of_a_pattern_has_the_bytes_of_its_rows():
    keep = mask_of(("random", ""), (192, 128))
    assert torch.equal(metadata.of(Pattern.of(keep).rows(slice(64, 192))), golden(keep[64:]))


def test_the_bytes_do_not_depend_on_the_size_of_the_chunks(monkeypatch):
    pattern = Pattern.of(mask_of(("random", ""), (320, 64)))
    whole = metadata.of(pattern)
    monkeypatch.setattr(metadata, "_CHUNK", 2 * 64 * 64)
    assert torch.equal(metadata.of(pattern), whole)


def known_with(monkeypatch, compress):
    monkeypatch.setattr(torch, "_cslt_compress", compress)
    return metadata._known.__wrapped__(CPU)


def test_a_library_that_writes_these_bytes_is_known(monkeypatch):
    assert known_with(monkeypatch, fake_cusparselt.compress_in_its_order) == ""


def swapped(dense):
    buffer = fake_cusparselt.compress_in_its_order(dense)
    buffer.view(torch.uint8).view(-1)[-2:] = buffer.view(torch.uint8).view(-1)[-2:].flip(0)
    return buffer


@pytest.mark.parametrize("compress", [fake_cusparselt.compress, swapped, lambda dense: dense])
def test_a_library_with_another_order_is_not_taken_for_known(monkeypatch, compress):
    assert "in another order" in known_with(monkeypatch, compress)


def test_a_device_that_cannot_compress_says_so_in_a_line():
    reason = metadata._known.__wrapped__(CPU)
    assert reason.startswith("cuSPARSELt does not compress on cpu") and "\n" not in reason


def test_a_device_is_asked_again_after_a_graphs_capture_or_a_lack_of_memory(monkeypatch):
    states, short = iter([True, False, False]), torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(states))
    keep = mask_of(("random", ""), (64, 64))
    monkeypatch.setattr(metadata.masks, "make", lambda *args, **kwargs: keep)
    monkeypatch.setattr(torch, "_cslt_compress", mock.Mock(side_effect=short))
    metadata._known.cache_clear()
    device = torch.device("cuda", 0)
    assert "while a CUDA graph is captured" in metadata.known(device)
    with pytest.raises(torch.OutOfMemoryError):
        metadata.known(device)
    monkeypatch.setattr(torch, "_cslt_compress", fake_cusparselt.compress_in_its_order)
    assert metadata.known(device) == metadata.known(device) == ""
    metadata._known.cache_clear()


def test_a_device_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "_cslt_compress", lambda dense: asked.append(1) or dense)
    metadata._known.cache_clear()
    assert metadata.known(CPU) == metadata.known(CPU) != "" and len(asked) == 1
    metadata._known.cache_clear()
