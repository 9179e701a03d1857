"""One backend's attention of a call's shapes, held against the truth in float64 before it is timed: some heads whole,
and in calls that differ in what a choice is kept for, all heads at some queries and keys.
"""

import contextlib
import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockshock_lib.errors import first_line
from blockshock_lib.kernels.attention import reference, rules
from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.kernels.attention.pattern import Pattern, by_head
from blockshock_lib.kernels.graph import guarded
from blockshock_lib.kernels.tuning.search import Error

TWICE = 2.0  # the error of another rounding of the operands is unavoidable; kernels' faults are tens of times that
FINEST = 2.0**-21  # sums in fp32 round more often than fp32 operands do
CHECKED = 2  # heads of keys, that are held whole against the reference
QUERIES, KEYS = 32, 256  # of each head, that are held against the truth
VARIANTS = 4  # of the pattern, the hardest first


class Draw(NamedTuple):
    """Operands and, of some heads, the truth and what another rounding of the operands makes of it."""

    call: Call
    dout: Tensor
    heads: list[tuple[int, int]]  # (batch element, head of keys)
    truth: list[tuple[Tensor, ...]]  # out, lse, and dq, dk, dv where gradients are wanted
    other: list[tuple[Tensor, ...]]


def packed(call: Call) -> bytes:
    """What another process needs to draw a call of these shapes."""
    shapes = tuple(call.q.shape), tuple(call.k.shape)
    return pickle.dumps((replace(call.pattern, made={}), shapes, call.lists.block, call.scale, call.q.dtype))


def drawn(told: bytes, device: torch.device, grad: bool, seed: int) -> Draw:
    """`told`: of `packed`."""
    pattern, (q_shape, k_shape), block, scale, dtype = pickle.loads(told)
    rng = torch.Generator(device).manual_seed(seed)
    draw = lambda shape: torch.randn(shape, generator=rng, device=device)  # noqa: E731
    q, k, v, dout = (draw(shape).to(dtype) for shape in (q_shape, k_shape, k_shape, q_shape))
    lists = pattern.lists(q_shape[2], k_shape[2], block, device)
    every = torch.randperm(k_shape[0] * k_shape[1], generator=rng, device=device).tolist()
    unit = max(torch.finfo(dtype).eps / 2, FINEST)
    exact = [x.double() for x in (q, k, v, dout)]
    rounded = [x * (1 + unit * draw(x.shape).sign()) for x in exact]
    heads = [divmod(number, k_shape[1]) for number in every[:CHECKED]]
    made = [[_reference(operands, lists, scale, grad, *head) for head in heads] for operands in (exact, rounded)]
    return Draw(Call(*(x.requires_grad_(grad) for x in (q, k, v)), pattern, lists, scale), dout, heads, *made)


def _reference(operands: Sequence[Tensor], lists: Any, scale: float, grad: bool, b: int, h: int) -> tuple[Tensor, ...]:
    (batch, heads), group = operands[0].shape[:2], operands[0].shape[1] // operands[1].shape[1]
    q, k, v, dout = (_of(x, b, h, group if i in (0, 3) else 1) for i, x in enumerate(operands))
    plane = _of(lists.plane.expand(batch, heads), b, h, group).contiguous()
    call = Call(q, k, v, None, replace(lists, plane=plane, forms={}), scale)
    out, lse = reference.forward(call)
    return out, lse, *(reference.backward(call, dout, out, lse, None) if grad else ())


def _of(x: Tensor, b: int, h: int, group: int) -> Tensor:
    return x[b : b + 1, h * group : (h + 1) * group]


def made(backend: Any, draw: Draw) -> tuple[Tensor | None, ...]:
    """out, lse, and the gradients where they are wanted."""
    call = draw.call
    out, lse = backend.attend(call)
    return out, lse, *(torch.autograd.grad(out, (call.q, call.k, call.v), draw.dout) if call.q.requires_grad else ())


