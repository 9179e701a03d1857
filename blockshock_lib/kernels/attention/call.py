"""One call of block-sparse attention, as every backend takes it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blockshock_lib.kernels.attention.lists import BlockLists
from blockshock_lib.kernels.attention.pattern import Pattern
from blockshock_lib.kernels.once import once


@dataclass(frozen=True, eq=False)
class Call:
    q: Tensor  # [B, H, S, D]
    k: Tensor  # [B, H / G, S_k, D]
    v: Tensor
    pattern: Pattern | None  # None where the lists are of a part of the sequence
    lists: BlockLists
    scale: float
    return_lse: bool = False
    lse_grad: bool = False  # whether a gradient may come into it

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """What a backend makes of the lists: once, and as long as they live."""
        forms = self.lists.forms
        if name not in forms:
            forms[name] = make()
        return forms[name]

    def spoilt(self) -> str:
        """Why a kernel whose masked-out values weigh 0, of which 0 times NaN is NaN, must not run; "" where it may. It
        is looked for on a CPU alone: on a GPU the host would wait.
        """
        fine = self.k.device.type != "cpu" or (self.k.isfinite().all() and self.v.isfinite().all())
        return "" if fine else "a key or value is NaN or Inf, and queries that do not see it would get it"


def uncast(run: Callable) -> Callable:
    """`run(call, ...)` in the dtypes of its operands, as kernels have it: torch.autocast would round its products."""

    @functools.wraps(run)
    def plain(call: Call, *rest: Any, **options: Any) -> Any:
        kind = call.q.device.type
        if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
            return run(call, *rest, **options)
        with torch.autocast(kind, enabled=False):
            return run(call, *rest, **options)

    return plain


def explicit(forward: Callable, backward: Callable, call: Call) -> tuple[Tensor, Tensor]:
    """out and lse by `forward(call)`, both with gradients, by `backward(call, dout, out, lse, dlse)`."""
    return _Attend.apply(call.q, call.k, call.v, call, forward, backward)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call, forward, backward):
        out, lse = forward(replace(call, q=q, k=k, v=v))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.made = replace(call, q=None, k=None, v=None), backward  # what hooks offload is not held here
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        return *ctx.made(replace(ctx.call, q=q, k=k, v=v), dout, out, lse, dlse), None, None, None
