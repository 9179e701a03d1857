"""Without a GPU the kernels run in Triton's interpreter, which knows no bf16 product: shapes are small."""

import math
import os

import pytest
import torch

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.attention import triton as kernels
from tests.kernels.attention.lists_of import brute_force, plain

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read as Triton is imported
    if tuple(map(int, pytest.importorskip("numpy").__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("Triton's interpreter, as of 3.6, needs numpy before 2.4", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed: it comes with PyTorch's CUDA builds")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")

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


def wanted(q, k, v, dout, dlse, mask, scale):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = plain(*leaves, mask, scale)
    loss = (out * dout.double()).sum() + (lse.masked_fill(lse == -math.inf, 0) * dlse).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)


def measured(q, k, v, dout, dlse, lists, scale, **options):
    q, k, v, dout, dlse = (x.to(DEVICE) for x in (q, k, v, dout, dlse))
    out, lse = kernels.forward(q, k, v, lists.to(DEVICE), scale, **options)
    grads = kernels.backward(dout, q, k, v, out, lse, lists.to(DEVICE), scale, dlse)
    return [x.cpu() for x in (out, lse, *grads)]


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
    plane = torch.arange(heads)[None] % planes
    inputs, lists = some_inputs(1, heads, k_heads, q_len, k_len, dim), brute_force(mask, BLOCK, plane)
    assert not wrong(measured(*inputs, lists, 0.3), wanted(*inputs, mask[plane], 0.3))


def test_batches_have_planes_of_their_own_in_half_precision():
    mask, plane = some_mask(2, 40, 70), torch.tensor([[1], [0]])
    inputs, lists = some_inputs(2, 2, 1, 40, 70, 32, torch.float16), brute_force(mask, BLOCK, plane)
    want = wanted(*inputs, mask[plane], 0.2)
    assert not wrong(measured(*inputs, lists, 0.2), want, torch.float16)


@pytest.mark.parametrize("cut", [(16, 32), (32, 64), (64, 64)])
def test_a_block_may_be_computed_in_parts(cut):
    mask, config = some_mask(1, 70, 66), kernels.Config(*cut, 4, 2)
    inputs, lists = some_inputs(1, 1, 1, 70, 66, 16), brute_force(mask, 64)
    q, k, v, dout, dlse = (x.to(DEVICE) for x in inputs)
    out, lse = kernels.forward(q, k, v, lists.to(DEVICE), 0.3, config)
    both = kernels.Backward(config, config)
    grads = kernels.backward(dout, q, k, v, out, lse, lists.to(DEVICE), 0.3, dlse, both)
    assert not wrong([x.cpu() for x in (out, lse, *grads)], wanted(*inputs, mask, 0.3))


@pytest.mark.parametrize("splits", [2, 5])
def test_a_row_may_be_shared_by_several_programs(splits):
    mask = some_mask(1, 33, 130)
    inputs, lists = some_inputs(1, 1, 1, 33, 130, 16), brute_force(mask, BLOCK)
    assert not wrong(measured(*inputs, lists, 0.3, splits=splits), wanted(*inputs, mask, 0.3))


def test_outputs_over_disjoint_keys_are_merged():
    mask = some_mask(1, 40, 96)
    inputs = some_inputs(1, 2, 2, 40, 96, 16)
    q, k, v = inputs[:3]
    parts = [plain(q, k[:, :, i::3], v[:, :, i::3], mask[:, :, i::3], 0.3) for i in range(3)]
    out, lse = kernels.merge(*zip(*parts, strict=True))
    assert out.dtype == lse.dtype == torch.float32
    want, log = plain(q, k, v, mask, 0.3)
    torch.testing.assert_close(out, want.float())
    torch.testing.assert_close(lse, log.float())


def test_what_is_masked_out_may_hold_anything():
    mask = some_mask(1, 70, 100)
    mask[:, :, 7] = mask[:, :, 99] = False
    mask[:, 40] = False
    inputs, lists = some_inputs(1, 2, 1, 70, 100, 16), brute_force(mask, BLOCK)
    want = wanted(*inputs, mask, 0.3)
    q, k, v, dout, _ = inputs
    for x, at in ((k, 7), (v, 7), (k, 99), (v, 99), (q, 40), (dout, 40)):
        x[:, :, at] = math.inf if at == 99 else math.nan
    assert not wrong(measured(*inputs, lists, 0.3), want)


def test_a_nan_is_seen_where_it_is_attended_and_nowhere_else():
    mask = some_mask(1, 70, 100)
    inputs, lists = some_inputs(1, 1, 1, 70, 100, 16), brute_force(mask, BLOCK)
    want = wanted(*inputs, mask, 0.3)
    q, k, v, dout, dlse = inputs
    bad = v.clone()
    bad[:, :, 3] = math.nan
    out = measured(q, k, bad, dout, dlse, lists, 0.3)[0]
    assert torch.equal(out.isnan().any(-1)[0], mask[:, :, 3])
    torch.testing.assert_close(out[:, :, ~mask[0, :, 3]], want[0].float()[:, :, ~mask[0, :, 3]])
    bad = dout.clone()
    bad[:, :, 68] = math.nan
    _, _, dq, dk, dv = measured(q, k, v, bad, dlse, lists, 0.3)
    assert dq.isnan().any(-1).nonzero().tolist() == [[0, 0, 68]]
    for got, grad in ((dk, want[3]), (dv, want[4])):
        assert torch.equal(got.isnan().any(-1)[0], mask[:, 68])
        torch.testing.assert_close(got[:, :, ~mask[0, 68]], grad.float()[:, :, ~mask[0, 68]])


def swapped(lists):
    lists.tiles.copy_(lists.tiles.flip(1))


def without_partial(lists):
    lists.rows.partial_at.zero_()


def other_tiles(lists):
    lists.columns.tile.copy_(lists.columns.tile.flip(0))


@pytest.mark.parametrize("fault, name", [(swapped, "out"), (without_partial, "out"), (other_tiles, "dk")])
def test_lists_decide_what_is_computed(fault, name):
    mask = some_mask(1, 96, 96)
    inputs, lists = some_inputs(1, 1, 1, 96, 96, 16), brute_force(mask, BLOCK)
    fault(lists)
    assert name in wrong(measured(*inputs, lists, 0.3), wanted(*inputs, mask, 0.3))


@pytest.mark.parametrize("name", ["list ignored", "stale tail", "zero dq", "lse in base 2", "dropped dlse"])
def test_the_gate_catches(name):
    mask = some_mask(1, 70, 100)
    inputs = some_inputs(1, 1, 1, 70, 100, 16)
    right = wanted(*inputs, mask, 0.3)
    dense = wanted(*inputs, torch.ones_like(mask), 0.3)
    bare = wanted(*inputs[:4], torch.zeros_like(inputs[4]), mask, 0.3)
    out, lse, dq, dk, dv = right
    planted = {
        "list ignored": (dense, list(NAMES)),
        "stale tail": ((torch.cat([out[:, :, :-3], dense[0][:, :, -3:]], 2), lse, dq, dk, dv), ["out"]),
        "zero dq": ((out, lse, torch.zeros_like(dq), dk, dv), ["dq"]),
        "lse in base 2": ((out, lse / math.log(2), dq, dk, dv), ["lse"]),
        "dropped dlse": (bare, ["dq", "dk"]),
    }
    got, caught = planted[name]
    assert not wrong(right, right) and wrong(got, right) == caught


@pytest.mark.parametrize(
    "change, error, says",
    [
        (dict(q=(1, 1, 33, 16)), ValueError, "lists of 32 queries"),
        (dict(v=(1, 1, 64, 8)), ValueError, "do not go together"),
        (dict(q=(1, 3, 32, 16), k=(1, 2, 64, 16), v=(1, 2, 64, 16)), ValueError, "do not go together"),
        (dict(dtype=torch.float64), UnsupportedError, "bf16, fp16, fp32"),
        (dict(q=(1, 1, 32, 320), k=(1, 1, 64, 320), v=(1, 1, 64, 320)), UnsupportedError, "up to 256"),
        (dict(scale=-1.0), UnsupportedError, "scale"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, says):
    lists = brute_force(torch.ones(1, 32, 64, dtype=torch.bool), BLOCK)
    shapes = dict(q=(1, 1, 32, 16), k=(1, 1, 64, 16), v=(1, 1, 64, 16))
    dtype = change.get("dtype", torch.float32)
    operands = (torch.zeros(change.get(name, shape), dtype=dtype) for name, shape in shapes.items())
    with pytest.raises(error, match=says):
        kernels.forward(*operands, lists, change.get("scale", 0.3))


@pytest.mark.parametrize("block", [32, 96, 128])
def test_each_candidate_divides_the_block(block):
    for dim in (64, 96, 128, 256):
        for cuts in kernels.candidates(dim, block).values():
            assert len(set(cuts)) == len(cuts)
            assert all(block % cut.block_m == 0 and block % cut.block_n == 0 for cut in cuts)
