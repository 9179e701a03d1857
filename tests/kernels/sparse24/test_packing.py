import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import packing

from .problems import problem


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 64), (128, 192), (192, 64)])
def test_unpack_gives_back_the_kept_weights_bit_by_bit_and_plus_zero_in_the_holes(shape, dtype):
    _, weight, mask = problem(1, *shape, dtype)
    weight[weight < 0] = -0.0
    values, metadata = packing.pack(weight, mask).data
    assert values.dtype == dtype and values.is_contiguous() and metadata.dtype == torch.uint8
    assert torch.equal(values, weight[mask].view(shape[0], shape[1] // 2))
    dense, wanted = packing.unpack(values, metadata), torch.where(mask, weight, 0)
    assert torch.equal(dense, wanted) and torch.equal(dense.signbit(), wanted.signbit())


def mask_of(rows, columns):
    return torch.tensor([True, True, False, False]).repeat(rows, columns // 4)


BROKEN = mask_of(64, 128)
BROKEN[17, 22] = True


@pytest.mark.parametrize(
    ("weight", "mask", "error", "match"),
    [
        (torch.zeros(64, 128), BROKEN, ValueError, "row 17, columns 20 to 23 keep 3 of 4"),
        (torch.zeros(64, 96), mask_of(64, 96), UnsupportedError, "multiples of 64"),
        (torch.zeros(96, 64), mask_of(96, 64), UnsupportedError, "multiples of 64"),
        (torch.zeros(64), mask_of(1, 64)[0], ValueError, "two dimensions"),
        (torch.zeros(64, 64, dtype=torch.int8), mask_of(64, 64), ValueError, "floating point"),
        (torch.zeros(64, 64), torch.zeros(64, 64), ValueError, "must be bool"),
        (torch.zeros(64, 64), mask_of(64, 128), ValueError, "must be bool"),
    ],
)
def test_what_is_no_weight_with_its_2to4_mask_is_refused(weight, mask, error, match):
    with pytest.raises(error, match=match):
        packing.pack(weight, mask)
