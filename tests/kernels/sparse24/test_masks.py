import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import masks
from blockshock_lib.kernels.sparse24.mask import MASKS, PATTERNS, Mask

ALL = [(family, pattern) for family, patterns in PATTERNS.items() for pattern in patterns]


def spec(family, pattern=""):
    return Mask("some", family, pattern)


def made(family, pattern="", shape=(64, 192), seed=0):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return masks.make(spec(family, pattern), shape, weight=weight, seed=seed)


def proven(mask):
    """Whether it keeps two of four along the inputs, and along the outputs."""
    return [masks.first_bad_group(one) is None for one in (mask, mask.t())]


def strings(mask):
    return ["".join("01"[keep] for keep in row) for row in mask.tolist()]


@pytest.mark.parametrize(("family", "pattern"), ALL)
@pytest.mark.parametrize("seed", [0, 7])
def test_every_family_is_complementary_and_2to4_and_transposable_where_it_says_so(family, pattern, seed):
    mask = made(family, pattern, seed=seed)
    assert mask.dtype == torch.bool and mask.shape == (64, 192) and mask.is_contiguous()
    assert proven(mask) == proven(~mask) == [True, spec(family, pattern).transposable]


def test_random_masks_draw_all_choices_evenly_without_regard_to_neighbours_and_as_their_seed_says():
    groups = made("random", shape=(512, 1024)).view(512, 256, 4)
    code = (groups * torch.tensor([1, 2, 4, 8])).sum(-1)
    shares = torch.bincount(code.flatten()).double() / code.numel()
    assert (shares > 0).sum() == 6
    assert (shares[shares > 0] - 1 / 6).abs().max() < 0.006  # five standard deviations
    for same in (code[1:] == code[:-1], code[:, 1:] == code[:, :-1]):
        assert abs(same.double().mean() - 1 / 6) < 0.006
    tiles = made("transposable", "random", (512, 512)).view(128, 4, 128, 4).transpose(1, 2).reshape(-1, 16)
    assert len({tuple(tile) for tile in tiles.tolist()}) == 90
    for kind in (("random",), ("transposable", "random")):
        first, again, other = (made(*kind, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(first, again) and 0.45 < (first == other).double().mean() < 0.55


def test_a_proof_sees_a_fault_in_any_chunk_and_that_rows_alone_make_no_mask_transposable(monkeypatch):
    monkeypatch.setattr(masks, "_CHUNK", 192 * 8)
    mask = made("transposable", "checkerboard")
    assert proven(mask) == [True, True]
    for row in (0, 63):
        broken = mask.clone()
        broken[row, 0:4] = torch.tensor([True, True, True, False])
        assert proven(broken) == [False, False] and masks.first_bad_group(broken) == (row, 0, 3)
    mask[[1, 2]] = mask[[2, 1]]  # still two of four in each tile's columns
    assert proven(mask) == [True, True]
    mask[[3, 4]] = mask[[4, 3]]  # rows of neighbouring tiles
    assert proven(mask) == [True, False]


def test_magnitude_keeps_the_two_larger_and_ties_go_to_the_lower_index():
    weight = torch.tensor([[1.0, -3.0, 2.0, 0.5], [5, 5, 5, 5], [0.0, -0.0, 1, 0], [-1, 2, -2, 1]])
    mask = masks.make(spec("magnitude"), (4, 4), weight=weight)
    assert strings(mask) == ["0110", "1100", "1010", "0110"]


@pytest.mark.parametrize("weight", [None, torch.zeros(4, 8), torch.full((4, 4), torch.nan)])
def test_magnitude_needs_a_finite_weight_of_its_shape(weight):
    with pytest.raises(ValueError, match="weight"):
        masks.make(spec("magnitude"), (4, 4), weight=weight)


def test_an_unknown_mask_is_refused_with_what_is_allowed_and_a_shape_of_broken_groups():
    for unknown in (("uniform", "1110"), ("uniform", ""), ("transposable", "x"), ("y", "")):
        with pytest.raises(ValueError, match="1100"):
            masks.make(spec(*unknown), (8, 8))
    for shape in ((6, 8), (8, 6), (0, 8)):
        with pytest.raises(UnsupportedError, match="multiples of 4"):
            masks.make(spec("random"), shape)


def test_a_mask_is_periodic_where_one_tile_repeats_and_transposable_where_its_family_says_so():
    assert {name for name, mask in MASKS.items() if mask.transposable} == {"checkerboard", "transposable_random"}
    periodic = {name for name, mask in MASKS.items() if mask.periodic}
    assert periodic == {"checkerboard", "uniform_1100", "uniform_1010", "uniform_1001"}
    assert not Mask("odd", "random", "checkerboard").periodic
    assert all(name == mask.name == Mask.named(name).name for name, mask in MASKS.items())
    with pytest.raises(
        UnsupportedError, match=r"no mask is called 'checkerbord'; allowed: .*did you mean 'checkerboard'"
    ):
        Mask.named("checkerbord")
