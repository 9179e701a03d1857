"""The 2:4 products on a real GPU: values, bytes and traps. Their tuning: test_tuner.py."""

import pytest
import torch

from blockshock_lib.kernels.sparse24 import backends, cslt, masks, small
from blockshock_lib.kernels.sparse24.mask import Mask
from tests.kernels.sparse24.problems import errors

MASKS = [("uniform", "1010"), ("random", ""), ("transposable", "checkerboard"), ("transposable", "random")]
MASKS += [("magnitude", "")]
CSLT = backends.BACKENDS["cslt"]


def backend_for(name, dtype=torch.bfloat16):
    backend = backends.BACKENDS[name]
    if reason := backend.unsupported(torch.device("cuda"), dtype):
        pytest.skip(reason)
    return backend


def mask_of(mask, shape, seed=5, weight=None):
    return masks.make(Mask("", *mask), shape, seed=seed, device="cuda", weight=weight)


def problem(n, k, b, dtype=torch.bfloat16, mask=("random", ""), seed=0):
    generator = torch.Generator("cuda").manual_seed(1000 * seed + n + k + b)
    weight = torch.randn(n, k, device="cuda", generator=generator).to(dtype)
    kept = mask_of(mask, (n, k), seed, weight)
    return torch.randn(b, k, device="cuda", generator=generator).to(dtype), weight, kept


def assert_right(y, x, weight, mask, bias=None):
    assert y.is_contiguous() and y.dtype == x.dtype and y.shape == (len(x), len(weight)) and y.isfinite().all()
    if bias is None and not weight[mask].any():
        assert not y.any()
        return
    largest, rms = errors(y, x, weight, mask, bias)
    assert largest <= 2 and rms <= 1.25, f"errors of {largest:.3g}x and {rms:.3g}x (RMS) a plain product's"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", MASKS, ids=" ".join)
@pytest.mark.parametrize("name", list(backends.BACKENDS))
def test_values_are_right_for_random_shapes(name, mask, dtype):
    backend = backend_for(name, dtype)
    shapes = torch.Generator().manual_seed(7)
    for seed in range(6):
        n, k = (64 * torch.randint(1, 24, (2,), generator=shapes)).tolist()
        b = (1, 5, 16, 64, 250, 1024)[seed]
        b = min(b, small.MOST_ROWS) if name == "small" else b
        x, weight, kept = problem(n, k, b, dtype, mask, seed)
        assert all(masks.first_bad_group(one) is None for one in (kept, kept.t())[: 1 + (mask[0] == "transposable")])
        for term in (kept, ~kept):
            assert_right(backend.linear(x, backend.pack(weight, term)), x, weight, term)


@pytest.mark.parametrize("name", list(backends.BACKENDS))
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


@pytest.mark.parametrize("fault", ["a word of metadata moved", "a group swapped"])
def test_the_gate_sees_damage_in_cusparselts_buffer(fault):
    backend_for("cslt")
    x, weight, mask = problem(256, 512, 32)
    packed = cslt.pack(weight, mask)
    half, flat = weight.numel() // 2, packed.data[0].view(-1).view(torch.int16)
    damaged = flat[:2] if "group" in fault else flat[half : half + 16]
    damaged.copy_(damaged.roll(1))
    assert errors(CSLT.linear(x, packed), x, weight, mask)[0] > 2
