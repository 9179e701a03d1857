"""The compressor on a real GPU, byte for byte against cuSPARSELt's own and against the mask."""

from types import SimpleNamespace

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.layers import BlockShockLinear
from blockshock_lib.params import Mask
from blockshock_lib.sparse24 import Pattern, compress, cslt, masks, metadata

from .test_products import MASKS, assert_right, backend_for, problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available"),
]
DTYPES = [torch.bfloat16, torch.float16]
TRANSPOSABLE = ("transposable", "random")


@pytest.fixture(scope="module", autouse=True)
def library():
    backend_for("cslt")
    if reason := metadata.known(torch.device("cuda", torch.cuda.current_device())):
        assert torch.cuda.get_device_capability() != (9, 0), reason
        pytest.skip(reason)


def mask_of(mask, shape, seed=5, weight=None):
    spec = SimpleNamespace(family=mask[0], pattern=mask[1])
    return masks.make(spec, shape, seed=seed, device="cuda", weight=weight)


def any_bits(shape, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device="cuda", generator=generator).view(dtype)


def same(ours, wanted):
    return ours.shape == wanted.shape and torch.equal(ours.view(torch.int16), wanted.view(torch.int16))


def wanted_of(weight, keep):
    """W[mask], and behind it the metadata that the library gives ones under the mask."""
    weight, keep = weight.contiguous(), keep.contiguous()
    buffer = torch._cslt_compress(keep.to(weight.dtype)).view(torch.int16)
    buffer.view(-1)[: weight.numel() // 2] = weight.view(torch.int16)[keep]
    return buffer.view(weight.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS, ids=" ".join)
def test_every_form_is_the_librarys_byte_for_byte(mask, dtype):
    """24 shapes, both terms of each: 480 weights in all."""
    shapes = torch.Generator().manual_seed(11)
    for seed in range(24):
        shape = tuple((64 * torch.randint(1, 33, (2,), generator=shapes)).tolist())
        weight = any_bits(shape, dtype, seed)
        keep = mask_of(mask, shape, seed, torch.randn(shape, device="cuda"))
        for term in (keep, ~keep):
            pattern, wanted = Pattern.of(term), wanted_of(weight, term)
            assert same(cslt.pack(weight, term).data[0], wanted)
            assert torch.equal(
                compress.blank(pattern, dtype).view(-1)[weight.numel() // 2 :].view(torch.uint8),
                wanted.view(-1)[weight.numel() // 2 :].view(torch.uint8),
            )
            assert torch.equal(
                metadata.of(pattern), wanted.view(-1)[weight.numel() // 2 :].view(torch.uint8)
            )  # the oracle
            if pattern.transposable:
                wanted_t = wanted_of(weight.t(), term.t())
                assert all(map(same, compress.both(weight, pattern), (wanted, wanted_t)))
                values, turned = (w.view(-1)[: weight.numel() // 2] for w in (wanted, wanted_t))
                ours = torch.full_like(values, 7).view(shape[0], -1), torch.full_like(turned, 7).view(shape[1], -1)
                compress.values_of_both(weight, pattern, *ours)
                assert same(ours[0].view(-1), values) and same(ours[1].view(-1), turned)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("levels", [0, 2, 40])
def test_a_magnitude_is_compressed_as_under_its_mask(levels, dtype):
    shapes = torch.Generator().manual_seed(levels)
    for seed in range(24):
        shape = tuple((64 * torch.randint(1, 33, (2,), generator=shapes)).tolist())
        weight = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        weight = ((weight * levels).round() if levels else weight).to(dtype)
        assert same(compress.magnitude(weight), wanted_of(weight, mask_of(("magnitude", ""), shape, weight=weight)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_magnitude_of_a_weight_that_is_not_finite_is_refused(value):
    weight = torch.randn(512, 1024, device="cuda").bfloat16()
    weight[0, 0] = -torch.finfo(torch.bfloat16).max
    compress.magnitude(weight)
    weight[511, 1023] = value
    with pytest.raises(ValueError, match="needs finite weights"):
        compress.magnitude(weight)


def test_a_kept_zero_stays_kept_in_both_and_values_written_later_reach_the_product():
    x, weight, keep = problem(512, 1024, 64, mask=TRANSPOSABLE)
    dy = torch.randn(64, 512, device="cuda").bfloat16()
    weight.masked_fill_(torch.rand(weight.shape, device="cuda") < 0.3, 0)
    pattern = Pattern.of(keep)
    forward, turned = cslt.pack_both(weight, pattern)
    assert_right(cslt.linear(x, forward), x, weight, keep)
    assert_right(cslt.linear(dy, turned), dy, weight.t(), keep.t())
    changed = torch.randn_like(weight)
    compress.values_of_both(changed, pattern, forward.values, turned.values)
    assert_right(cslt.linear(x, forward), x, changed, keep)
    assert_right(cslt.linear(dy, turned), dy, changed.t(), keep.t())


def test_more_than_two_to_the_31_bytes_are_compressed_right():
    shape, last = (36864, 32768), slice(36864 - 64, 36864)
    keep = mask_of(TRANSPOSABLE, shape)
    pattern = Pattern.of(keep)
    weight = any_bits(shape, torch.bfloat16)
    forward, turned = compress.both(weight, pattern)
    del keep
    values = forward.view(-1)[: weight.numel() // 2].view(shape[0], -1)
    values_t = turned.view(-1)[: weight.numel() // 2].view(shape[1], -1)
    assert same(values, pattern.gather(weight)) and same(values_t, pattern.transpose_values(values))
    for buffer, found in ((forward, pattern), (turned, pattern.t())):
        ours = buffer.view(-1)[weight.numel() // 2 :].view(torch.uint8)
        assert torch.equal(ours, metadata.of(found))
        assert torch.equal(ours, compress.blank(found, weight.dtype).view(-1)[weight.numel() // 2 :].view(torch.uint8))
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    selected, rows = compress.magnitude(weight), weight[last]
    wanted = wanted_of(rows, mask_of(("magnitude", ""), tuple(rows.shape), weight=rows))
    half, tail = rows.numel() // 2, rows.numel() // 16
    end = weight.numel() // 2
    assert same(selected.view(-1)[end - half : end], wanted.view(-1)[:half])
    assert same(selected.view(-1)[-tail:], wanted.view(-1)[half:])


def test_a_blank_needs_no_memory_but_its_own():
    pattern = Pattern.of(mask_of(TRANSPOSABLE, (8192, 8192)))
    compress.blank(pattern, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    blank = cslt.blank(pattern, torch.bfloat16)
    assert torch.cuda.max_memory_allocated() - before == blank.nbytes == 8192 * 8192 * 9 // 8


def test_a_weight_whose_rows_lie_apart_or_begin_off_a_word_is_read_right():
    keep = mask_of(TRANSPOSABLE, (128, 192))
    wide = any_bits((128, 401), torch.bfloat16)
    for weight in (wide[:, 1:193], wide[:, 200:392], wide.view(-1)[1 : 1 + 128 * 192].view(128, 192)):
        forward, turned = compress.both(weight, Pattern.of(keep))
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


@pytest.mark.parametrize("mask", ["checkerboard", "transposable_random"])
def test_a_master_that_is_compressed_each_step_gives_y_and_dx(mask):
    x, weight, _ = problem(512, 1024, 64)
    dy = torch.randn(64, 512, device="cuda").bfloat16()
    layer = BlockShockLinear(weight, mask=Mask.named(mask), update="recompress", group=Group(0, 2))
    keep = layer.pattern.mask()
    for _ in range(2):
        assert_right(layer.local(x), x, layer.weight.detach(), keep)
        assert_right(layer.local_dx(dy), dy, layer.weight.detach().t(), keep.t())
        with torch.no_grad():
            layer.weight.copy_(torch.randn_like(layer.weight))
        layer.refresh()
