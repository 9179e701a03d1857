"""The compressor on a real GPU, byte for byte against cuSPARSELt's own and against the mask."""

import pytest
import torch

from blockshock_lib.kernels.sparse24 import compress, cslt
from blockshock_lib.kernels.sparse24.pattern import Pattern
from tests.kernels.sparse24.test_compress import both, same

from .test_products import MASKS, backend_for, mask_of

TRANSPOSABLE = ("transposable", "random")


@pytest.fixture(scope="module", autouse=True)
def library():
    backend_for("cslt")
    if reason := compress.known(torch.device("cuda", torch.cuda.current_device())):
        assert torch.cuda.get_device_capability() != (9, 0), reason
        pytest.skip(reason)


def split(buffer):
    """(values [N, K/2], metadata uint8) of a buffer [N, 9/16 K]."""
    flat, half = buffer.view(-1), buffer.numel() * 8 // 9
    return flat[:half].view(len(buffer), -1), flat[half:].view(torch.uint8)


def any_bits(shape, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device="cuda", generator=generator).view(dtype)


def wanted_of(weight, keep):
    """W[mask], and behind it the metadata that the library gives ones under the mask."""
    weight, keep = weight.contiguous(), keep.contiguous()
    buffer = torch._cslt_compress(keep.to(weight.dtype)).view(torch.int16)
    buffer.view(-1)[: weight.numel() // 2] = weight.view(torch.int16)[keep]
    return buffer.view(weight.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", MASKS, ids=" ".join)
def test_every_form_is_the_librarys_byte_for_byte(mask, dtype):
    draw = torch.Generator().manual_seed(11)
    for seed in range(24):
        shape = tuple((64 * torch.randint(1, 33, (2,), generator=draw)).tolist())
        weight = any_bits(shape, dtype, seed)
        keep = mask_of(mask, shape, seed, torch.randn(shape, device="cuda"))
        for term in (keep, ~keep):
            pattern, wanted = Pattern.of(term), wanted_of(weight, term)
            assert same(cslt.pack(weight, term).data[0], wanted)
            metadata = split(wanted)[1]
            assert torch.equal(split(compress.blank(pattern, dtype))[1], metadata)
            assert torch.equal(compress.metadata(pattern), metadata)  # the oracle
            if pattern.transposable:
                forward, turned = (one.data[0] for one in both(weight, pattern))
                assert same(forward, wanted) and same(turned, wanted_of(weight.t(), term.t()))


def test_more_than_two_to_the_31_bytes_are_compressed_right():
    shape = (36864, 32768)
    keep = mask_of(TRANSPOSABLE, shape)
    pattern = Pattern.of(keep)
    weight = any_bits(shape, torch.bfloat16)
    del keep
    (values, metadata), (values_t, metadata_t) = (split(one.data[0]) for one in both(weight, pattern))
    assert same(values, pattern.gather(weight)) and same(values_t, pattern.transpose_values(values))
    for ours, found in ((metadata, pattern), (metadata_t, pattern.t())):
        assert torch.equal(ours, compress.metadata(found))
        assert torch.equal(ours, split(compress.blank(found, weight.dtype))[1])


def test_a_weight_whose_rows_lie_apart_or_begin_off_a_word_is_read_right():
    keep = mask_of(TRANSPOSABLE, (128, 192))
    wide = any_bits((128, 401), torch.bfloat16)
    for weight in (wide[:, 1:193], wide[:, 200:392], wide.view(-1)[1 : 1 + 128 * 192].view(128, 192)):
        forward, turned = (one.data[0] for one in both(weight, Pattern.of(keep)))
        assert same(forward, wanted_of(weight, keep)) and same(turned, wanted_of(weight.t(), keep.t()))


def test_the_values_of_both_can_be_captured_in_a_graph_and_follow_a_new_weight():
    pattern = Pattern.of(mask_of(TRANSPOSABLE, (256, 512)))
    weight = torch.randn(256, 512, device="cuda").bfloat16()
    values, turned = weight.new_empty(256, 256), weight.new_empty(512, 128)
    before = values._version
    compress.values_of_both(weight, pattern, values, turned)
    assert values._version > before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compress.values_of_both(weight, pattern, values, turned)
    weight.mul_(-3)
    graph.replay()
    assert torch.equal(values, pattern.gather(weight)) and torch.equal(turned, pattern.transpose_values(values))
