"""One backend's attention of a call's shapes, held against the truth in float64 before it is timed: some heads whole,
and in calls that differ in what a choice is kept for, all heads at some queries and keys.
"""

import contextlib
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockshock_lib.errors import first_line
from blockshock_lib.kernels.attention import rules
from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.kernels.attention.pattern import Pattern, by_head
from blockshock_lib.kernels.graph import guarded
from blockshock_lib.kernels.tuning.search import Error

TWICE = 2.0  # the error of another rounding of the operands is unavoidable; kernels' faults are tens of times that
FINEST = 2.0**-21  # sums in fp32 round more often than fp32 operands do
CHECKED, MOST = 2, 4096  # heads of keys, and queries of them, that are held against the truth with all keys
QUERIES, KEYS = 128, 256  # of all heads, that are


class Draw(NamedTuple):
    """Operands, and of some heads, queries and keys the truth and what another rounding of the operands makes of it."""

    call: Call
    dout: Tensor  # as dlse 0 of other queries
    dlse: Tensor
    heads: Tensor  # of keys, among those of all batch elements
    queries: Tensor
    keys: Tensor
    truth: list[Tensor]  # out, lse; where gradients are wanted dq, dk, dv of dout alone, and of dout and dlse
    other: list[Tensor]


def packed(call: Call) -> bytes:
    """What another process needs to draw a call of these shapes."""
    shapes = tuple(call.q.shape), tuple(call.k.shape)
    return pickle.dumps((call.pattern, shapes, call.lists.block, call.scale, call.q.dtype))


