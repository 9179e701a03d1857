from types import SimpleNamespace

import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.sparse24 import masks

UNIFORM = ("1100", "0011", "1010", "0101", "1001", "0110")
ALL = [
    *(("uniform", pattern) for pattern in UNIFORM),
    ("random", ""),
    ("transposable", "checkerboard"),
    ("transposable", "random"),
    ("magnitude", ""),
]


def spec(family, pattern=""):
    return SimpleNamespace(family=family, pattern=pattern)


def made(family, pattern="", shape=(64, 192), seed=0):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return masks.make(spec(family, pattern), shape, weight=weight, seed=seed)


def strings(mask):
    return ["".join("01"[keep] for keep in row) for row in mask.tolist()]


@pytest.mark.parametrize(("family", "pattern"), ALL)
@pytest.mark.parametrize("seed", [0, 7])
def test_every_family_is_complementary_and_2to4_and_transposable_where_it_says_so(family, pattern, seed):
    mask = made(family, pattern, seed=seed)
    assert mask.dtype == torch.bool and mask.shape == (64, 192) and mask.is_contiguous()
    proof = masks.require(mask, ~mask, columns=family == "transposable")
    assert proof == (True, True, family == "transposable")


def test_a_uniform_mask_repeats_its_pattern_in_every_row():
    assert set(strings(made("uniform", "1001", (4, 8)))) == {"10011001"}


def test_the_checkerboard_is_one_of_2x2_blocks():
    assert strings(made("transposable", "checkerboard", (8, 8))) == ["11001100", "11001100", "00110011", "00110011"] * 2


def test_there_are_90_tiles_closed_under_complement_and_transposition():
    def keys(tiles):
        return {tuple(tile.flatten().tolist()) for tile in tiles}

    assert len(keys(masks.TILES)) == len(masks.TILES) == 90
    assert keys(~masks.TILES) == keys(masks.TILES.transpose(1, 2)) == keys(masks.TILES)


def test_random_masks_draw_all_choices_evenly_and_without_regard_to_neighbours():
    groups = made("random", shape=(512, 1024)).view(512, 256, 4)
    code = (groups * torch.tensor([1, 2, 4, 8])).sum(-1)
    shares = torch.bincount(code.flatten()).double() / code.numel()
    assert (shares > 0).sum() == 6
    assert (shares[shares > 0] - 1 / 6).abs().max() < 0.006  # five standard deviations
    for same in (code[1:] == code[:-1], code[:, 1:] == code[:, :-1]):
        assert abs(same.double().mean() - 1 / 6) < 0.006
    tiles = made("transposable", "random", (512, 512)).view(128, 4, 128, 4).transpose(1, 2).reshape(-1, 16)
    assert len({tuple(tile) for tile in tiles.tolist()}) == 90


