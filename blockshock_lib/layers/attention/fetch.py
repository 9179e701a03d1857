"""The keys that a rank needs of the others and their gradients back: before it attends, or while it does to its own.

`layer`: a ContextParallelAttention.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from blockshock_lib.comm.pull import Rows
from blockshock_lib.kernels.attention import backends
from blockshock_lib.kernels.attention.merge import absorb
from blockshock_lib.layers.attention.placement import Placement

Way = tuple[Sequence[Rows], Sequence[Rows], int]  # give, want and most of Group.start_pull


class Routes(NamedTuple):
    """`there`: of keys, whose rows are a rank's positions; `back`: of their gradients, whose rows are in the order in
    which the keys came; `order`: of the rows that came, their places by rising position; `place`: the inverse.
    """

    there: Way
    back: Way
    order: Rows
    place: Rows


def routes(placed: Placement, needed: Sequence[Tensor], rank: int) -> Routes:
    """needed[r]: the blocks of keys that come to rank r, int64, rising."""
    held = placed.positions
    common = [[each[torch.isin(each // placed.block, blocks)] for each in held] for blocks in needed]  # by who reads
    spans = [
        [slice(end - len(x), end) for x, end in zip(each, accumulate(map(len, each)), strict=True)] for each in common
    ]
    give = [_places(held[rank], each[rank]) for each in common]
    want = [_places(*pair) for pair in zip(held, common[rank], strict=True)]
    back = spans[rank], [each[rank] for each in spans], max(each[-1].stop for each in spans)
    order = torch.cat(common[rank]).argsort()
    order, place = (slice(None),) * 2 if placed.name == "contiguous" else (order, order.argsort())
    return Routes((give, want, max(map(len, held))), back, order, place)


def _places(held: Tensor, some: Tensor) -> Rows:
    return slice(0, len(held)) if len(some) == len(held) else torch.searchsorted(held, some)  # all need no kernel


def _start(x: Tensor, layer: nn.Module) -> Callable[[], Tensor]:
    """Of a share [n, B, H, s, D]: what waits for the keys that this rank needs, and gives them in order."""
    way = layer.routes()
    arrive = layer.group.start_pull(x.movedim(3, 0), *way.there, layer.strategy != "send")
    return lambda: arrive()[way.order].movedim(0, 3)


def _start_back(grad: Tensor, layer: nn.Module) -> Callable[[], Tensor]:
    """Of gradients of what `_start` gave: what waits for those of this rank's share, and sums them by rank, in fp32."""
    way = layer.routes()
    arrive = layer.group.start_pull(grad.movedim(3, 0)[way.place], *way.back, layer.strategy != "send")

    def total() -> Tensor:
        size = layer.placement.lengths[layer.group.rank], *grad.shape[:3], grad.shape[4]
        made = grad.new_zeros(size, dtype=torch.promote_types(grad.dtype, torch.float32))
        come = arrive().split([each.stop - each.start for each in way.back[1]])
        for places, part in zip(way.there[0], come, strict=True):
            made[places] += part
        return made.movedim(0, 3)

    return total


class Fetch(torch.autograd.Function):
    """Shares [n, B, H, s, D] -> the keys that this rank needs, in order; gradients are summed in fp32 by rank."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        return _start(x, layer)()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _start_back(grad, ctx.layer)().to(grad.dtype), None


class Beside(torch.autograd.Function):
    """Attention to this rank's own keys while those of the others travel, then to theirs, merged; in the backward their
    gradients travel back while this rank's own are made.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, layer: nn.Module, scale: float) -> Tensor:
        ctx.layer, ctx.scale = layer, scale
        arrive = _start(torch.stack((k, v)), layer)
        if (own := layer.part(layer.group.rank, q, k, v, scale)) is None:
            out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        else:
            out, lse = backends.explicit(layer.backend, own).forward(own)
        others = arrive()
        if (rest := layer.part("needed", q, *others, scale)) is not None:
            out = out.to(torch.promote_types(q.dtype, torch.float32))
            lse = absorb(out, lse, *backends.explicit(layer.backend, rest).forward(rest))
            out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, others, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple:
        q, k, v, others, out, lse = ctx.saved_tensors
        layer, dq = ctx.layer, torch.zeros_like(q, dtype=torch.promote_types(q.dtype, torch.float32))

        def made(source: int | str, keys: Sequence[Tensor]) -> Tensor:
            if (call := layer.part(source, q, *keys, ctx.scale)) is None:
                return torch.stack([torch.zeros_like(x) for x in keys])
            each = backends.explicit(layer.backend, call).backward(call, grad, out, lse, None)
            dq.add_(each[0])
            return torch.stack(each[1:])

        total = _start_back(made("needed", others), layer)
        mine = made(layer.group.rank, (k, v))
        dk, dv = (total() + mine).to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None
