"""One backend's attention of a call's shapes: held against the reference in float64, then timed."""

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockshock_lib.errors import first_line
from blockshock_lib.kernels.attention import reference
from blockshock_lib.kernels.attention.call import Call
from blockshock_lib.kernels.graph import guarded
from blockshock_lib.kernels.tuning.search import Error

TWICE = 2.0  # the error of another rounding of the operands is unavoidable; kernels' faults are tens of times that
FINEST = 2.0**-21  # sums in fp32 round more often than fp32 operands do
CHECKED = 2  # heads of keys, that are held against the reference


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
    unit, group = max(torch.finfo(draw.dout.dtype).eps / 2, FINEST), draw.call.q.shape[1] // draw.call.k.shape[1]
    rows, whole = [], []
    for place, got in enumerate(made(backend, draw)):
        if got is None:  # a backend without a logsumexp
            continue
        for (b, h), truth, other in zip(draw.heads, draw.truth, draw.other, strict=True):
            true, near = truth[place], other[place]
            mine = _of(got.detach(), b, h, 1 if place > 2 else group).double()
            if place == 1:  # of the logsumexp a row is one value, -inf where it is empty and nowhere else
                empty = true == -torch.inf
                mine = mine.masked_fill((mine == -torch.inf) != empty, torch.inf)
                mine, true, near = (x.masked_fill(empty & (x < torch.inf), 0)[..., None] for x in (mine, true, near))
            least = unit if place == 1 or not true.abs().max() > 1e-12 else 0.0
            (row, rms), (row_near, rms_near) = map(_norms, (mine - true, near - true))
            rows.append(row / row_near.clamp(min=least) / TWICE)
            whole.append(rms / rms_near.clamp(min=least) / TWICE)
    return Error(torch.stack(rows).amax().item(), torch.stack(whole).amax().item())  # amax keeps a NaN


def _norms(x: Tensor) -> tuple[Tensor, Tensor]:
    squares = x.square().mean(-1)
    return squares.amax().sqrt(), squares.mean().sqrt()


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
