"""Without a GPU the kernels run in Triton's interpreter, which knows no bf16 product: shapes are small."""

import importlib.util
import math

import pytest
import torch

from blockshock_lib import attention
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.attention import reference
from blockshock_lib.kernels.attention import triton as kernels
from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.kernels.attention.merge import absorb
from tests.kernels.attention import dense

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in"),
    pytest.mark.filterwarnings("ignore:overflow encountered in matmul"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered"),
]


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    """Read as the kernels are imported, and by `refuse`; Triton itself was imported so (tests/conftest.py)."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        yield


BLOCK = 32
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
"""Of the norm of the difference from float64, relative."""
NAMES = "out", "lse", "dq", "dk", "dv"


def some_mask(planes, q_len, k_len, seed=0):
    """Full, partial and empty blocks, and rows that see nothing where there are several."""
    draw = torch.Generator().manual_seed(seed)
    kinds = torch.rand(planes, -(-q_len // BLOCK), -(-k_len // BLOCK), generator=draw)
    kinds = kinds.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :q_len, :k_len]
    mask = (torch.rand(planes, q_len, k_len, generator=draw) < 0.4) & (kinds < 0.8) | (kinds < 0.35)
    mask[:, q_len // 2] &= q_len == 1
    return mask


def some_inputs(batch, heads, k_heads, q_len, k_len, dim, dtype=torch.float32):
    """q, k, v, dout, dlse; k lies as [B, S, H, D]."""
    draw = torch.Generator().manual_seed(1)
    shapes = [(batch, heads, q_len, dim), (batch, k_len, k_heads, dim), (batch, k_heads, k_len, dim)]
    q, k, v, dout = (torch.randn(shape, generator=draw).to(dtype) for shape in (*shapes, shapes[0]))
    return q, k.transpose(1, 2), v, dout, torch.randn(batch, heads, q_len, generator=draw)


def lists_of(mask, block=BLOCK):
    """mask: bool [planes, q_len, k_len], of the heads, or [B, H, q_len, k_len]."""
    mask = mask if mask.dim() == 4 else mask[None]
    return attention.from_mask(mask).lists(*mask.shape[2:], block, DEVICE)


def wanted(q, k, v, dout, dlse, mask, scale):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = dense.attention(*leaves, mask, scale)
    loss = (out * dout.double()).sum() + (lse.masked_fill(lse == -math.inf, 0) * dlse).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)


def measured(q, k, v, dout, dlse, lists, scale, cuts=kernels.UNTUNED, splits=None, by=kernels):
    q, k, v, dout, dlse = (x.to(DEVICE) for x in (q, k, v, dout, dlse))
    call, own = Call(q, k, v, None, lists, scale), (cuts,) if by is kernels else ()
    out, lse = by.forward(call, *own, *((splits,) if own else ()))
    return [x.cpu() for x in (out, lse, *by.backward(call, dout, out, lse, dlse, *own))]


either = pytest.mark.parametrize("by", [kernels, reference])


def wrong(got, want, dtype=torch.float32):
    """What is not as it should be, by name."""
    found = []
    for name, a, b in zip(NAMES, got, want, strict=True):
        same = torch.equal(a.isinf(), b.isinf())
        a, b = (x.double().masked_fill(x.isinf(), 0) for x in (a, b))
        if not same or not (a - b).norm() <= TOLERANCE[dtype] * b.norm():
            found.append(name)
    return found


@pytest.mark.parametrize(
    "q_len, k_len, dim, heads, k_heads, planes",
    [(1, 1, 16, 1, 1, 1), (1, 100, 32, 2, 1, 1), (70, 40, 16, 4, 2, 2), (64, 64, 96, 1, 1, 1), (40, 65, 24, 3, 1, 3)],
)
def test_results_and_gradients_are_those_of_plain_attention(q_len, k_len, dim, heads, k_heads, planes):
    mask = some_mask(planes, q_len, k_len)
    mask = mask[torch.arange(heads) % planes] if planes > 1 else mask
    inputs = some_inputs(1, heads, k_heads, q_len, k_len, dim)
    assert not wrong(measured(*inputs, lists_of(mask), 0.3), wanted(*inputs, mask, 0.3))


def test_batches_have_planes_of_their_own_in_half_precision():
    mask = some_mask(2, 40, 70)[:, None]
    inputs = some_inputs(2, 2, 1, 40, 70, 32, torch.float16)
    assert not wrong(measured(*inputs, lists_of(mask), 0.2), wanted(*inputs, mask, 0.2), torch.float16)


@pytest.mark.parametrize("cut, splits", [((16, 32), None), ((32, 64), 2), ((64, 64), 5)])
def test_a_block_may_be_computed_in_parts_and_a_row_shared_by_several_programs(cut, splits):
    mask = some_mask(1, 70, 130)
    cuts = {kernel: kernels.Config(kernel, *cut, 4, 2) for kernel in ("forward", "dq", "dkdv")}
    inputs = some_inputs(1, 1, 1, 70, 130, 16)
    assert not wrong(measured(*inputs, lists_of(mask, 64), 0.3, cuts, splits), wanted(*inputs, mask, 0.3))


def test_of_what_a_faster_kernel_made_only_the_bad_is_computed_again():
    mask = some_mask(2, 200, 200)
    q, k, v, *_ = some_inputs(1, 2, 2, 200, 200, 64)
    call = Call(q, k, v, None, lists_of(mask, 128), 0.2)
    out, lse = kernels.forward(call)
    bad = torch.tensor([[[0, 1, 0, 0], [0, 0, 0, 1]]], dtype=torch.int32)  # of 64 queries each
    again, level = kernels.forward(call, {}, 1, (torch.full_like(out, 7), torch.full_like(lse, 7), bad))
    here = bad.repeat_interleave(64, 2)[..., :200].bool()
    assert torch.equal(again, torch.where(here[..., None], out, 7)) and torch.equal(level, torch.where(here, lse, 7))


@either
def test_what_is_masked_out_may_hold_anything(by):
    mask = some_mask(1, 70, 100)
    mask[:, :, 7] = mask[:, :, 99] = False
    mask[:, 40] = False
    inputs, lists = some_inputs(1, 2, 1, 70, 100, 16), lists_of(mask)
    want = wanted(*inputs, mask, 0.3)
    q, k, v, dout, _ = inputs
    for x, at in ((k, 7), (v, 7), (k, 99), (v, 99), (q, 40), (dout, 40)):
        x[:, :, at] = math.inf if at == 99 else math.nan
    assert not wrong(measured(*inputs, lists, 0.3, by=by), want)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_no_number_is_seen_where_it_is_attended_and_nowhere_else(value):
    mask = some_mask(1, 70, 100)
    inputs = some_inputs(1, 1, 1, 70, 100, 16)
    want, (q, k, v, *_) = wanted(*inputs, mask, 0.3), (x.to(DEVICE) for x in inputs)
    v[:, :, 3] = value
    out, lse = (x.cpu() for x in kernels.forward(Call(q, k, v, None, lists_of(mask), 0.3)))
    assert torch.equal(out.isfinite().all(-1)[0], ~mask[:, :, 3])
    torch.testing.assert_close(lse.double(), want[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out[:, :, ~mask[0, :, 3]], want[0].float()[:, :, ~mask[0, :, 3]])


@either
def test_a_gradient_that_is_no_number_reaches_what_was_attended_and_nothing_else(by):
    mask = some_mask(1, 70, 100)
    inputs = some_inputs(1, 1, 1, 70, 100, 16)
    want = wanted(*inputs, mask, 0.3)
    inputs[3][:, :, 68] = math.nan
    _, _, dq, dk, dv = measured(*inputs, lists_of(mask), 0.3, by=by)
    assert dq.isnan().any(-1).nonzero().tolist() == [[0, 0, 68]]
    for got, grad in ((dk, want[3]), (dv, want[4])):
        assert torch.equal(got.isnan().any(-1)[0], mask[:, 68])
        torch.testing.assert_close(got[:, :, ~mask[0, 68]], grad.float()[:, :, ~mask[0, 68]])


@either
@pytest.mark.parametrize("what", [(1, 2), (0, 1, 2)])
def test_padding_that_no_loss_counts_may_hold_anything_and_see_all(by, what):
    mask = torch.ones(1, 130, 130, dtype=torch.bool).tril()  # the last rows see whole blocks of real keys
    inputs = some_inputs(1, 2, 1, 130, 130, 16)
    inputs[3][:, :, 100:] = inputs[4][:, :, 100:] = 0
    want = [x[:, :, :100] for x in wanted(*inputs, mask, 0.3)]
    for place in what:
        inputs[place][:, :, 100:] = math.nan
    made = measured(*inputs, lists_of(mask), 0.3, by=by)
    assert not wrong([x[:, :, :100] for x in made], want) and not made[2][:, :, 100:].any()


@either
def test_a_query_that_saw_an_infinite_score_has_no_gradient_but_nan(by):
    mask = torch.ones(1, 40, 40, dtype=torch.bool).tril()
    inputs = some_inputs(1, 1, 1, 40, 40, 16)
    inputs[0][:, :, 30], inputs[1][:, :, 8] = 3e38, 3e38
    _, _, dq, dk, _ = measured(*inputs, lists_of(mask), 0.3, by=by)
    assert dq[:, :, 30].isnan().all() and dk[:, :, 3].isnan().all()


def swapped(lists):
    lists.tiles.copy_(lists.tiles.flip(1))


def without_partial(lists):
    lists.rows.partial_at.zero_()


def other_tiles(lists):
    lists.columns.tile.copy_(lists.columns.tile.flip(0))


@pytest.mark.parametrize("fault, name", [(swapped, "out"), (without_partial, "out"), (other_tiles, "dk")])
def test_lists_decide_what_is_computed(fault, name):
    mask = some_mask(1, 96, 96)
    inputs, lists = some_inputs(1, 1, 1, 96, 96, 16), lists_of(mask)
    fault(lists)
    assert name in wrong(measured(*inputs, lists, 0.3), wanted(*inputs, mask, 0.3))


def test_values_and_both_gradients_come_through_autograd_and_parts_of_the_keys_merge():
    mask = some_mask(1, 40, 96)
    q, k, v, dout, dlse = (x.to(DEVICE) for x in some_inputs(1, 2, 1, 40, 96, 16))
    found = []
    for backend in ("triton", "reference"):
        made = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = attention.sparse_attention(
            *made, attention.from_mask(mask[None].to(DEVICE)), backend, return_lse=True, block=32
        )
        seen = lse.isfinite()
        loss = (out * dout).sum() + (lse[seen] * dlse[seen]).sum()
        found.append([out, lse, *torch.autograd.grad(loss, made)])
    assert not wrong(*([x.detach().cpu() for x in each] for each in found))
    whole = lists_of(mask)
    parts = [
        Call(q, k[:, :, at], v[:, :, at], None, whole.select(*blocks), 0.25)
        for at, blocks in (
            (slice(0, 64), (torch.arange(2, device=DEVICE), torch.arange(2, device=DEVICE))),
            (slice(64, 96), (torch.arange(2, device=DEVICE), torch.tensor([2], device=DEVICE))),
        )
    ]
    ours, theirs = (
        [backend.backward(part, dout, *found[1][:2], dlse) for part in parts] for backend in (kernels, reference)
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_part_is_absorbed_as_parts_are_merged():
    draw = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(3, 2, 5, 8, generator=draw).half(), torch.randn(3, 2, 5, generator=draw)
    outs[:, 0, :3], lses[:, 0, :3] = 0, -torch.inf  # no part sees a key
    outs[1, 1, 0], lses[1, 1, 0] = 0, -torch.inf
    outs, lses = outs.to(DEVICE), lses.to(DEVICE)
    out, lse = outs[0].float(), lses[0]
    for found, level in zip(outs[1:], lses[1:], strict=True):
        lse = absorb(out, lse, found, level)
    torch.testing.assert_close((out, lse), dense.merge(outs.float(), lses))


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(dtype=torch.float64), "bf16 .*, fp16 and fp32"),
        (dict(dim=320), "up to 256"),
        (dict(scale=-1.0), "scale of 0 or more"),
        (dict(off="1"), "needs a CUDA device"),
        (dict(gone=True), "triton is not installed"),
    ],
)
def test_what_it_cannot_do_is_refused_by_its_reason(change, says, monkeypatch):
    q = torch.zeros(1, 1, 32, change.get("dim", 16), dtype=change.get("dtype", torch.float32))
    q = q if "off" in change else q.to(DEVICE)
    if "off" in change:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if "gone" in change:
        monkeypatch.setattr(kernels, "installed", lambda: False)
    with pytest.raises(UnsupportedError, match=says):
        attention.sparse_attention(q, q, q, attention.causal(), "triton", change.get("scale"))


@pytest.mark.parametrize("block", [32, 96, 128])
def test_each_candidate_divides_the_block(block):
    for dim in (64, 96, 128, 256):
        for cuts in kernels.candidates(dim, block).values():
            assert len(set(cuts)) == len(cuts)
            assert all(block % cut.block_m == 0 and block % cut.block_n == 0 for cut in cuts)


@pytest.mark.parametrize("weighed", [True, False])
def test_rows_are_added_in_one_pass_to_where_they_belong(weighed):
    from blockshock_lib.kernels.attention import triton_merge

    whole = torch.randn(2, 4, 30, 24, device=DEVICE)  # segments of 10, each second position, of the odd heads the odd
    shape, strides = (2, 3, 2, 2, 5, 24), (2880, 240, 1440, 744, 48, 1)
    part, weights = torch.randn(shape, device=DEVICE).half(), torch.rand(shape[:-1], device=DEVICE)
    wanted = whole.double()
    wanted.as_strided(shape, strides).addcmul_(part, weights[..., None] if weighed else part.new_ones(()))
    triton_merge.add(whole.as_strided(shape, strides), part, weights if weighed else None)
    assert torch.allclose(whole.double(), wanted, rtol=1e-6, atol=1e-6)