def test_a_seed_fixes_a_random_mask_and_another_seed_changes_it():
    first, again, other = (made("random", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert 0.4 < (first == other).double().mean() < 0.6


@pytest.mark.parametrize(("family", "pattern"), [("random", ""), ("transposable", "random"), ("magnitude", "")])
def test_a_mask_does_not_depend_on_the_size_of_the_chunks(family, pattern, monkeypatch):
    whole = made(family, pattern)
    monkeypatch.setattr(masks, "_CHUNK", 192 * 8)
    assert torch.equal(made(family, pattern), whole)


def test_a_proof_sees_a_fault_in_any_chunk(monkeypatch):
    monkeypatch.setattr(masks, "_CHUNK", 192 * 8)
    mask = made("transposable", "checkerboard")
    assert masks.prove(mask) == (True, True, True)
    for row in (0, 63):
        other = ~mask
        other[row, 0:4] = mask[row, 0:4]
        assert masks.prove(mask, other) == (False, True, False)
        broken = mask.clone()
        broken[row, 0:4] = True
        assert masks.prove(broken) == (True, False, False)
        assert masks.first_bad_group(broken) == (row, 0, 4)


def test_magnitude_keeps_the_two_larger_and_ties_go_to_the_lower_index():
    weight = torch.tensor([[1.0, -3.0, 2.0, 0.5], [5, 5, 5, 5], [0.0, -0.0, 1, 0], [-1, 2, -2, 1]])
    mask = masks.make(spec("magnitude"), (4, 4), weight=weight)
    assert strings(mask) == ["0110", "1100", "1010", "0110"]


def test_magnitude_needs_a_finite_weight_of_its_shape():
    for weight in (None, torch.zeros(4, 8), torch.full((4, 4), torch.nan)):
        with pytest.raises(ValueError, match="weight"):
            masks.make(spec("magnitude"), (4, 4), weight=weight)


@pytest.mark.parametrize(
    ("family", "pattern", "classes"),
    [
        ("uniform", "1010", [((0, 1, 2, 3), (0, 2))]),
        ("transposable", "checkerboard", [((0, 1), (0, 1)), ((2, 3), (2, 3))]),
    ],
)
def test_periodic_classes_rebuild_both_terms(family, pattern, classes):
    assert masks.periodic_classes(spec(family, pattern)) == classes
    mask = made(family, pattern, (8, 16))
    for term, expected in enumerate((mask, ~mask)):
        built = torch.zeros_like(mask)
        for rows, columns in masks.periodic_classes(spec(family, pattern), term):
            for row in rows:
                for column in columns:
                    built[row::4, column::4] = True
        assert torch.equal(built, expected)


@pytest.mark.parametrize(("family", "pattern"), [("random", ""), ("transposable", "random"), ("magnitude", "")])
def test_masks_that_are_not_periodic_have_no_classes(family, pattern):
    with pytest.raises(UnsupportedError, match="not periodic"):
        masks.periodic_classes(spec(family, pattern))


@pytest.mark.parametrize(
    ("family", "pattern"), [("uniform", "1110"), ("uniform", ""), ("transposable", "x"), ("y", "")]
)
def test_an_unknown_mask_is_refused_with_what_is_allowed(family, pattern):
    with pytest.raises(ValueError, match="1100"):
        masks.make(spec(family, pattern), (8, 8))


@pytest.mark.parametrize("shape", [(6, 8), (8, 6), (0, 8)])
def test_a_shape_of_broken_groups_is_refused(shape):
    with pytest.raises(UnsupportedError, match="multiples of 4"):
        masks.make(spec("random"), shape)


def test_a_mask_that_keeps_three_of_four_is_caught_and_located():
    mask = made("random", seed=3)
    hole = int((~mask[40, 100:104]).nonzero()[0])
    mask[40, 100 + hole] = True
    assert masks.prove(mask) == (True, False, False)
    assert masks.first_bad_group(mask) == (40, 100, 3)
    with pytest.raises(ValueError, match="input dimension"):
        masks.require(mask)


def test_a_swapped_group_between_the_terms_is_caught():
    mask = made("uniform", "1100")
    second = ~mask
    second[5, 8:12] = mask[5, 8:12]
    assert masks.prove(mask, second) == (False, True, False)
    with pytest.raises(ValueError, match="complementary"):
        masks.require(mask, second)


def test_rows_alone_do_not_make_a_mask_transposable():
    mask = made("transposable", "checkerboard")
    mask[[1, 2]] = mask[[2, 1]]  # still two of four in each tile's columns
    assert masks.prove(mask) == (True, True, True)
    mask[[3, 4]] = mask[[4, 3]]  # rows of neighbouring tiles
    assert masks.prove(mask) == (True, True, False)
    with pytest.raises(ValueError, match="output dimension"):
        masks.require(mask, columns=True)


def test_a_proof_is_refused_for_what_is_no_pair_of_masks():
    for first, second in ((torch.ones(4, 4), None), (made("random"), made("random", shape=(4, 8)))):
        with pytest.raises(ValueError, match="bool masks"):
            masks.prove(first, second)
