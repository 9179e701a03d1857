"""What of the small-batch product needs no GPU: sizes, instruction, refusals. Values: tests/gpu/test_small.py."""

import re

import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24 import small

CUDA = torch.device("cuda", 0)
SHAPES = [(64, 64), (4096, 4096), (192, 8192), (40960, 40960), (8192, 128)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 31, 64, 65, 128, 129, 256])
def test_every_candidate_fits_the_chip_and_leaves_no_block_without_columns(shape, rows):
    found = small.candidates(shape, rows)
    assert found and len(set(found)) == len(found) and found[0] == small.default(shape, rows)
    for config in found:
        assert config.fits(small.eights(rows))
        assert config.split == 1 or config.split * 128 * config.unroll <= shape[1]


def test_a_batch_that_the_kernel_cannot_take_has_no_candidate_and_is_refused_by_name():
    assert small.candidates((4096, 4096), 0) == small.candidates((4096, 4096), 257) == []
    with pytest.raises(UnsupportedError, match="up to 256 rows, not 257"):
        small.multiply(torch.zeros(257, 64), torch.zeros(1), (64, 64))


@pytest.mark.parametrize(
    ("capability", "compiler", "reason"),
    [
        ((8, 0), "", "no wgmma.sp"),
        ((10, 0), "", "no wgmma.sp"),
        ((9, 0), "", "^$"),
        ((9, 0), "cuda.bindings is not installed", "^cuda.bindings is not installed$"),
    ],
)
def test_only_hopper_with_a_compiler_has_the_instruction_and_what_is_missing_is_named(
    capability, compiler, reason, monkeypatch
):
    monkeypatch.setattr(small.cslt, "unsupported", lambda device, dtype: "")
    monkeypatch.setattr(small.compiled, "unsupported", lambda device: compiler)
    monkeypatch.setattr(small.compress, "known", lambda device: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert re.search(reason, small.unsupported(CUDA, torch.bfloat16))