def error(backend: Any, draw: Draw) -> Error:
    """Of what the backend makes of the call, over TWICE that of another rounding: the worst row, and the worst RMS."""
    group, found = draw.call.q.shape[1] // draw.call.k.shape[1], []
    for place, got in enumerate(made(backend, draw)):
        if got is None:  # a backend without a logsumexp
            continue
        for (b, h), truth, other in zip(draw.heads, draw.truth, draw.other, strict=True):
            mine = _of(got.detach(), b, h, 1 if place > 2 else group)
            found.append(_ratios(mine, truth[place], other[place], place == 1, _unit(draw.dout)))
    return _worst(found)


def _unit(x: Tensor) -> float:
    return max(torch.finfo(x.dtype).eps / 2, FINEST)


def _worst(found: Sequence[Tensor]) -> Error:
    return Error(*torch.stack(found).amax(0).tolist())  # amax keeps a NaN


def _ratios(mine: Tensor, true: Tensor, near: Tensor, level: bool, unit: float) -> Tensor:
    """[2]: of the worst row, and of the worst head's RMS; of [..., rows, D], or of a `level` [..., rows]."""
    mine = mine.double()
    if level:  # of the logsumexp a row is one value, -inf where it is empty and nowhere else
        empty = true == -torch.inf
        mine = mine.masked_fill((mine == -torch.inf) != empty, torch.inf)
        mine, true, near = (x.masked_fill(empty & (x < torch.inf), 0)[..., None] for x in (mine, true, near))
    least = unit if level or not true.abs().max() > 1e-12 else 0.0
    return _norms(mine - true) / _norms(near - true).clamp(min=least) / TWICE


def _norms(x: Tensor) -> Tensor:
    squares = x.square().mean(-1)
    return torch.stack((squares.amax(), squares.mean(-1).amax())).sqrt()


class Sample(NamedTuple):
    """Operands whose truth is known of all heads, but of some queries and keys only: dout and dlse are 0 elsewhere."""

    call: Call
    dout: Tensor
    dlse: Tensor
    queries: Tensor
    keys: Tensor
    truth: list[Tensor]  # of all heads of keys: out, lse; dq, dk, dv of dout alone; and of both
    other: list[Tensor]


