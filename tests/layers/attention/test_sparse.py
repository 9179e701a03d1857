"""attention.sparse_attention: each backend against dense attention in float64, and what is refused."""

import copy
import math
import pickle
import re
from types import SimpleNamespace

import pytest
import torch

from blockshock_lib import attention
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels import needs
from blockshock_lib.kernels.attention import flex
from blockshock_lib.kernels.attention.backends import BACKENDS
from blockshock_lib.kernels.attention.call import Call
from tests.kernels.attention import dense

PATTERNS = {
    "causal": attention.causal(),
    "window": attention.causal() & attention.window(40),
    "by head": attention.by_head(
        [attention.full(), attention.random(0.4, 1, 32), attention.random(0.0), attention.window(9)]
    ),
    "documents": attention.documents([30, 1, 69]) & attention.causal(),
}


def drawn(q_len=100, k_len=100, heads=4, groups=2, width=16, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    shapes = (2, heads, q_len, width), *[(2, heads // groups, k_len, width)] * 2
    return [torch.randn(shape, generator=draw, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("name", PATTERNS)
def test_values_and_gradients_equal_dense_attention(name, backend):
    made, pattern = drawn(), PATTERNS[name]
    out, lse = attention.sparse_attention(*made, pattern, backend, return_lse=True, block=32)
    right, right_lse = dense.attention(*made, dense.whole_mask(pattern, 100, 100, 2, 4), 0.25)
    seen = right_lse.isfinite()
    assert torch.equal(seen, lse.isfinite()) and (lse[~seen] == -math.inf).all() and not out[~seen].any()
    torch.testing.assert_close((out, lse[seen]), (right, right_lse[seen].to(lse.dtype)), atol=1e-12, rtol=0)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    each = (
        torch.autograd.grad((x * upstream).sum() + y[seen].sum(), made) for x, y in ((out, lse), (right, right_lse))
    )
    torch.testing.assert_close(*each, atol=1e-12, rtol=0)


def test_the_reference_passes_gradcheck_with_fewer_queries_than_keys():
    made = drawn(5, 9, 2, 2, 3)
    pattern = attention.causal() & attention.window(4)
    call = lambda *x: attention.sparse_attention(*x, pattern, "reference", return_lse=True, block=32)  # noqa: E731
    assert torch.autograd.gradcheck(call, made)


@pytest.mark.parametrize("name", PATTERNS)
def test_flex_sees_by_our_lists_and_our_rule(name):
    made = [x.detach().float() for x in drawn()]
    both = (attention.sparse_attention(*made, PATTERNS[name], each, return_lse=True) for each in ("flex", "reference"))
    torch.testing.assert_close(*both, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "flex"])
def test_autocast_changes_no_value(backend):
    made = [x.float() for x in drawn(groups=1)]
    given = [x.detach() for x in made] if backend == "flex" else made

    def on():
        out, lse = attention.sparse_attention(*given, attention.causal(), backend, return_lse=True)
        short = attention.sparse_attention(*given, attention.causal(), backend)
        return out, lse, short, *attention.dilated_attention(*made, [16, 64], [1, 2], return_lse=True)

    right = on()
    with torch.autocast("cpu", torch.bfloat16):
        found = on()
        mine = torch.autograd.grad(found[3].sum(), made)
    torch.testing.assert_close((*found, *mine), (*right, *torch.autograd.grad(right[3].sum(), made)), atol=1e-6, rtol=0)
    if backend != "flex":
        torch.testing.assert_close(*(torch.autograd.grad(each[0].sum(), made) for each in (found, right)))


@pytest.mark.parametrize("lse", [False, True])
def test_to_the_compiler_it_is_one_operator(lse):
    model = attention.SparseAttention(PATTERNS["window"], block=32)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert copied.pattern.number != model.pattern.number
    for layer in (model, copied):

        def attend(q, k, v, layer=layer):
            found = attention.sparse_attention(q * 1.0, k, v, layer.pattern, return_lse=lse, block=32)
            return found[0].square().sum() + found[1].sum() if lse else layer(q * 1.0, k, v).square().sum()

        made, whole = drawn(), torch.compile(attend, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(*(torch.autograd.grad(run(*made), made) for run in (whole, attend)))
        with torch.no_grad():
            torch.testing.assert_close(whole(*made), attend(*made))
    q, k, v = (x.detach() for x in made)
    for grad in (False, True):
        torch.library.opcheck(
            torch.ops.blockshock.attention, (q, k, v, layer.pattern.number, "reference", None, 32, lse, grad)
        )


@pytest.mark.parametrize("strict", [False, True])
def test_no_other_process_gets_the_number_of_a_pattern(strict):
    with pytest.raises(Exception, match=r"torch\.export cannot take a pattern along"):
        torch.export.export(attention.SparseAttention(PATTERNS["causal"]), tuple(drawn()), strict=strict)


def test_a_pattern_made_in_what_is_compiled_lives_till_its_gradient_and_makes_no_further_graphs():
    made, seen = drawn(), []

    def attend(q, k, v):
        return attention.sparse_attention(q * 1.0, k, v, attention.causal() & attention.window(9), block=32).sum()

    whole = torch.compile(attend, backend="aot_eager")
    for _ in range(5):
        grads = torch.autograd.grad(whole(*made), made)
        seen.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert seen[2:] == [seen[2]] * 3, "each step's pattern is another object"
    torch.testing.assert_close(grads, torch.autograd.grad(attend(*made), made))


@pytest.mark.long
def test_what_is_no_operator_breaks_the_graph():
    made = [x.float() for x in drawn()]
    for attend in (
        lambda q, k, v: 2 * attention.sparse_attention(q * 1.0, k, v, attention.window(9)),
        lambda q, k, v: 2 * attention.dilated_attention(q * 1.0, k, v, [16, 64], [1, 4]),
    ):
        outs = [run(*made) for run in (attend, torch.compile(attend, backend="aot_eager"))]
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(*(torch.autograd.grad(out.sum(), made) for out in outs))


@pytest.mark.parametrize("pattern", [attention.full(), attention.causal()])
def test_sdpa_is_the_dense_one(pattern):
    made = drawn()
    right = attention.sparse_attention(*made, pattern, "reference")
    torch.testing.assert_close(attention.sparse_attention(*made, pattern, "sdpa"), right)
    made = drawn(groups=1)
    both = [attention.sparse_attention(*made, pattern, name, return_lse=True) for name in ("sdpa", "reference")]
    torch.testing.assert_close(*both)
    torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), made) for out, _ in both))


@pytest.mark.parametrize("backend", [name for name in ("auto", *BACKENDS)])
def test_what_is_masked_out_may_be_nan_or_the_backend_says_that_it_may_not(backend):
    """Those that need a GPU or Triton's interpreter say so here; of the interpreter see test_triton.py."""
    q, k, v = (x.detach() for x in drawn())
    call = lambda: attention.sparse_attention(q, k, v, attention.causal(), backend, block=32)  # noqa: E731
    k[:, :, 60], v[:, :, 61, 3] = math.nan, math.inf
    if backend in ("auto", "reference"):
        assert call()[:, :, :60].isfinite().all() and call()[:, :, 61:].isnan().all()
        k[:, :, 60] = 1.0  # what is lost of a value is none of the logsumexp, of a key or a query it is
        level = lambda: attention.sparse_attention(q, k, v, attention.causal(), backend, block=32, return_lse=True)[1]  # noqa: E731
        right = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[3] ** -0.5).masked_fill(
            ~torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(), -math.inf
        )
        torch.testing.assert_close(level(), right.logsumexp(-1))
        k[:, :, 60], q[:, :, 3] = math.nan, math.nan
        lost = level().isnan().all(1).all(0).nonzero().flatten().tolist()
        assert lost == [3, *range(60, q.shape[2])] == level().isnan().any(1).any(0).nonzero().flatten().tolist()
    else:
        with pytest.raises(UnsupportedError, match=r"a key or value is NaN or Inf|needs a|Hopper GPUs only"):
            call()
    if backend == "sdpa":
        k[:], v[:], q[:, :, 3] = 1.0, 1.0, math.nan
        with pytest.raises(UnsupportedError, match="may give a query of NaN or Inf an output of 0"):
            call()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q[0], k, v), "are needed, none empty"),
        (lambda q, k, v: (q, k, v[:, :, 1:]), "are needed, none empty"),
        (lambda q, k, v: (q, k[:1], v[:1]), "batches and head dimensions must be equal"),
        (lambda q, k, v: (q[:, :3], k, v), "q's heads a multiple of k's"),
        (lambda q, k, v: (q[:, :2], k, v), "of 1 batch elements and 4 heads does not fit"),
        (lambda q, k, v: (q, k.float(), v), "one floating dtype"),
        (lambda *x: [each.to(torch.float8_e4m3fn) for each in x], "one floating dtype of 16 bits or more"),
        (lambda q, k, v: (q, k.to("meta"), v.to("meta")), "on one device"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        attention.sparse_attention(*change(*drawn()), PATTERNS["by head"])


def test_what_is_no_pattern_and_no_number_is_refused():
    made = drawn()
    for wrong in ("causal", torch.ones(100, 100, dtype=torch.bool), 3):
        for attend in (
            lambda: attention.sparse_attention(*made, wrong),  # noqa: B023
            lambda: attention.dilated_attention(*made, [16], [1], pattern=wrong),  # noqa: B023
            lambda: attention.SparseAttention(wrong),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=r"pattern is a Pattern, as attention.causal.* not a"):
                attend()
    with pytest.raises(ValueError, match=r"pattern is a Pattern.*not a NoneType"):
        attention.sparse_attention(*made, None)
    for scale in ("a", math.nan, torch.tensor(0.25)):
        with pytest.raises(ValueError, match="scale is a finite number"):
            attention.sparse_attention(*made, attention.causal(), scale=scale)


def test_what_a_backend_cannot_do_is_refused_by_its_reason():
    made = drawn()
    for backend, pattern, options, words in (
        ("sdpa", PATTERNS["window"], {}, "it is dense"),
        ("sdpa", attention.causal(), {"return_lse": True}, "as many heads of keys as of queries"),
        ("fa4", attention.causal(), {}, "Hopper GPUs only"),
        ("cudnn", attention.causal(), {}, "Hopper GPUs only"),
        ("flex", attention.causal(), {}, "no gradients"),
        *(("sdpa", attention.causal(), {"scale": scale}, "it needs one over 0") for scale in (-1.0, 0.0)),
        ("reference", attention.causal(), {"dropout": 0.1}, "dropout"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            attention.sparse_attention(*made, pattern, backend, **options)
    with pytest.raises(ValueError, match=r"unknown backend 'flax'.*did you mean 'flex'"):
        attention.sparse_attention(*made, attention.causal(), "flax")
    assert all(BACKENDS[name].__doc__ for name in BACKENDS)


def test_flex_is_compiled_for_more_patterns_than_pytorch_allows_a_function(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with torch._dynamo.config.patch(recompile_limit=8):  # monkeypatch would delete what it cannot find in __dict__
        flex._compiled.__wrapped__(None)
        assert torch._dynamo.config.recompile_limit >= 100


@pytest.mark.parametrize(
    ("backend", "change", "words"),
    [
        *((name, {"gone": True}, "is not installed .the extra `attention`") for name in ("fa4", "cudnn")),
        *((name, {"major": 10}, "Hopper GPUs only") for name in ("fa4", "cudnn")),
        *((name, {"pattern": attention.window(9)}, "partial blocks") for name in ("fa4", "cudnn")),
        ("fa4", {"pattern": attention.causal(), "block": 64}, ""),  # it needs no lists
        *((name, {"dtype": torch.float32}, "it takes bf16") for name in ("fa4", "cudnn")),
        *((name, {"dim": 256}, "head dimensions") for name in ("fa4", "cudnn")),
        ("fa4", {"block": 64, "pattern": attention.block_diagonal(64)}, "blocks of 128"),
        ("cudnn", {"block": 96}, "blocks of 64 or 128"),
        ("cudnn", {"grad": True, "dim": 64}, "with gradients 128 only"),
        ("cudnn", {"grad": True, "dtype": torch.float16}, "fp16 without gradients"),
        ("cudnn", {"grad": True, "kv_heads": 1}, "as many heads of keys"),
        ("cudnn", {"grad": True, "lse": True}, "its logsumexp has no gradient"),
        *((name, {}, "") for name in ("fa4", "cudnn")),
    ],
)
def test_a_beta_on_a_hopper_gpu_says_what_it_lacks(backend, change, words, monkeypatch):
    how = {"gone": False, "major": 9, "pattern": attention.full(), "dtype": torch.bfloat16, "dim": 128, "block": 128}
    how |= {"grad": False, "kv_heads": 2, "lse": False} | change
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (how["major"], 0))
    monkeypatch.setattr(needs, "version", lambda name: "")
    lacks = lambda *names: needs.lacks.__wrapped__(*names) if how["gone"] else ""  # noqa: E731
    monkeypatch.setattr(f"blockshock_lib.kernels.attention.{backend}.lacks", lacks)
    q, k = (
        SimpleNamespace(
            device=torch.device("cuda"),
            dtype=how["dtype"],
            shape=(1, heads, 384, how["dim"]),
            requires_grad=how["grad"],
        )
        for heads in (2, how["kv_heads"])
    )
    lists = how["pattern"].lists(384, block=how["block"])
    why = BACKENDS[backend].refuse(Call(q, k, k, how["pattern"], lists, 1.0, how["lse"]))
    assert re.search(words, why) and bool(why) == bool(words)


def test_what_flex_attention_cannot_compile_is_refused_and_another_error_is_not_hidden(monkeypatch):
    class InductorError(RuntimeError):
        """As torch's, whose place in torch moves."""

    def failing(error):
        def run(*_, **__):
            raise error

        monkeypatch.setattr(flex.flex, "flex_attention", run)

    q = torch.randn(1, 2, 40, 16)
    failing(InductorError("LoweringException: no choices\nand more"))
    with pytest.raises(UnsupportedError, match="for this: LoweringException: no choices"):
        attention.sparse_attention(q, q, q, attention.causal(), backend="flex")
    failing(RuntimeError("an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory"):
        attention.sparse_attention(q, q, q, attention.causal(), backend="flex")
