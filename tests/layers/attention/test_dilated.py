"""Dilated attention against its oracle: one softmax over all keys, each weighted by how many pairs hold it."""

import math

import pytest
import torch

from blockshock_lib import attention
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.attention import sdpa, tune


def oracle(q, k, v, lengths, rates, causal, pattern=None):
    """p_ij ~ M_ij exp(s_ij), M the number of pairs in which head h sees key j from query i. `pattern` is asked by the
    numbers of rows within a gathered segment.
    """
    heads, size = q.shape[1:3]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    i, j = torch.arange(size)[:, None], torch.arange(size)[None]
    times = torch.zeros(heads, size, size, dtype=q.dtype)
    for head in range(heads):
        for length, rate in zip(lengths, rates, strict=True):
            held = [(x % length % rate == head % rate) for x in (i, j)]
            sees = (j <= i) | (not causal)
            if pattern is not None:
                sees = pattern.sees(i % length // rate, j % length // rate, size, size)
            times[head] += (i // length == j // length) & held[0] & held[1] & sees
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    weight = times * (scores - scores.amax(-1, keepdim=True)).exp()
    total = weight.sum(-1, keepdim=True)
    none, total = total == 0, total.masked_fill(total == 0, 1)
    lse = (total.log() + scores.amax(-1, keepdim=True)).masked_fill(none, -math.inf)
    return weight / total @ v, lse[..., 0]


def drawn(size=90, heads=4, groups=1):
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, count, size, 8) for count in (heads, heads // groups, heads // groups)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]


CASES = [
    ([32], [1]),
    ([16, 32, 64], [1, 2, 4]),
    ([16, 50, 90], [1, 6, 12]),  # rates that do not divide, and more than there are heads
    ([20, 40], [2, 3]),  # no rate of 1: some positions are held by none
    ([200], [3]),  # longer than the sequence
]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("lengths", "rates"), CASES)
def test_values_and_gradients_equal_the_oracle(lengths, rates, causal, backend):
    made = drawn(groups=2)
    out, lse = attention.dilated_attention(*made, lengths, rates, causal, backend, return_lse=True)
    right, right_lse = oracle(*made, lengths, rates, causal)
    torch.testing.assert_close((out, lse), (right, right_lse))
    upstream, seen = made[0].detach().flip(2), lse.isfinite()
    losses = [
        (x * upstream).sum() + (0 if backend == "sdpa" else y[seen].sum()) for x, y in ((out, lse), (right, right_lse))
    ]
    torch.testing.assert_close(*(torch.autograd.grad(loss, made) for loss in losses))


def test_gathered_segments_may_be_sparse_and_heads_may_be_some_of_all():
    made = drawn(120)
    pattern = attention.causal() & (attention.random(0.3, 1, 5) | attention.block_diagonal(5))
    arguments = ([60, 120], [2, 3])
    right = oracle(*made, *arguments, True, pattern)[0]
    options = {"pattern": pattern, "block": 32}
    torch.testing.assert_close(attention.dilated_attention(*made, *arguments, **options), right)
    some = [x[:, 1:3].mT.contiguous().mT for x in made]  # rows that do not lie in one piece, too
    out = attention.dilated_attention(*some, *arguments, **options, first_head=1)
    torch.testing.assert_close(out, right[:, 1:3])
    assert not torch.allclose(attention.dilated_attention(*some, *arguments, **options), right[:, 1:3])
    options["pattern"] = attention.random(0.1, 1, 5)  # rows that are held and see nothing
    right = oracle(*made, *arguments, False, options["pattern"])
    torch.testing.assert_close(attention.dilated_attention(*made, *arguments, return_lse=True, **options), right)
    for wrong in (attention.documents([120]), attention.by_head([pattern, attention.full()])):
        with pytest.raises(ValueError, match="must fit any length"):
            attention.dilated_attention(*made, *arguments, pattern=wrong)


def test_only_operands_and_the_merged_softmax_are_kept_for_the_gradients():
    made, kept = drawn(groups=2), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out, lse = attention.dilated_attention(*made, [16, 32, 64], [1, 2, 4], backend="sdpa", return_lse=True)
    assert [x.shape for x in kept] == [x.shape for x in (*made, out, lse)]


def test_what_cannot_merge_parts_is_refused_and_so_is_the_gradient_of_a_logsumexp_that_has_none():
    made = [x.detach().requires_grad_() for x in drawn()]
    lse = attention.dilated_attention(*made, [16, 64], [1, 2], backend="sdpa", return_lse=True)[1]
    with pytest.raises(UnsupportedError, match="'sdpa' cannot do this attention: its logsumexp has no gradient"):
        lse.sum().backward()
    with pytest.raises(UnsupportedError, match="'flex' has no backward that takes the logsumexp over all keys"):
        attention.dilated_attention(*made, [16, 64], [1, 2], backend="flex")
    with pytest.raises(UnsupportedError, match="'sdpa' cannot do this attention: it is dense"):
        attention.dilated_attention(*made, [16], [1], backend="sdpa", pattern=attention.window(3))


def test_auto_takes_another_kernel_where_a_gradient_may_come_into_the_logsumexp(monkeypatch):
    monkeypatch.setattr(tune, "nearest", lambda call: {tune.Backend("sdpa"): 1.0})
    ran, forward = [], sdpa.forward
    monkeypatch.setattr(sdpa, "forward", lambda call: ran.append(call) or forward(call))
    q, k, v = drawn()
    out, lse = attention.dilated_attention(q, k, v, [16, 32], [1, 2], return_lse=True)
    (out.sum() + lse.sum()).backward()
    assert not ran and q.grad.isfinite().all()
    attention.dilated_attention(q, k, v, [16, 32], [1, 2]).sum().backward()
    assert ran


def test_what_inference_kept_serves_training():
    made = drawn()
    with torch.inference_mode():
        attention.dilated_attention(*made, [16, 64], [1, 2])
    attention.dilated_attention(*made, [16, 64], [1, 2]).sum().backward()
    assert made[0].grad.isfinite().all()


def test_nonsense_is_refused():
    made = drawn()
    for lengths, rates in (([16], [1, 2]), ([], []), ([0], [1]), ([16], [0]), ([16.5], [1]), (16, [1]), (16, 1)):
        with pytest.raises(ValueError, match="as many positive segment lengths"):
            attention.dilated_attention(*made, lengths, rates)
    with pytest.raises(ValueError, match="of one length"):
        attention.dilated_attention(made[0][:, :, 1:], *made[1:], [16], [1])
    with pytest.raises(ValueError, match="batches and head dimensions must be equal"):
        attention.dilated_attention(made[0], *(x[:1] for x in made[1:]), [16], [1])
    assert attention.dilated_attention(*made, [16], [1]).isfinite().all()