def sampled(told: bytes, device: torch.device, grad: bool, variant: int) -> Sample:
    """A call with strides and a scale of its own. `variant`: 0 and 1, nobody sees the last key, which is NaN of 0, and
    every other head no key of the last block; 2, this alone, for who has no partial blocks; 3, the pattern as it is.
    """
    pattern, ((batch, heads, q_len, dim), (_, k_heads, k_len, _)), block, scale, dtype = pickle.loads(told)
    rng, scale = torch.Generator(device).manual_seed(2 + variant), 0.8 * scale
    draw = lambda *shape: torch.randn(shape, generator=rng, device=device)  # noqa: E731
    some = lambda count, most: torch.randint(count, (most,), generator=rng, device=device)  # noqa: E731
    if variant < 3:
        seen = k_len - (variant < 2)
        cut = (k_len - 1) // block * block or seen
        parts = [Pattern((((rules.Strip(rules.FAR, 0, most),),),)) for most in (seen, min(cut, seen))]
        pattern = pattern & by_head([parts[head % 2] for head in range(heads)])
    q, dout = (draw(batch, q_len, heads, dim).to(dtype).transpose(1, 2) for _ in range(2))
    k, v = (x.transpose(1, 2) for x in draw(batch, k_len, 2, k_heads, dim).to(dtype).unbind(2))
    queries = torch.cat((some(q_len, QUERIES - 2), torch.tensor([0, q_len - 1], device=device))).unique()
    every = torch.arange(k_len, device=device)
    number = {pattern._of(b, h): (b, h) for b, h in product(range(batch), range(heads))}
    sees = {of: pattern.sees(queries[:, None], every, q_len, k_len, *at) for of, at in number.items()}
    near = torch.stack([each.any(0) for each in sees.values()]).any(0).nonzero()[:, 0]
    near = near[some(len(near), 3 * KEYS // 4)] if len(near) else near
    keys, live = torch.cat((some(k_len, KEYS // 4), near)).unique(), torch.zeros(q_len, device=device)
    live[queries] = 1
    dout, dlse = dout * live[:, None].to(dtype), draw(batch, heads, q_len) * live
    made: tuple[list, list] = [], []
    for b, h in product(range(batch), range(k_heads)):
        of = slice(h * (heads // k_heads), (h + 1) * (heads // k_heads))
        mask = torch.stack([sees[pattern._of(b, head)] for head in range(heads)[of]])
        dlse[b, of, queries] *= mask.any(-1)
        exact = [q[b, of, queries].double(), k[b, h].double(), v[b, h].double(), dout[b, of, queries].double()]
        rounded = [x * (1 + _unit(q) * draw(*x.shape).sign()) for x in exact]
        for found, operands in zip(made, (exact, rounded), strict=True):
            found.append(_truth(*operands, dlse[b, of, queries].double(), mask, keys, scale, grad))
    truth, other = ([torch.stack(each) for each in zip(*found, strict=True)] for found in made)
    if variant == 0:
        k[:, :, -1] = v[:, :, -1] = torch.nan
    call = Call(
        *(x.requires_grad_(grad) for x in (q, k, v)), pattern, pattern.lists(q_len, k_len, block, device), scale
    )
    return Sample(call, dout, dlse, queries, keys, truth, other)


def _truth(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, mask: Tensor, keys: Tensor, scale: float, grad: bool
) -> list[Tensor]:
    """Of the heads of queries [G, rows, D] of one head of keys [k_len, D]."""
    scores = (q @ k.T * scale).masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]).exp()
    found, dp = [out := p @ v, lse], dout @ v.T
    for more in (0, dlse) if grad else ():
        ds = p * (dp - ((dout * out).sum(-1) - more)[..., None]) * scale
        pairs = ((ds, q), (p, dout))
        found += [ds @ k, *((one[..., keys].flatten(0, 1).T @ x.flatten(0, 1)) for one, x in pairs)]
    return found


def asked(sample: Sample, what: str) -> Call:
    """Its call where "lse", its gradient "dlse", or a "merge" of parts of the keys is asked for, or ""."""
    return replace(sample.call, return_lse=what in ("lse", "dlse"), lse_grad=what == "dlse")


def able(backend: Any, sample: Sample, what: str) -> Error:
    """`error` of what is `asked` of a sample."""
    call, dout, share = asked(sample, what), sample.dout, 1.0
    if what == "merge":
        with torch.no_grad():
            out, lse = backend.forward(call)
            if call.q.requires_grad:  # as over twice the weight of keys, and of an out whose dout * out is less by dlse
                share, rest = (
                    0.5,
                    sample.dlse[..., None] * dout / dout.float().square().sum(-1, keepdim=True).clamp(min=1),
                )
                grads = backend.backward(call, dout, (out - rest).to(out.dtype), lse + math.log(2), None)
    else:
        out, lse = backend.attend(call)
        if call.q.requires_grad:
            loss = (out * dout).sum() + ((lse * sample.dlse).sum() if what == "dlse" else 0)
            grads = torch.autograd.grad(loss, (call.q, call.k, call.v))
    found, heads = [], (-1, call.q.shape[1] // call.k.shape[1])
    for place, got in enumerate((out, lse, *(grads if call.q.requires_grad else ()))):
        at = place + 3 * (what in ("dlse", "merge") and place > 1)
        if got is None and not what:
            continue
        mine = got.detach()[:, :, sample.keys if place > 2 else sample.queries].flatten(0, 1)
        mine = mine if place > 2 else mine.unflatten(0, heads)
        scaled = [(share if place > 1 else 1.0) * x[at] for x in (sample.truth, sample.other)]
        found.append(_ratios(mine, *scaled, place == 1, _unit(dout)))
    return _worst(found)


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
