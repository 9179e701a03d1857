"""A forward and a backward of attention that were written out, as one differentiable call."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from blockshock_lib.kernels.attention.call import Call


def attend(forward: Callable, backward: Callable, call: Call) -> tuple[Tensor, Tensor]:
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
    @once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        return *ctx.made(replace(ctx.call, q=q, k=k, v=v), dout, out, lse, dlse), None, None, None
