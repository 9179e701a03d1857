"""The compressor against the mask, a fake of the library and, by Triton's interpreter, itself. On a GPU: tests/gpu."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from blockshock_lib import sparse24
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.sparse24 import Pattern, compress, cslt, masks, metadata

from . import fake_cusparselt

MASKS = [("uniform", "1010"), ("random", ""), ("transposable", "checkerboard"), ("transposable", "random")]
TRANSPOSABLE = MASKS[2:]
DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(64, 64), (64, 192), (320, 128)]


def mask_of(mask, shape, term=0):
    keep = masks.make(SimpleNamespace(family=mask[0], pattern=mask[1]), shape, seed=3)
    return keep if term == 0 else ~keep


def any_bits(shape, dtype):
    """All bit patterns, NaN's too."""
    generator = torch.Generator().manual_seed(shape[0] + shape[1])
    return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=generator).view(dtype)


def weight_of(shape, dtype=torch.bfloat16, levels=0):
    """Finite weights, none of them zero; with `levels`, of so many sizes only, zeros and -0.0 among them: ties."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1]))
    return ((weight * levels).round() if levels else weight + weight.sign()).to(dtype)


def same(ours, wanted):
    return ours.shape == wanted.shape and torch.equal(ours.view(torch.int16), wanted.view(torch.int16))


def wanted_of(weight, keep):
    """The buffer of a weight under a mask, put together from its two parts."""
    bits = weight.view(torch.int16)
    parts = bits[keep], metadata.of(Pattern.of(keep)).view(torch.int16)
    return torch.cat(parts).view(weight.shape[0], -1).view(weight.dtype)


def selected(weight):
    return masks.make(SimpleNamespace(family="magnitude", pattern=""), tuple(weight.shape), weight=weight)


# The torch version


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", TRANSPOSABLE, ids=" ".join)
def test_both_buffers_are_those_of_the_library(mask, shape, dtype):
    keep, weight = mask_of(mask, shape, term=1), weight_of(shape, dtype)
    kept = torch.where(keep, weight, 0)
    ours = compress.both(weight, Pattern.of(keep))
    theirs = map(fake_cusparselt.compress_in_its_order, (kept, kept.t().contiguous()))
    assert all(map(same, ours, theirs))


def test_a_kept_zero_stays_kept_in_both():
    keep = mask_of(TRANSPOSABLE[1], (64, 128))
    forward, turned = compress.both(torch.zeros(64, 128).bfloat16(), Pattern.of(keep))
    assert same(forward, wanted_of(torch.zeros(64, 128).bfloat16(), keep))
    assert same(turned, wanted_of(torch.zeros(128, 64).bfloat16(), keep.t().contiguous()))


@pytest.mark.parametrize("mask", MASKS, ids=" ".join)
def test_a_blank_that_is_given_its_values_is_the_compressed_weight(mask):
    keep, weight = mask_of(mask, (128, 192)), weight_of((128, 192))
    blank = compress.blank(Pattern.of(keep), weight.dtype)
    blank.view(-1)[: weight.numel() // 2] = weight[keep]
    assert same(blank, wanted_of(weight, keep))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_the_values_of_both_are_those_of_the_mask_and_tell_who_watches_them(dtype):
    keep, weight = mask_of(TRANSPOSABLE[1], (64, 128)), torch.randn(64, 128).to(dtype)
    values, turned = torch.empty(64, 64, dtype=dtype), torch.empty(128, 32, dtype=dtype)
    before = values._version, turned._version
    compress.values_of_both(weight, Pattern.of(keep), values, turned)
    assert torch.equal(values, weight[keep].view(64, 64)) and torch.equal(turned, weight.t()[keep.t()].view(128, 32))
    assert values._version > before[0] and turned._version > before[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("levels", [0, 2])
def test_a_magnitude_is_compressed_as_under_its_mask(levels, dtype):
    weight = weight_of((64, 192), dtype, levels)
    assert same(compress.magnitude(weight), wanted_of(weight, selected(weight)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_magnitude_of_a_weight_that_is_not_finite_is_refused(value):
    weight = weight_of((64, 64))
    weight[5, 7] = value
    with pytest.raises(ValueError, match="needs finite weights"):
        compress.magnitude(weight)


def test_what_does_not_fit_is_refused():
    pattern, weight = Pattern.of(mask_of(TRANSPOSABLE[0], (64, 128))), weight_of((64, 128))
    with pytest.raises(ValueError, match=r"needs \[64, 128\]"):
        compress.both(weight.t(), pattern)
    for call in (
        lambda: compress.both(weight.float(), pattern),
        lambda: compress.blank(pattern, torch.float32),
        lambda: compress.magnitude(weight.double()),
    ):
        with pytest.raises(ValueError, match="bf16 or fp16"):
            call()
    small = Pattern.of(mask_of(TRANSPOSABLE[0], (32, 64)))
    for call in (
        lambda: compress.both(weight_of((32, 64)), small),
        lambda: compress.blank(small, torch.bfloat16),
        lambda: compress.magnitude(weight_of((64, 96))),
    ):
        with pytest.raises(UnsupportedError, match="multiples of 64"):
            call()
    with pytest.raises(ValueError, match="two dimensions"):
        compress.magnitude(weight.view(-1))
    with pytest.raises(UnsupportedError, match="output dimension"):
        compress.both(weight, Pattern.of(mask_of(MASKS[0], (64, 128))))
    with pytest.raises(ValueError, match="out must be contiguous"):
        compress.values_of_both(weight, pattern, weight[:, :64], weight.new_empty(128, 32))


# cslt: with the library's order known and not


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(cslt, "unsupported", lambda device, dtype: "")
    monkeypatch.setattr(torch, "_cslt_compress", fake_cusparselt.compress_in_its_order)
    return lambda reason: monkeypatch.setattr(metadata, "known", lambda device: reason)


def packed_forms(weight, keep):
    pattern = Pattern.of(keep)
    both = cslt.pack_both(weight, pattern) if pattern.transposable else ()
    return [cslt.pack(weight, keep), *both]


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


@pytest.mark.parametrize("reason", ["", "another order"])
@pytest.mark.parametrize("shape", [(64, 96), (96, 64)])
def test_dimensions_that_are_no_multiples_of_64_are_refused_whether_the_order_is_known_or_not(
    library, monkeypatch, reason, shape
):
    library(reason)
    monkeypatch.setattr(torch, "_cslt_compress", lambda dense: dense.new_empty(shape[0], shape[1] * 9 // 16))
    weight, pattern = weight_of(shape), Pattern.of(mask_of(TRANSPOSABLE[0], shape))
    for make in (lambda: cslt.blank(pattern, weight.dtype), lambda: cslt.pack_both(weight, pattern)):
        with pytest.raises(UnsupportedError, match="multiples of 64"):
            make()


# The kernels, interpreted


@pytest.fixture(scope="module")
def kernels():
    """A copy of the module whose kernels are interpreted: Triton decides that where a kernel is defined."""
    pytest.importorskip("triton", reason="Triton comes with PyTorch's CUDA builds only")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        loaded = []
        for name in ("kernels", "compress_kernels"):
            path = Path(sparse24.__file__).parent / f"{name}.py"
            spec = importlib.util.spec_from_file_location(f"interpreted_{name}", path)
            loaded.append(importlib.util.module_from_spec(spec))
            patch.setitem(sys.modules, f"blockshock_lib.sparse24.{name}", loaded[-1])
            spec.loader.exec_module(loaded[-1])
        yield loaded[-1]


GUARD = 1 << 15
"""Values behind a buffer that a kernel must leave alone."""


def room(n, k, dtype=torch.bfloat16):
    """A buffer of sevens, and the guard behind it."""
    flat = torch.full((n * k * 9 // 16 + GUARD,), 7, dtype=dtype)
    return flat[:-GUARD].view(n, k * 9 // 16), flat[-GUARD:]


def kernel_both(kernels, weight, keep, with_metadata=True):
    """The two buffers as the kernel writes them; all sevens where it does not."""
    pattern = Pattern.of(keep)
    (forward, guard), (turned, guard_t) = (room(*shape, weight.dtype) for shape in (pattern.shape, pattern.shape[::-1]))
    (values, bytes_), (values_t, bytes_t) = map(compress._parts, (forward, turned))
    kernels.compress(pattern, weight, values, values_t, *((bytes_, bytes_t) if with_metadata else ()))
    assert bool((guard == 7).all()) and bool((guard_t == 7).all()), "written beyond the end"
    return forward, turned


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", TRANSPOSABLE, ids=" ".join)
def test_the_kernel_writes_both_bit_for_bit(kernels, mask, shape):
    for term, dtype in enumerate(DTYPES):
        keep, weight = mask_of(mask, shape, term), any_bits(shape, dtype)
        assert all(map(same, kernel_both(kernels, weight, keep), compress.both(weight, Pattern.of(keep))))


@pytest.mark.parametrize("number", [0, 23, 42, 61, 89])
def test_a_repeated_tile_is_a_constant_of_the_kernel(kernels, number):
    keep = masks.TILES[number].repeat(16, 32)
    weight = any_bits(keep.shape, torch.bfloat16)
    assert all(map(same, kernel_both(kernels, weight, keep), compress.both(weight, Pattern.of(keep))))


def test_without_metadata_the_kernel_leaves_them_alone(kernels):
    keep, weight = mask_of(TRANSPOSABLE[1], (64, 128)), any_bits((64, 128), torch.bfloat16)
    for ours, wanted in zip(
        kernel_both(kernels, weight, keep, with_metadata=False), compress.both(weight, Pattern.of(keep)), strict=True
    ):
        values, behind = ours.view(-1).split([weight.numel() // 2, weight.numel() // 16])
        assert same(values, wanted.view(-1)[: weight.numel() // 2]) and bool((behind == 7).all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS, ids=" ".join)
def test_the_kernel_writes_the_metadata_of_a_mask(kernels, mask, shape):
    pattern = Pattern.of(mask_of(mask, shape, term=1))
    buffer, guard = room(*shape)
    out = compress._parts(buffer)[1]
    kernels.metadata(pattern, out)
    assert torch.equal(out, metadata.of(pattern)) and bool((guard == 7).all())


def kernel_magnitude(kernels, weight):
    buffer, guard = room(*weight.shape, weight.dtype)
    bad = torch.zeros(1, dtype=torch.int32)
    kernels.magnitude(weight, *compress._parts(buffer), bad, compress.NOT_FINITE[weight.dtype])
    assert bool((guard == 7).all()), "written beyond the end"
    return buffer, bool(bad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("levels", [0, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_selects_as_the_mask_does_ties_and_zeros_too(kernels, shape, levels, dtype):
    weight = weight_of(shape, dtype, levels)
    assert levels == 0 or bool((weight.signbit() & (weight == 0)).any())
    buffer, bad = kernel_magnitude(kernels, weight)
    assert same(buffer, wanted_of(weight, selected(weight))) and not bad


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_sees_one_weight_that_is_not_finite_and_takes_the_largest_number_for_finite(kernels, dtype):
    weight = weight_of((128, 192), dtype)
    weight[64, 64] = -torch.finfo(dtype).max
    assert not kernel_magnitude(kernels, weight)[1]
    for value, row, column in ((torch.nan, 3, 5), (torch.inf, 127, 191), (-torch.inf, 0, 0)):
        wrong = weight.clone()
        wrong[row, column] = value
        assert kernel_magnitude(kernels, wrong)[1]


def test_blocks_of_other_sizes_give_the_same(kernels, monkeypatch):
    keep, weight = mask_of(TRANSPOSABLE[1], (192, 320)), weight_of((192, 320))
    wanted = [*compress.both(weight, Pattern.of(keep)), compress.magnitude(weight)]
    for rows, cols in ((16, 16), (32, 64), (16, 128)):
        block = kernels.Block(rows, cols, 4)
        monkeypatch.setattr(kernels, "BLOCKS", dict.fromkeys(kernels.BLOCKS, block))
        ours = [*kernel_both(kernels, weight, keep), kernel_magnitude(kernels, weight)[0]]
        assert all(map(same, ours, wanted))


def test_a_weight_is_copied_whose_rows_lie_apart(kernels):
    keep, wide = mask_of(TRANSPOSABLE[1], (64, 128)), any_bits((64, 257), torch.bfloat16)
    weight = wide[:, 1:129]
    assert all(map(same, kernel_both(kernels, weight, keep), compress.both(weight.contiguous(), Pattern.of(keep))))


def test_on_a_gpu_all_go_through_the_kernels_and_who_watches_the_values_is_told(kernels, monkeypatch):
    keep, weight = mask_of(TRANSPOSABLE[1], (64, 128)), weight_of((64, 128))
    pattern = Pattern.of(keep)
    wanted = [*compress.both(weight, pattern), compress.magnitude(weight), metadata.of(pattern)]
    plain = pattern.gather(weight), pattern.transpose_values(pattern.gather(weight))
    used = []

    def used_kernels():
        used.append(1)
        return kernels

    monkeypatch.setattr(compress, "has_kernel", lambda tensor: True)
    monkeypatch.setattr(compress, "_kernels", used_kernels)
    blank = compress.blank(pattern, weight.dtype)
    ours = [*compress.both(weight, pattern), compress.magnitude(weight), compress._parts(blank)[1]]
    assert all(map(torch.equal, ours, wanted)) and len(used) == 3
    values = weight.new_empty(64, 64), weight.new_empty(128, 32)
    before = [v._version for v in values]
    compress.values_of_both(weight, pattern, *values)
    assert all(map(torch.equal, values, plain)) and all(v._version > b for v, b in zip(values, before, strict=True))
    weight[3, 3] = torch.nan
    with pytest.raises(ValueError, match="needs finite weights"):
        compress.magnitude(weight)
    with pytest.raises(UnsupportedError, match="output dimension"):
        compress.values_of_both(weight, Pattern.of(mask_of(MASKS[1], (64, 128))), *values)
    with pytest.raises(ValueError, match="out must be contiguous"):
        compress.values_of_both(weight, pattern, values[0], values[0])
