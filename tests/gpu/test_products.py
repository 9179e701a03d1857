"""The 2:4 products on a real GPU: values, bytes and traps. Their tuning: test_tuner.py."""

from types import SimpleNamespace

import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.sparse24 import Pattern, cslt, cslt_tune, masks, packing, product, small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available"),
]
MASKS = [("uniform", "1010"), ("random", ""), ("transposable", "checkerboard"), ("transposable", "random")]
MASKS += [("magnitude", "")]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(cslt_tune, "chosen", {})


def backend_for(name, dtype=torch.bfloat16):
    backend = product.BACKENDS[name]
    if reason := backend.unsupported(torch.device("cuda"), dtype):
        pytest.skip(reason)
    return backend


def problem(n, k, b, dtype=torch.bfloat16, mask=("random", ""), seed=0):
    generator = torch.Generator("cuda").manual_seed(1000 * seed + n + k + b)
    weight = torch.randn(n, k, device="cuda", generator=generator).to(dtype)
    kept = masks.make(SimpleNamespace(family=mask[0], pattern=mask[1]), (n, k), weight=weight, seed=seed, device="cuda")
    return torch.randn(b, k, device="cuda", generator=generator).to(dtype), weight, kept


def errors(y, x, weight, mask):
    """(largest, RMS) error against float64, each over that of a plain product of the same dtype."""
    kept = torch.where(mask, weight, 0)
    truth = x.double() @ kept.double().t()
    ours, plain = (y.double() - truth).abs(), ((x @ kept.t()).double() - truth).abs()
    return (ours.max() / plain.max()).item(), (ours.square().mean() / plain.square().mean()).sqrt().item()


def assert_right(y, x, weight, mask):
    assert y.is_contiguous() and y.dtype == x.dtype and y.shape == (len(x), len(weight)) and y.isfinite().all()
    if not weight[mask].any():
        assert not y.any()
        return
    largest, rms = errors(y, x, weight, mask)
    assert largest <= 2 and rms <= 1.25, f"errors of {largest:.3g}x and {rms:.3g}x (RMS) a plain product's"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", MASKS, ids=" ".join)
@pytest.mark.parametrize("name", list(product.BACKENDS))
def test_values_are_right_for_random_shapes(name, mask, dtype):
    backend = backend_for(name, dtype)
    shapes = torch.Generator().manual_seed(7)
    for seed in range(6):
        n, k = (64 * torch.randint(1, 24, (2,), generator=shapes)).tolist()
        b = (1, 5, 16, 64, 250, 1024)[seed]
        b = min(b, small.MOST_ROWS) if name == "small" else b
        x, weight, kept = problem(n, k, b, dtype, mask, seed)
        masks.require(kept, ~kept, columns=mask[0] == "transposable")
        for term in (kept, ~kept):
            assert_right(backend.linear(x, backend.pack(weight, term)), x, weight, term)


def test_the_reference_runs_fp32_and_the_others_say_why_not():
    x, weight, mask = problem(128, 192, 16, torch.float32)
    reference = product.BACKENDS["reference"]
    torch.testing.assert_close(reference.linear(x, reference.pack(weight, mask)), x @ torch.where(mask, weight, 0).t())
    for name in ("torch", "cslt"):
        assert "1:2" in product.BACKENDS[name].unsupported(x.device, x.dtype)


@pytest.mark.parametrize("name", list(product.BACKENDS))
@pytest.mark.parametrize(("n", "k"), [(64, 64), (192, 1024), (4096, 4096), (8192, 2048)])
def test_packed_storage_is_nine_sixteenths_of_dense(name, n, k):
    backend = backend_for(name)
    _, weight, mask = problem(n, k, 8)
    assert backend.pack(weight, mask).nbytes == n * k * 2 * 9 // 16


@pytest.mark.parametrize("name", ["torch", "cslt"])
def test_a_weight_that_would_be_multiplied_wrongly_is_refused_and_costs_no_memory(name):
    backend = backend_for(name)
    weight = torch.zeros(1, 1, dtype=torch.bfloat16, device="cuda").expand(65536, 65600)
    mask = torch.ones(1, 1, dtype=torch.bool, device="cuda").expand(65536, 65600)
    pattern = Pattern(torch.zeros(1, 1, dtype=torch.uint8, device="cuda").expand(16384, 16400), 0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for make in (lambda: backend.pack(weight, mask), lambda: backend.blank(pattern, weight.dtype)):
        with pytest.raises(UnsupportedError, match="65536x65600 has more than"):
            make()
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.parametrize("name", list(product.BACKENDS))
def test_a_column_slice_of_a_wider_input_is_multiplied_as_its_copy(name):
    backend = backend_for(name)
    x, weight, mask = problem(256, 512, 64)
    wide = torch.randn(64, 1024, device="cuda").to(x.dtype)
    wide[:, 512:] = x
    packed = backend.pack(weight, mask)
    assert_right(backend.linear(wide[:, 512:], packed), x, weight, mask)


@pytest.mark.parametrize("name", list(product.BACKENDS))
def test_a_product_can_be_captured_in_a_graph_and_follows_new_inputs(name):
    backend = backend_for(name)
    x, weight, mask = problem(512, 512, 32)
    packed = backend.pack(weight, mask)
    backend.linear(x, packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = backend.linear(x, packed)
    x.copy_(torch.randn_like(x))
    y.fill_(torch.nan)
    graph.replay()
    assert_right(y, x, weight, mask)


def test_masks_are_the_same_on_both_devices():
    for family, pattern in (("random", ""), ("transposable", "random")):
        spec = SimpleNamespace(family=family, pattern=pattern)
        on_gpu = masks.make(spec, (256, 512), seed=3, device="cuda")
        assert torch.equal(on_gpu.cpu(), masks.make(spec, (256, 512), seed=3))


def test_cusparselts_buffer_begins_with_the_kept_weights_and_follows_a_write():
    backend_for("cslt")
    x, weight, mask = problem(256, 512, 32)
    packed = cslt.pack(weight, mask)
    assert torch.equal(packed.values, packing.pack(weight, mask)[0])
    changed = weight * 2 + 1
    largest, _ = errors(cslt.linear(x, packed), x, changed, mask)
    assert largest > 2  # a stale packed copy is seen by the gate
    packed.values.copy_(packing.pack(changed, mask)[0])
    assert_right(cslt.linear(x, packed), x, changed, mask)


@pytest.mark.parametrize("fault", ["a word of metadata moved", "a group swapped"])
def test_the_gate_sees_damage_in_cusparselts_buffer(fault):
    backend_for("cslt")
    x, weight, mask = problem(256, 512, 32)
    packed = cslt.pack(weight, mask)
    if fault == "a group swapped":
        packed.values[7, :2] = packed.values[7, :2].flip(0)
    else:
        words = packed.data[0].view(-1)[weight.numel() // 2 :].view(torch.int16)
        words[:16] = words[:16].roll(1)
    largest, _ = errors(cslt.linear(x, packed), x, weight, mask)
    assert largest > 2
