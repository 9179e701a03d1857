import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import backends, masks
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.kernels.sparse24.pattern import Pattern

MASKS = {
    "uniform": ("uniform", "0110"),
    "random": ("random", ""),
    "checkerboard": ("transposable", "checkerboard"),
    "transposable": ("transposable", "random"),
}
TRANSPOSABLE = ["checkerboard", "transposable"]
SHAPES = [(64, 64), (64, 192), (256, 128)]


def mask_of(name, shape, term=0):
    keep = masks.make(Mask("", *MASKS[name]), shape, seed=3)
    return keep if term == 0 else ~keep


def dense_of(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("term", [0, 1])
@pytest.mark.parametrize("name", MASKS)
def test_every_move_is_what_the_mask_says(name, term, shape, dtype):
    keep, dense = mask_of(name, shape, term), dense_of(shape, dtype)
    found = Pattern.of(keep)
    values = found.gather(dense)
    assert values.is_contiguous() and torch.equal(values, dense[keep].view(shape[0], shape[1] // 2))
    back = found.scatter(values)
    assert back.dtype == dtype and torch.equal(back, torch.where(keep, dense, 0)) and not back[~keep].signbit().any()
    if found.transposable:
        turned = found.transpose_values(values)
        assert torch.equal(turned, dense.t()[keep.t()].view(shape[1], shape[0] // 2))
        assert torch.equal(found.t().transpose_values(turned), values)
    dense[~keep] = -torch.nan
    masked = found.masked(dense)
    assert torch.equal(masked, back) and not masked[~keep].signbit().any()
    assert found.masked(dense, out=dense) is dense and torch.equal(dense, back)


def test_each_of_the_90_tiles_is_known_and_turned():
    keep = masks.TILES.transpose(0, 1).reshape(4, 360)  # one row of tiles, all different
    dense = torch.arange(4.0 * 360).view(4, 360)
    found = Pattern.of(keep)
    assert found.tiles.tolist() == [list(range(90))]
    assert torch.equal(found.mask(), keep)
    assert torch.equal(found.transpose_values(found.gather(dense)), dense.t()[keep.t()].view(360, 2))


@pytest.mark.parametrize("name", MASKS)
def test_a_pattern_gives_its_mask_and_its_transpose(name):
    keep = mask_of(name, (64, 128))
    found = Pattern.of(keep)
    assert torch.equal(found.mask(), keep)
    assert found.transposable == (name in TRANSPOSABLE)
    if found.transposable:
        assert torch.equal(found.t().mask(), keep.t())
        assert Pattern.of(~keep).transposable and found.t().transposable


@pytest.mark.parametrize(
    ("name", "nbytes"), [("uniform", 2), ("random", 256 * 128 // 8), ("checkerboard", 1), ("transposable", 256 * 8)]
)
def test_a_pattern_holds_one_tile_where_it_repeats_and_a_small_number_a_tile_elsewhere(name, nbytes):
    found = Pattern.of(mask_of(name, (256, 128)))
    assert found.nbytes == nbytes == found.tiles.untyped_storage().nbytes()
    assert (found.tile is not None) == (name in ("uniform", "checkerboard"))


@pytest.mark.parametrize("name", MASKS)
def test_rows_of_a_pattern_are_the_pattern_of_the_rows(name):
    keep = mask_of(name, (128, 64))
    lower = Pattern.of(keep).rows(slice(64, None))
    assert torch.equal(lower.mask(), keep[64:])
    assert lower.tiles.untyped_storage().data_ptr() == lower.rows(slice(0, 4)).tiles.untyped_storage().data_ptr()
    for cut in (slice(2, 8), slice(0, 6), slice(0, 64, 2), slice(8, 8)):
        with pytest.raises(ValueError, match="whole 4x4 tiles"):
            lower.rows(cut)


def test_one_tile_that_cannot_be_transposed_makes_the_whole_mask_so():
    keep = mask_of("checkerboard", (64, 64))
    keep[60:, 60:] = torch.tensor([True, False, True, False])
    found = Pattern.of(keep)
    assert not found.transposable and found.tile is None and torch.equal(found.mask(), keep)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_moved_bit_for_bit_nan_and_minus_zero_too(dtype):
    keep = mask_of("transposable", (64, 64))
    bits = torch.arange(-(1 << 15), 1 << 15, 16, dtype=torch.int32).to(torch.int16).view(32, 128)
    bits = torch.cat((bits, bits.flip(0))).view(128, 64)[:64]
    bits[0, :8] = torch.tensor([0x7FFF, 0x7F81, 0x7C01, -1, -0x8000, 0x7FC1, -0x7F, 1], dtype=torch.int16)
    found = Pattern.of(keep)
    values = found.gather(bits.view(dtype))
    assert torch.equal(values.view(torch.int16), bits[keep].view(64, 32))
    assert torch.equal(found.scatter(values).view(torch.int16), torch.where(keep, bits, 0))
    assert torch.equal(found.masked(bits.view(dtype)).view(torch.int16), torch.where(keep, bits, 0))
    turned = found.transpose_values(values)
    assert torch.equal(turned.view(torch.int16), bits.t()[keep.t()].view(64, 32))


def test_a_strided_input_is_read_as_its_copy():
    keep, wide = mask_of("transposable", (64, 64)), dense_of((64, 192)).bfloat16()
    found = Pattern.of(keep)
    for dense in (wide[:, 65:129], wide[:, :64].t()):
        assert torch.equal(found.gather(dense), found.gather(dense.contiguous()))
        assert torch.equal(found.masked(dense), found.masked(dense.contiguous()))
        values = dense[:, :32]
        assert torch.equal(found.scatter(values), found.scatter(values.contiguous()))
        assert torch.equal(found.transpose_values(values), found.transpose_values(values.contiguous()))


def test_out_is_written_in_place_and_its_version_tells():
    keep, dense = mask_of("checkerboard", (64, 64)), dense_of((64, 64))
    found = Pattern.of(keep)
    packed = backends.BACKENDS["reference"].pack(dense, keep)
    weight = torch.nn.Parameter(packed.values)
    before = weight._version
    assert found.gather(2 * dense, out=weight) is weight
    assert weight._version > before and torch.equal(packed.values, 2 * dense[keep].view(64, 32))
    full = torch.full((64, 64), torch.nan)
    assert torch.equal(found.scatter(weight, out=full), torch.where(keep, 2 * dense, 0)) and full.isfinite().all()
    assert not full.requires_grad


@pytest.mark.parametrize("move", ["gather", "scatter", "masked", "transpose_values"])
def test_what_does_not_fit_is_refused(move):
    found = Pattern.of(mask_of("checkerboard", (64, 128)))
    call = getattr(found, move)
    given = torch.zeros(64, 128 if move in ("gather", "masked") else 64)
    shape = {"gather": (64, 64), "scatter": (64, 128), "masked": (64, 128), "transpose_values": (128, 32)}[move]
    with pytest.raises(ValueError, match="64x128"):
        call(torch.zeros(64, 32))
    for out in (torch.zeros(7, 7), torch.zeros(shape).double(), torch.zeros(shape[1], shape[0]).t()):
        with pytest.raises(ValueError, match="out must be contiguous"):
            call(given, out=out)


def test_what_is_no_2to4_mask_is_refused():
    with pytest.raises(ValueError, match="bool mask"):
        Pattern.of(torch.zeros(64, 64))
    with pytest.raises(UnsupportedError, match="66x64"):
        Pattern.of(torch.zeros(66, 64, dtype=torch.bool))
    keep = mask_of("random", (64, 64))
    keep[5, 8:12] = True
    with pytest.raises(ValueError, match=r"row 5, columns 8 to 11 keep 4 of 4"):
        Pattern.of(keep)
