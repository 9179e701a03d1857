"""Captured forwards on real GPUs: the plain forward's bits, also after weights changed, and a clean end."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.graph import Graph, try_capture
from blockshock_lib.kernels.sparse24.mask import Mask
from blockshock_lib.layers import DenseLinear, Linear24, PermutedDenseLinear
from blockshock_lib.studies.linear.methods import METHODS
from tests.processes import call

two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
N, K = 512, 1024
SHARDED = [(name, "checkerboard", "") for name in METHODS if name != "dense"] + [("block_shock", "random", "")]
SHARDED += [("permuted_dense", "checkerboard", form) for form in PermutedDenseLinear.FORMS[1:]]


def draw(*shape, seed=0, device="cuda"):
    return torch.randn(*shape, device=device, generator=torch.Generator(device).manual_seed(seed)).bfloat16()


def alone(kind):
    """A layer of one GPU."""
    linear = nn.Linear(K, N, device="cuda", dtype=torch.bfloat16)
    if kind == "dense":
        return DenseLinear(linear.weight, linear.bias, group=Group())
    if reason := Linear24.unsupported(Mask.named("magnitude"), torch.device("cuda", 0), torch.bfloat16):
        pytest.skip(reason)
    return Linear24.from_linear(linear, mask="magnitude", update=kind)


@pytest.fixture(params=["dense", "packed", "recompress"])
def fast(request):
    with alone(request.param).graphed() as made, torch.no_grad():
        yield made


def spoil(fast, rows):
    """Overwrites what the last replay left, so that a replay that does nothing shows."""
    fast._graphs[rows].x.fill_(torch.nan)
    fast._graphs[rows].graph.out.fill_(torch.nan)


@pytest.mark.parametrize("rows", [1, 5, 16, 64, 129, 1024])
def test_replays_have_the_bits_of_the_plain_forward(fast, rows):
    for seed in range(4):
        x = draw(rows, 1, K, seed=seed)
        if seed:
            spoil(fast, rows)
        assert torch.equal(fast(x), fast.layer(x))
    wide = draw(rows, 2 * K)
    assert torch.equal(fast(wide[:, K:]), fast.layer(wide[:, K:].contiguous()))


def test_outputs_of_whole_numbers_are_overwritten_too():
    logits = draw(4, K)
    graph = Graph([lambda: logits.argmax(-1)], logits.device)
    graph()
    assert torch.equal(graph.fresh(), logits.argmax(-1))
    graph.graph.replay = lambda: None
    assert torch.equal(graph.fresh(), torch.full((4,), -1, device="cuda"))
    graph.release()


def test_a_capture_that_fails_says_why_and_keeps_neither_memory_nor_draws_back():
    x, side = torch.ones(1, device="cuda"), torch.cuda.Stream()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="cannot be captured in a CUDA graph"):
            try_capture(lambda: x.item(), x.device)
    assert x.normal_().isfinite()  # the generator draws again
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(20):
        used = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        used.record_stream(side)
        del used
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - before < 4 * (64 << 20)


def test_calls_on_two_streams_do_not_mix(fast):
    streams, got = [torch.cuda.Stream() for _ in range(2)], []
    xs = [draw(1024, K, seed=seed) for seed in range(16)]
    wanted = [fast.layer(x) for x in xs]
    fast(xs[0])
    torch.cuda.synchronize()
    for i, x in enumerate(xs):
        with torch.cuda.stream(streams[i % 2]):
            got.append(fast(x))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_inside_another_capture_the_plain_forward_is_captured(fast):
    x = draw(16, K)
    fast(x)
    fast.layer.refresh()  # a kernel must have run before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fast(x)
    x.copy_(draw(16, K, seed=1))
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, fast.layer(x))


def test_the_shape_unused_for_longest_goes_and_closing_gives_the_memory_back():
    layer = alone("packed")
    with torch.no_grad():
        for rows in (256, 512, 1024):
            layer(draw(rows, K))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with layer.graphed(shapes=2) as fast:
            for rows in (256, 512, 256, 1024, 512):
                assert torch.equal(fast(draw(rows, K)), layer(draw(rows, K)))
            assert list(fast._graphs) == [1024, 512]
            assert torch.cuda.memory_allocated() > before
        assert torch.cuda.memory_allocated() - before < 64 << 20  # cuBLAS keeps a workspace a stream


def captured(ctx):
    """What differs between captured and plain forwards of each method, on this rank."""
    wrong, mask_of = [], {name: Mask.named(name) for name in ("checkerboard", "random")}
    handle = dist.new_group()
    for name, mask, form in SHARDED:
        w, bias = draw(N, K, seed=1, device=ctx.device) / 32, draw(N, seed=2, device=ctx.device)
        options = METHODS[name].options("auto", frozen=False)
        layer = METHODS[name].load()(w, bias, mask=mask_of[mask], group=Group.of(handle), **options)
        if form:
            layer.form = form
        with layer.graphed(shapes=2) as fast, torch.no_grad():
            for call, rows in enumerate((16, 16, 5, 256, 16, 5, 16, 16, 16, 16)):
                x = draw(rows, K, seed=call, device=ctx.device)
                if call == 7:
                    with torch.enable_grad():
                        layer(x).float().square().mean().backward()
                    torch.optim.SGD(layer.parameters(), lr=0.1).step()
                if call == 8:
                    layer.weight.data = layer.weight.data.clone()
                if rows in fast._graphs:
                    spoil(fast, rows)
                y, whole = layer(x), nn.functional.linear(x, w, bias).float()
                # Until a step comes; D folded leaves its rows permuted.
                if call < 7 and name != "folded_dense" and (y - whole).norm() > 0.01 * whole.norm():
                    wrong.append(f"{name} {form} {mask}: not the dense product")
                if not torch.equal(fast(x), y):
                    wrong.append(f"{name} {form} {mask}: call {call} of {rows} rows")
            if len(fast._graphs) > 2:
                wrong.append(f"{name} {mask}: keeps {list(fast._graphs)}")
    torch.cuda.synchronize()
    dist.destroy_process_group(handle)
    return wrong


@two
def test_every_method_replays_its_own_bits_and_the_process_group_ends_cleanly(tmp_path):
    assert call(captured, processes=2, device="cuda", logs=tmp_path, seconds=300) == [[], []]
