"""The keys that a rank needs of the others and their gradients back: before it attends, or while it does to its own.

`layer`: a ContextParallelAttention.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blockshock_lib.comm.pull import Rows
from blockshock_lib.kernels.attention import backends
from blockshock_lib.kernels.attention.merge import absorb, wide
from blockshock_lib.kernels.once import once
from blockshock_lib.layers.attention.placement import Placement


class Routes(NamedTuple):
    """give, want and most of Group.start_pull for keys, `there`, and for their gradients, in the order in which they
    came, `back`; `order`: of the rows that came, their places by rising position; `place`: the inverse.
    """

    there: tuple[Sequence[Rows], Sequence[Rows], int]
    back: tuple[Sequence[Rows], Sequence[Rows], int]
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


def _start(k: Tensor, v: Tensor, layer: nn.Module) -> Callable[[], Tensor]:
    """Of a share: what waits for the keys and values that this rank needs, and gives them in order, [2, B, H, S, D]."""
    way, direct = layer.routes, layer.strategy != "send"
    size = k.shape[2], 2, *k.shape[:2], k.shape[3]
    place = layer.group.shared(way.there[2], 2 * k[:, :, 0].numel(), k.dtype, k.device) if direct else None
    out = None if place is None else place[: size[0]].view(size)  # where it is read
    x = torch.stack((k.movedim(2, 0), v.movedim(2, 0)), 1, out=out)
    arrive = layer.group.start_pull(x, *way.there, direct)
    return lambda: arrive()[way.order].movedim(0, 3)


def _start_back(grad: Tensor, layer: nn.Module) -> Callable[[], Tensor]:
    """Of gradients of what `_start` gave: what waits for those of this rank's share, and sums them by rank, in fp32."""
    way = layer.routes
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
    """Shares of k and v -> those that this rank needs, in order; gradients are summed in fp32 by rank."""

    @staticmethod
    def forward(ctx, k: Tensor, v: Tensor, layer: nn.Module) -> tuple[Tensor, ...]:
        ctx.layer = layer
        return _start(k, v, layer)().unbind()

    @staticmethod
    @once
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_start_back(torch.stack(grads), ctx.layer)().to(grads[0].dtype), None


class Beside(torch.autograd.Function):
    """Attention to this rank's own keys while the others' travel, merged with that to theirs; the same backward."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, layer: nn.Module, scale: float) -> Tensor:
        ctx.layer, ctx.scale = layer, scale
        arrive = _start(k, v, layer)
        if (own := layer.part(layer.group.rank, q, k, v, scale)) is None:
            out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        else:
            out, lse = backends.explicit(layer.backend, own).forward(own)
        others = arrive()
        if (rest := layer.part("needed", q, *others, scale)) is not None:
            out = wide(out)
            lse = absorb(out, lse, *backends.explicit(layer.backend, rest).forward(rest))
            out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, others, out, lse)
        return out

    @staticmethod
    @once
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
