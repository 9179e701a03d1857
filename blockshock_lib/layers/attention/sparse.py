"""Attention over the keys that a pattern lets each query see, on the fastest right backend."""

import math
from numbers import Real

import torch
from torch import Tensor, nn

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.attention import backends
from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.kernels.attention.pattern import NUMBERED, Pattern, checked
from blockshock_lib.kernels.once import once


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    backend: str = "auto",
    scale: float | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    block: int = 128,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of each query over the keys that `pattern` lets it see.

    q [B, H, S, D]; k and v [B, H / G, S_k, D], G query heads sharing a head of keys; one dtype, one device. `scale`
    multiplies the scores, 1 / sqrt(D) where not given. Returns out [B, H, S, D], and with `return_lse` the logsumexp of
    each query's scaled scores too, fp32 (of the reference q's dtype) [B, H, S], base e. A query that sees no key gets 0
    and -inf. `block`: queries and keys of a block of the lists.

    ValueError where shapes, dtypes or devices do not fit each other or the pattern; UnsupportedError where the backend
    cannot do it, with its reason. To `torch.compile` it is one operator, where a gradient is asked for too of those
    backends that have a backward of their own, among which "auto" then chooses; of others it breaks the graph.
    """
    if dropout:
        raise UnsupportedError("dropout: no backend draws the same for the same seed as another; use it on the output")
    if torch.compiler.is_compiling() and torch.compiler._is_exporting_flag:  # as layers/autograd.py asks
        raise UnsupportedError("torch.export cannot take a pattern along: export with scaled_dot_product_attention")
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    how = backend, scale, block, return_lse
    if not torch.compiler.is_compiling():
        out, lse = _attend(q, k, v, pattern, *how)
    elif grad and backend in _BY_AUTOGRAD:
        out, lse = _graph_break(q, k, v, pattern, *how)
    elif grad:
        out, lse = _Compiled.apply(q, k, v, checked(pattern).number, *how)
    else:
        out, lse = torch.ops.blockshock.attention(q, k, v, checked(pattern).number, *how, False)
    return (out, lse) if return_lse else out


_BY_AUTOGRAD = {name for name, row in backends.BACKENDS.items() if not hasattr(row, "backward")}


def _attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, backend: str, scale: float | None, block: int, lse: bool
) -> tuple[Tensor, Tensor]:
    call = call_of(q, k, v, pattern, scale, lse, block)
    return backends.chosen(backend, call).attend(call)


_graph_break = torch.compiler.disable(_attend)
_held: dict[int, Pattern] = {}  # what compiled calls took last: nobody else holds one made inside till its gradient
MOST_HELD = 128
# As in layers/autograd.py: shapes follow from the arguments, and a Function joins the operators to a gradient.
_ops = torch.library.Library("blockshock", "FRAGMENT")
_HOW = "SymInt pattern, str backend, float? scale, int block, bool lse"
_ops.define(f"attention(Tensor q, Tensor k, Tensor v, {_HOW}, bool grad) -> (Tensor, Tensor)")
_ops.define(
    f"attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor level, Tensor dout, Tensor dlse, {_HOW})"
    " -> (Tensor, Tensor, Tensor)"
)


@torch.library.impl(_ops, "attention", "CompositeExplicitAutograd")
def _attention(q, k, v, pattern, backend, scale, block, lse, grad):
    if not grad:
        out, level = _attend(q, k, v, NUMBERED[pattern], backend, scale, block, lse)
        return out.contiguous(), level.contiguous() if lse else q.new_empty(0)
    _held[pattern] = _held.pop(pattern, NUMBERED[pattern])
    if len(_held) > MOST_HELD:
        del _held[next(iter(_held))]
    call = call_of(q, k, v, NUMBERED[pattern], scale, lse, block)
    return tuple(x.contiguous() for x in backends.explicit(backend, call).forward(call))


@torch.library.register_fake("blockshock::attention", lib=_ops)
def _(q, k, v, pattern, backend, scale, block, lse, grad):
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty(q.shape[:3] if lse or grad else 0, dtype=wide if lse or grad else q.dtype)


@torch.library.impl(_ops, "attention_backward", "CompositeExplicitAutograd")
def _attention_backward(q, k, v, out, level, dout, dlse, pattern, backend, scale, block, lse):
    call = call_of(q, k, v, NUMBERED[pattern], scale, lse, block)
    grads = backends.explicit(backend, call).backward(call, dout, out, level, dlse if lse else None)
    return tuple(x.contiguous() for x in grads)


@torch.library.register_fake("blockshock::attention_backward", lib=_ops)
def _(q, k, v, *_):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, *how):
        out, level = torch.ops.blockshock.attention(q, k, v, *how, True)
        ctx.save_for_backward(q, k, v, out, level)
        ctx.how = how
        return out, level

    @staticmethod
    @once
    def backward(ctx, dout, dlse):
        grads = torch.ops.blockshock.attention_backward(*ctx.saved_tensors, dout, dlse, *ctx.how)
        return *grads, *[None] * len(ctx.how)


def tune(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float | None = None, block: int = 128
) -> dict[str, float]:
    """Measures the backends on calls of these shapes and this pattern, in a process of its own: the milliseconds of
    each whose values are right, the fastest first; of forward and backward where q, k or v requires a gradient. The
    forward alone is then tuned before, for evaluation.

    They are kept on disk, where `backend="auto"` finds them in later processes too, for patterns that are near as well.
    Warns of backends whose values are wrong. UnsupportedError without a GPU, BlockShockError where nothing is right,
    ValueError as of `sparse_attention`.
    """
    call = call_of(q, k, v, pattern, scale, False, block)
    if not q.is_cuda:
        raise UnsupportedError(f"tuning measures GPUs; these tensors lie on {q.device}")
    alone = torch.no_grad()(backends.tuned)(call)
    return backends.tuned(call) if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)) else alone


def call_of(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float | None, lse: bool, block: int) -> Call:
    """A gradient may come into the logsumexp that is asked for. ValueError as of `sparse_attention`."""
    refuse_unfit(q, k, v, pattern, scale)
    lists = pattern.lists(q.shape[2], k.shape[2], block, q.device)
    return Call(q, k, v, pattern, lists, q.shape[3] ** -0.5 if scale is None else scale, lse, lse)


def refuse_unfit(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scale: float | None) -> None:
    """ValueError where operands, of all heads of the pattern but maybe of a share of its positions, do not fit."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape != v.shape or not q.numel() or not k.numel():
        raise ValueError(f"q [B, H, S, D], k and v [B, H / G, S_k, D] are needed, none empty; not {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(f"batches and head dimensions must be equal, and q's heads a multiple of k's; not {shapes}")
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point or q.itemsize < 2:
        raise ValueError(
            f"q, k and v must have one floating dtype of 16 bits or more, not {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must lie on one device, not {q.device}, {k.device} and {v.device}")
    if scale is not None and not (isinstance(scale, Real) and math.isfinite(scale)):
        raise ValueError(f"scale is a finite number, not {scale!r}")
    planes = len(checked(pattern).plane), len(pattern.plane[0])
    if planes[0] not in (1, q.shape[0]) or planes[1] not in (1, q.shape[1]):
        raise ValueError(f"a pattern of {planes[0]} batch elements and {planes[1]} heads does not fit {shapes}")


class SparseAttention(nn.Module):
    """`sparse_attention` with its pattern and options: forward(q, k, v). The style `ContextParallel` shares it."""

    def __init__(self, pattern: Pattern, backend: str = "auto", scale: float | None = None, block: int = 128):
        super().__init__()
        self.pattern, self.backend, self.scale, self.block = checked(pattern), backend, scale, block

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v, self.pattern, self.backend, self.scale, block=self.block)