def drawn(told: bytes, device: torch.device, grad: bool, seed: int, variant: int | None = None) -> Draw:
    """`told`: of `packed`. The truth is of CHECKED heads. With a `variant`, of all heads at fewer queries and keys, and
    the call has strides and a scale of its own: 0, the last key is NaN and seen by nobody; 1, it is seen by nobody, and
    every other head sees none of the last block; 2, this alone, for who has no partial blocks; 3, no other pattern.
    """
    pattern, ((batch, heads, q_len, dim), (_, k_heads, k_len, _)), block, scale, dtype = pickle.loads(told)
    rng, group = torch.Generator(device).manual_seed(seed), heads // k_heads
    draw = lambda *shape: torch.randn(shape, generator=rng, device=device)  # noqa: E731
    q, dout = (draw(batch, q_len, heads, dim).to(dtype).transpose(1, 2) for _ in range(2))
    k, v = (x.transpose(1, 2) for x in draw(batch, k_len, 2, k_heads, dim).to(dtype).unbind(2))
    some = lambda count: torch.randperm(count, generator=rng, device=device)  # noqa: E731
    queries, keys, every = (torch.arange(length, device=device) for length in (q_len, k_len, batch * k_heads))
    if variant is None:
        q, k, v, dout = (x.contiguous() for x in (q, k, v, dout))
        every, queries = some(len(every))[:CHECKED], some(q_len)[:MOST]
    else:
        seen, scale, queries = k_len - (variant < 2), 0.8 * scale, some(q_len)[:QUERIES]
        cut = (k_len - 1) // block * block or seen
        parts = [Pattern((((rules.Strip(rules.FAR, 0, most),),),)) for most in (seen, min(cut, seen))]
        part = by_head([parts[head % 2] for head in range(heads)]) if variant else parts[0]
        pattern = pattern & part if variant < 3 else pattern
        near = pattern.sees(queries[:, None], keys, q_len, k_len).any(0).nonzero()[:, 0]
        keys = torch.cat((some(k_len)[: KEYS // 4], near[some(len(near))[: KEYS * 3 // 4]]))
    live = torch.zeros(q_len, device=device).index_fill(0, queries, 1)
    dout, dlse = dout * live[:, None].to(dtype), draw(batch, heads, q_len) * live
    made: tuple[list, list] = [], []
    for b, h in (divmod(number, k_heads) for number in every.tolist()):
        of = slice(h * group, (h + 1) * group)
        sees = [partial(pattern.sees, q_len=q_len, k_len=k_len, batch=b, head=head) for head in range(heads)[of]]
        exact = [x.double() for x in (q[b, of, queries], k[b, h], v[b, h], dout[b, of, queries])]
        rounded = [x * (1 + _unit(q) * draw(*x.shape).sign()) for x in exact]
        for found, operands in zip(made, (exact, rounded), strict=True):
            more = [0, dlse[b, of, queries].double()][: grad * (1 + (variant is not None))]
            found.append(_truth(*operands, more, sees, queries, keys, scale))
    truth, other = ([torch.stack(each) for each in zip(*found, strict=True)] for found in made)
    if variant == 0:
        k[:, :, -1] = v[:, :, -1] = torch.nan
    lists = pattern.lists(q_len, k_len, block, device)
    call = Call(*(x.requires_grad_(grad) for x in (q, k, v)), pattern, lists, scale)
    return Draw(call, dout, dlse, every, queries, keys, truth, other)


def _truth(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, more: Sequence, sees: Sequence[Callable], queries: Tensor,
    keys: Tensor, scale: float,
) -> list[Tensor]:  # fmt: skip
    """Of the heads of queries [G, n, D] of one head of keys [k_len, D]. more: each dlse, 0 and maybe one [G, n]."""
    rows, totals, every = [], [0.0] * 2 * len(more), torch.arange(len(k), device=k.device)
    for at in torch.arange(len(queries), device=k.device).split(QUERIES):
        mask = torch.stack([each(queries[at, None], every) for each in sees])
        scores = (q[:, at] @ k.T * scale).masked_fill(~mask, -torch.inf)
        lse = scores.logsumexp(-1)
        p = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]).exp()
        rows.append([out := p @ v, lse])
        for i, dlse in enumerate(more):
            delta = (dout[:, at] * out).sum(-1) - (dlse[:, at] if i else 0)
            ds = p * (dout[:, at] @ v.T - delta[..., None]) * scale
            rows[-1].append(ds @ k)
            for j, (one, x) in enumerate(((ds, q), (p, dout))):
                totals[2 * i + j] = totals[2 * i + j] + (one[..., keys].mT @ x[:, at]).sum(0)
    out, lse, *dq = (torch.cat(each, 1) for each in zip(*rows, strict=True))
    return [out, lse, *(x for i, each in enumerate(dq) for x in (each, *totals[2 * i : 2 * i + 2]))]


def _unit(x: Tensor) -> float:
    return max(torch.finfo(x.dtype).eps / 2, FINEST)


def asked(draw: Draw, what: str) -> Call:
    """Its call where "lse", its gradient "dlse", or a "merge" of parts of the keys is asked for, or ""."""
    return replace(draw.call, return_lse=what in ("lse", "dlse"), lse_grad=what == "dlse")


def made(backend: Any, draw: Draw, what: str = "") -> tuple[Tensor | None, ...]:
    """out, lse, and the gradients where they are wanted, of what is `asked`: of a merge, as over keys of twice the
    weight, and of an out whose dout * out is less by dlse.
    """
    call, dout, dlse, grads = asked(draw, what), draw.dout, draw.dlse, ()
    if what != "merge":
        out, lse = backend.attend(call)
        if call.q.requires_grad:
            loss = (out * dout).sum() + ((lse * dlse).sum() if what == "dlse" else 0)
            grads = torch.autograd.grad(loss, (call.q, call.k, call.v))
        return out, lse, *grads
    with torch.no_grad():
        out, lse = backend.forward(call)
        if call.q.requires_grad:
            rest = dlse[..., None] * dout / dout.float().square().sum(-1, keepdim=True).clamp(min=1)
            grads = backend.backward(call, dout, (out - rest).to(out.dtype), lse + math.log(2), None)
    return out, lse, *(2 * x for x in grads)


def error(backend: Any, draw: Draw, what: str = "") -> Error:
    """Of what the backend makes of the call, over TWICE that of another rounding: the worst row, and the worst RMS."""
    found, unit = [], _unit(draw.dout)
    for place, got in enumerate(made(backend, draw, what)):
        if got is None and not what:  # a backend without a logsumexp
            continue
        at = place + 3 * (what in ("dlse", "merge") and place > 1)
        mine, true, near = got.detach().flatten(0, 1), draw.truth[at], draw.other[at]
        mine = mine if place > 2 else mine.unflatten(0, (-1, true.shape[1]))
        mine = mine[draw.heads].index_select(1 if place > 2 else 2, draw.keys if place > 2 else draw.queries).double()
        if place == 1:  # of the logsumexp a row is one value, -inf where it is empty and nowhere else
            empty = true == -torch.inf
            mine = mine.masked_fill((mine == -torch.inf) != empty, torch.inf)
            mine, true, near = (x.masked_fill(empty & (x < torch.inf), 0)[..., None] for x in (mine, true, near))
        least = unit if place == 1 or not true.abs().max() > 1e-12 else 0.0
        found.append(_norms(mine - true) / _norms(near - true).clamp(min=least) / TWICE)
    return Error(*torch.stack(found).amax(0).tolist())  # amax keeps a NaN


def _norms(x: Tensor) -> Tensor:
    """[2]: of the worst row, and the RMS of the worst head."""
    squares = x.square().mean(-1)
    return torch.stack((squares.amax(), squares.mean(-1).amax())).sqrt()


@contextlib.contextmanager
def tried(device: torch.device) -> Iterator[None]:
    """Whatever a backend raises is a refusal, a RuntimeError, but for a broken context."""
    with guarded(device) if device.type == "cuda" else contextlib.nullcontext():
        try:
            yield
        except RuntimeError:
            raise
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {first_line(error)}") from error
