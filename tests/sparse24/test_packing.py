from types import SimpleNamespace

import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.sparse24 import masks, packing


def problem(shape=(64, 128), dtype=torch.bfloat16, seed=0):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return weight, masks.make(SimpleNamespace(family="random", pattern=""), shape, seed=seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 64), (128, 192), (192, 64)])
def test_unpack_gives_back_the_kept_weights_bit_by_bit(shape, dtype):
    weight, mask = problem(shape, dtype)
    values, metadata = packing.pack(weight, mask)
    assert values.dtype == dtype and values.is_contiguous() and metadata.dtype == torch.uint8
    assert torch.equal(values, weight[mask].view(shape[0], shape[1] // 2))
    assert torch.equal(packing.unpack(values, metadata), torch.where(mask, weight, 0))


def test_metadata_is_two_indices_a_group_and_two_groups_a_byte():
    patterns = {"1100": 0b0100, "1010": 0b1000, "1001": 0b1100, "0110": 0b1001, "0101": 0b1101, "0011": 0b1110}
    for low in patterns:
        for high in patterns:
            row = torch.tensor([bit == "1" for bit in low + high]).repeat(64, 8)
            _, metadata = packing.pack(torch.randn(64, 64), row)
            assert metadata.unique().tolist() == [patterns[low] | patterns[high] << 4]


def test_packed_bytes_are_nine_sixteenths_of_dense_bf16():
    weight, mask = problem((128, 256))
    values, metadata = packing.pack(weight, mask)
    assert values.nbytes + metadata.nbytes == weight.nbytes * 9 // 16


def test_the_two_terms_add_up_to_the_weight():
    weight, mask = problem()
    assert torch.equal(
        packing.unpack(*packing.pack(weight, mask)) + packing.unpack(*packing.pack(weight, ~mask)), weight
    )


def test_holes_are_plus_zero_even_where_the_weight_was_negative():
    weight, mask = problem()
    weight = -weight.abs()
    assert (weight * mask).signbit()[~mask].all()  # the fault that multiplying by the mask would plant
    assert not packing.unpack(*packing.pack(weight * mask, mask)).signbit()[~mask].any()


def test_kept_zeros_keep_their_sign_and_place():
    weight, mask = torch.full((64, 64), -0.0), problem((64, 64))[1]
    assert torch.equal(packing.unpack(*packing.pack(weight, mask)).signbit(), mask)


def test_the_result_does_not_depend_on_the_size_of_the_chunks(monkeypatch):
    weight, mask = problem((192, 128))
    whole = packing.pack(weight, mask)
    monkeypatch.setattr(packing, "_CHUNK", 128 * 7)
    assert all(map(torch.equal, packing.pack(weight, mask), whole))
    assert torch.equal(packing.unpack(*whole), torch.where(mask, weight, 0))


def test_a_transposed_view_of_a_weight_packs_like_its_copy():
    weight, _ = problem((128, 64))
    mask = masks.make(SimpleNamespace(family="random", pattern=""), (64, 128))
    assert all(map(torch.equal, packing.pack(weight.t(), mask), packing.pack(weight.t().contiguous(), mask)))


def test_a_packed_copy_does_not_follow_the_weight():
    weight, mask = problem()
    values, _ = packing.pack(weight, mask)
    before = values.clone()
    weight.add_(1)
    assert torch.equal(values, before)


@pytest.mark.parametrize("fault", ["swapped groups", "shifted", "transposed word"])
def test_damaged_metadata_gives_another_weight(fault):
    weight, mask = problem((64, 64))
    values, metadata = packing.pack(weight, mask)
    damaged = {
        "swapped groups": metadata >> 4 | metadata << 4,
        "shifted": metadata.roll(1, 1),
        "transposed word": metadata.view(8, 8, 8).transpose(0, 1).reshape(64, 8),
    }[fault]
    assert not torch.equal(packing.unpack(values, damaged), torch.where(mask, weight, 0))


def test_a_mask_that_is_not_2to4_is_refused_with_its_place():
    weight, mask = problem()
    mask[17, 20:24] = torch.tensor([True, True, True, False])
    with pytest.raises(ValueError, match="row 17, columns 20 to 23 keep 3 of 4"):
        packing.pack(weight, mask)


@pytest.mark.parametrize("shape", [(64, 96), (32, 64), (65, 64)])
def test_dimensions_that_are_no_multiple_of_64_are_unsupported(shape):
    mask = torch.tensor([True, True, False, False]).repeat(shape[0], shape[1] // 4)
    with pytest.raises(UnsupportedError, match="multiples of 64"):
        packing.pack(torch.zeros(shape), mask)


@pytest.mark.parametrize(
    ("weight", "mask", "match"),
    [
        (torch.zeros(64), torch.zeros(64, dtype=torch.bool), "two dimensions"),
        (torch.zeros(64, 64, dtype=torch.int8), torch.zeros(64, 64, dtype=torch.bool), "floating point"),
        (torch.zeros(64, 64), torch.zeros(64, 64), "must be bool"),
        (torch.zeros(64, 64), torch.zeros(64, 128, dtype=torch.bool), "must be bool"),
    ],
)
def test_what_is_no_weight_with_its_mask_is_refused(weight, mask, match):
    with pytest.raises(ValueError, match=match):
        packing.pack(weight, mask)


@pytest.mark.parametrize("metadata", [torch.zeros(64, 8), torch.zeros(64, 16, dtype=torch.uint8)])
def test_metadata_of_another_shape_or_dtype_is_refused(metadata):
    with pytest.raises(ValueError, match="metadata"):
        packing.unpack(torch.zeros(64, 32), metadata)
