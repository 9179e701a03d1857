import importlib

import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import backends, masks, pattern
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.kernels.sparse24.pattern import Pattern

MASKS = ("uniform_1010", "random", "checkerboard", "transposable_random")
TRANSPOSABLE = MASKS[2:]
SHAPES = [(64, 64), (64, 192), (256, 128)]


def mask_of(name, shape, term=0):
    keep = masks.make(Mask.named(name), shape, seed=3)
    return keep if term == 0 else ~keep


WORDS = {torch.bfloat16: torch.int16, torch.float16: torch.int16}
WORDS |= {torch.float32: torch.int32, torch.float64: torch.int64}


def dense_of(shape, dtype=torch.float32):
    """Any bits: NaN of all kinds and -0.0 too."""
    word, seed = torch.iinfo(WORDS[dtype]), torch.Generator().manual_seed(1)
    dense = torch.randint(word.min, word.max, shape, dtype=WORDS[dtype], generator=seed).view(dtype)
    dense[:2, :2] = -0.0
    return dense


def bits(tensor):
    return tensor.view(WORDS[tensor.dtype])


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("term", [0, 1])
@pytest.mark.parametrize("name", MASKS)
def test_every_move_is_what_the_mask_says_bit_for_bit(name, term, shape, dtype):
    keep, dense = mask_of(name, shape, term), dense_of(shape, dtype)
    found = Pattern.of(keep)
    assert torch.equal(found.mask(), keep) and found.transposable == (name in TRANSPOSABLE)
    assert torch.equal(found.rows(slice(32, None)).mask(), keep[32:])
    values = found.gather(dense)
    assert values.is_contiguous() and torch.equal(bits(values), bits(dense)[keep].view(shape[0], shape[1] // 2))
    back, wanted = found.scatter(values), torch.where(keep, bits(dense), 0)
    assert back.dtype == dtype and torch.equal(bits(back), wanted)
    if found.transposable:
        turned = found.transpose_values(values)
        assert torch.equal(bits(turned), bits(dense).t()[keep.t()].view(shape[1], shape[0] // 2))
        assert torch.equal(found.t().mask(), keep.t()) and found.t().transposable
        assert torch.equal(bits(found.t().transpose_values(turned)), bits(values))
    assert torch.equal(bits(found.masked(dense)), wanted)
    assert found.masked(dense, out=dense) is dense and torch.equal(bits(dense), wanted)


@pytest.mark.parametrize("dtype", WORDS)
def test_the_two_larger_of_four_are_kept_a_nan_above_all_and_the_first_of_equal_ones(dtype, monkeypatch):
    """Of any bits the larger are those that a stable sort puts last, by the kernel too; of other scores than values."""
    shape, word = (12, 520), WORDS[dtype]
    scores, dense = dense_of(shape, dtype), dense_of(shape, dtype).flip(1)
    scores[:3] = torch.randint(-2, 3, (3, 520)).to(dtype)  # many are equal
    size = (bits(scores) & torch.iinfo(word).max).unflatten(1, (-1, 4))
    best = size.sort(dim=-1, descending=True, stable=True).indices[..., :2]
    keep = torch.zeros(size.shape, dtype=torch.bool).scatter_(-1, best, True).flatten(1)
    found, masked = pattern.larger(scores, dense)
    assert torch.equal(found.mask(), keep) and torch.equal(bits(masked), torch.where(keep, bits(dense), 0))
    for odd in (scores[:8], scores[:, :516], scores.to(torch.int64)):
        with pytest.raises(ValueError, match="need"):
            pattern.larger(odd, dense)
    if dtype.itemsize == 2 and importlib.util.find_spec("triton"):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(
            pattern, "triton_for", lambda values: importlib.import_module(f"{pattern.__package__}.kernels")
        )
        ours, kept = pattern.larger(scores, dense)
        assert torch.equal(ours.tiles, found.tiles) and torch.equal(bits(kept), bits(masked))


def test_a_strided_input_is_read_as_its_copy():
    keep, wide = mask_of("transposable_random", (64, 64)), torch.randn(64, 192).bfloat16()
    found = Pattern.of(keep)
    for dense in (wide[:, 65:129], wide[:, :64].t()):
        assert torch.equal(found.gather(dense), found.gather(dense.contiguous()))
        assert torch.equal(found.masked(dense), found.masked(dense.contiguous()))
        values = dense[:, :32]
        assert torch.equal(found.scatter(values), found.scatter(values.contiguous()))
        assert torch.equal(found.transpose_values(values), found.transpose_values(values.contiguous()))


def test_out_is_written_in_place_and_its_version_tells():
    keep, dense = mask_of("checkerboard", (64, 64)), torch.randn(64, 64)
    found = Pattern.of(keep)
    packed = backends.BACKENDS["reference"].pack(dense, keep)
    weight = torch.nn.Parameter(packed.values)
    before = weight._version
    assert found.gather(2 * dense, out=weight) is weight
    assert weight._version > before and torch.equal(packed.values, 2 * dense[keep].view(64, 32))
    full = torch.full((64, 64), torch.nan)
    assert torch.equal(found.scatter(weight, out=full), torch.where(keep, 2 * dense, 0)) and full.isfinite().all()
    assert not full.requires_grad


def test_what_is_no_2to4_mask_or_cuts_its_tiles_is_refused():
    with pytest.raises(ValueError, match="bool mask"):
        Pattern.of(torch.zeros(64, 64))
    with pytest.raises(UnsupportedError, match="66x64"):
        Pattern.of(torch.zeros(66, 64, dtype=torch.bool))
    keep = mask_of("random", (64, 64))
    keep[5, 8:12] = True
    with pytest.raises(ValueError, match=r"row 5, columns 8 to 11 keep 4 of 4"):
        Pattern.of(keep)
    for cut in (slice(2, 8), slice(0, 6), slice(0, 64, 2), slice(8, 8)):
        with pytest.raises(ValueError, match="whole 4x4 tiles"):
            Pattern.of(mask_of("random", (64, 64))).rows(cut)
