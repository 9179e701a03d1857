"""The Triton kernels against the torch versions, by Triton's interpreter on the CPU. On a real GPU: tests/gpu."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from blockshock_lib import sparse24
from blockshock_lib.sparse24 import Pattern, masks

pytest.importorskip("triton", reason="Triton comes with PyTorch's CUDA builds only")

SHAPES = [(64, 64), (64, 192), (320, 128)]  # the last takes two blocks of tiles along N
MASKS = [("uniform", "1010"), ("random", ""), ("transposable", "checkerboard"), ("transposable", "random")]


@pytest.fixture(scope="module")
def kernels():
    """A copy of the module whose kernels are interpreted: Triton decides that where a kernel is defined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec = importlib.util.spec_from_file_location(
            "interpreted_kernels", Path(sparse24.__file__).parent / "kernels.py"
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def check(kernels, keep, dtype):
    """The kernels give the oracle's bits, and write all of their output."""
    found = Pattern.of(keep)
    rows, columns = keep.shape
    generator = torch.Generator().manual_seed(rows + columns)
    dense = torch.randint(-(1 << 15), 1 << 15, keep.shape, dtype=torch.int16, generator=generator).view(dtype)
    values = found.gather(dense)
    full = found.scatter(values)
    moves = [(kernels.gather, dense, values), (kernels.scatter, values, full), (kernels.masked, dense, full)]
    if found.transposable:
        moves.append((kernels.transpose_values, values, found.transpose_values(values)))
    for move, source, wanted in moves:
        out = torch.full_like(wanted, 7)
        move(found, source, out)
        assert torch.equal(out.view(torch.int16), wanted.view(torch.int16)), move.__name__
    kernels.masked(found, dense, dense)
    assert torch.equal(dense.view(torch.int16), full.view(torch.int16))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS, ids=" ".join)
def test_the_kernels_agree_with_torch_bit_for_bit(kernels, mask, shape):
    keep = masks.make(SimpleNamespace(family=mask[0], pattern=mask[1]), shape)
    check(kernels, keep, torch.bfloat16)
    check(kernels, ~keep, torch.float16)


def test_all_90_tiles_and_a_grid_of_tiles_that_fills_no_block(kernels):
    check(kernels, masks.TILES.view(9, 10, 4, 4).transpose(1, 2).reshape(36, 40), torch.bfloat16)


@pytest.mark.parametrize("number", [7, 23, 42, 61, 89])
def test_a_repeated_tile_is_a_constant_of_the_kernel(kernels, number):
    check(kernels, masks.TILES[number].repeat(16, 16), torch.bfloat16)


def test_a_part_of_a_pattern_reads_its_own_tiles(kernels):
    keep = masks.make(SimpleNamespace(family="transposable", pattern="random"), (128, 64))
    lower, values = Pattern.of(keep).rows(slice(64, 128)), torch.randn(64, 32).bfloat16()
    out = torch.empty(64, 32, dtype=torch.bfloat16)
    kernels.transpose_values(lower, values, out)
    assert torch.equal(out, Pattern.of(keep[64:]).transpose_values(values))


def test_an_input_is_copied_whose_rows_lie_apart_or_begin_off_a_words_boundary(kernels):
    keep = masks.make(SimpleNamespace(family="random", pattern=""), (64, 64))
    numbers = torch.randn(64 * 64 + 1).bfloat16()
    for dense in (numbers[1:].view(64, 64), numbers[:-1].view(64, 64).t()):
        out = torch.empty(64, 32, dtype=torch.bfloat16)
        kernels.gather(Pattern.of(keep), dense, out)
        assert torch.equal(out, dense[keep].view(64, 32))
