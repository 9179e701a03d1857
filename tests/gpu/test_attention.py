"""Block-sparse attention on a real GPU: each backend against float64, launches that are bitwise equal, and tuning."""

import pytest
import torch

from blockshock_lib import attention
from blockshock_lib.kernels.attention import reference, sdpa, trial, tune
from blockshock_lib.kernels.attention.backends import BACKENDS
from blockshock_lib.kernels.attention.call import Call
from tests.kernels.attention.dense import merge

PATTERNS = {
    "full": attention.full(),
    "causal": attention.causal(),
    "window and documents": attention.causal() & attention.window(300) & attention.documents([700, 1, 299]),
    "whole blocks": attention.random(0.3, 1, 128),
    "by head": attention.by_head([attention.full(), attention.window(9), attention.random(0.0), attention.causal()]),
}


def call_of(pattern, dtype, dim, kv_heads, length=1000, grad=True):
    q, k = (torch.empty(1, heads, length, dim, device="cuda", dtype=dtype) for heads in (4, kv_heads))
    return Call(q.requires_grad_(grad), k, k, pattern, pattern.lists(length, device=q.device), dim**-0.5)


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_values_and_gradients_are_those_of_float64(backend, pattern, dtype, dim, kv_heads):
    call = call_of(PATTERNS[pattern], dtype, dim, kv_heads)
    if why := BACKENDS[backend].refuse(call):
        pytest.skip(why)
    error = trial.error(BACKENDS[backend], trial.drawn(trial.packed(call), call.q.device, True, 0))
    assert error.right, error


@pytest.mark.parametrize("kernel", ["cudnn_attention", "flash_attention"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_sdpa_gives_a_part_s_share_of_the_gradients_of_a_merged_softmax(causal, dim, kernel, monkeypatch):
    if kernel == "flash_attention":
        monkeypatch.setattr(sdpa, "can_use_cudnn_attention", lambda params: False)
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v, more_k, more_v, dout = (torch.randn(2, 4, 301, dim, generator=draw, device="cuda") for _ in range(6))
    masks = attention.causal() if causal else attention.full(), attention.full()

    def made(backend, dtype):
        keys = zip(((k, v), (more_k, more_v)), masks, strict=True)
        calls = [
            Call(*(x.bfloat16().to(dtype) for x in (q, *pair)), mask, mask.lists(301, device="cuda"), dim**-0.5, True)
            for pair, mask in keys
        ]
        assert backend is reference or {sdpa._operator(call) for call in calls} == {kernel}
        out, lse = merge(*zip(*map(backend.forward, calls), strict=True))
        share = [backend.backward(call, dout.bfloat16().to(dtype), out, lse, None) for call in calls]
        return out, lse, *share[0], *share[1]

    for got, true in zip(made(sdpa, torch.bfloat16), made(reference, torch.float64), strict=True):
        assert got.isfinite().all() and (got.double() - true).norm() < 0.02 * true.norm()


@pytest.mark.parametrize("name", ["triton", "gluon"])
def test_what_is_masked_out_may_hold_nan_and_what_is_seen_is_nan(name):
    call = call_of(attention.causal(), torch.bfloat16, 64, 4)
    if why := BACKENDS[name].refuse(call):
        pytest.skip(why)
    right, wrong = (trial.drawn(trial.packed(call), call.q.device, False, 0).call for _ in range(2))
    wrong.k[0, 1, 700:], wrong.v[0, 2, 700:] = float("nan"), float("inf")
    made, spoilt = (BACKENDS[name].forward(each) for each in (right, wrong))
    for one, other in zip(made, spoilt, strict=True):  # in other tiles, where a part is computed again
        assert torch.allclose(one[:, :, :700], other[:, :, :700], atol=2e-2)
        assert torch.equal(one[:, [0, 3]], other[:, [0, 3]])
    assert spoilt[0][0, 1, 700:].isnan().all() and not spoilt[0][0, 2, 700:].isfinite().any()


@pytest.mark.parametrize("launches", [100, pytest.param(10_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["triton", "gluon"])
def test_each_launch_gives_the_same_bits(name, launches):
    call = call_of(PATTERNS["window and documents"], torch.bfloat16, 64, 1)
    if why := BACKENDS[name].refuse(call):
        pytest.skip(why)
    draw = trial.drawn(trial.packed(call), call.q.device, True, 0)
    first = trial.made(BACKENDS[name], draw)
    for _ in range(launches):
        assert all(map(torch.equal, trial.made(BACKENDS[name], draw), first))


def test_what_is_tuned_is_right_kept_and_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKSHOCK_CACHE", str(tmp_path))
    tune._kept.cache_clear()
    call = call_of(PATTERNS["causal"], torch.bfloat16, 64, 4, 2048)
    times = attention.tune(call.q, call.k, call.v, PATTERNS["causal"])
    assert "triton" in times and list(times.values()) == sorted(times.values())
    tune._kept.cache_clear()
    taken = tune.auto(BACKENDS, call)
    best = BACKENDS[next(iter(times))]
    assert taken.refuse is best.refuse  # the Triton kernels are taken as they were cut
    assert trial.error(taken, trial.drawn(trial.packed(call), call.q.device, True, 5)).right


@pytest.mark.parametrize("backend", ["triton", "gluon", "sdpa"])
@pytest.mark.parametrize("causal", [True, False])
def test_dilated_attention_is_that_of_float64(causal, backend):
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(2, heads, 700, 64, generator=draw, device="cuda") for heads in (4, 2, 2, 4))

    def made(dtype, backend):
        given = [x.bfloat16().to(dtype).requires_grad_() for x in (q, k, v)]
        # 700 is no multiple of a segment; of a segment of 1 only the first head holds a position.
        out, lse = attention.dilated_attention(*given, [1, 128, 300, 1000], [2, 1, 2, 3], causal, backend, None, True)
        return out, lse, *torch.autograd.grad(out, given, dout.bfloat16().to(dtype))

    for got, true in zip(made(torch.bfloat16, backend), made(torch.float64, "reference"), strict=True):
        assert got.isfinite().all() and (got.double() - true).norm() < 0.02 * true.norm()


@pytest.mark.parametrize("backend", ["triton", "gluon", "sdpa"])
def test_compiled_whole_into_a_cuda_graph_it_is_the_eager_call(backend):
    call = call_of(attention.causal(), torch.bfloat16, 64, 4)
    if why := BACKENDS[backend].refuse(call):
        pytest.skip(why)
    made = [torch.randn_like(x).requires_grad_() for x in (call.q, call.k, call.v)]
    attend = lambda q, k, v: attention.sparse_attention(q, k, v, call.pattern, backend).square().sum()  # noqa: E731
    whole = torch.compile(attend, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):  # warmed up, recorded, replayed
        torch.compiler.cudagraph_mark_step_begin()
        found = [grad.clone() for grad in torch.autograd.grad(whole(*made), made)]
    for got, right in zip(found, torch.autograd.grad(attend(*made), made), strict=True):
        assert (got - right).float().norm() < 0.01 * right.float().norm()
