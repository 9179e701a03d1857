"""A sum over real ranks that runs beside what lies between its start and its landing, forward and backward."""

import torch
from torch import Tensor

from blockshock_lib.comm import Group, Pending
from blockshock_lib.comm.group import unkept
from blockshock_lib.kernels.once import once


class Silent(Group):
    """Ranks whose sums are left out: what one gives comes back as it is."""

    def all_reduce(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return x

    def start_all_reduce(self, x: Tensor) -> Pending:
        return Pending(x)


class Sum:
    """One all-reduce of a forward, and one of its gradients: begun where the sum landed, awaited where it started.

    Every rank holds the gradient of what it alone makes of the sum; what all ranks make of it is the sum of these.
    """

    def __init__(self, group: Group, overlapped: bool):
        self.group, self.overlapped, self.pending = group, overlapped, Pending(torch.empty(0))

    @torch.compiler.disable
    def start(self, x: Tensor) -> Tensor:
        """Overwrites x. What it returns is not the sum yet."""
        return _Start.apply(x, self)

    @torch.compiler.disable
    def land(self, started: Tensor) -> Tensor:
        return _Land.apply(started, self)

    def begin(self, x: Tensor) -> Tensor:
        rows = unkept(x.view(-1, x.shape[-1]))
        if self.overlapped:
            self.pending = self.group.start_all_reduce(rows)
        else:  # at once, by the fastest way, on the current stream
            shared = self.group.buffer(*rows.shape, x.dtype, x.device)
            there = shared is None or shared.data_ptr() == rows.data_ptr()
            self.pending = Pending(self.group.all_reduce(rows if there else shared.copy_(rows)))
        return self.pending.result.view(x.shape)

    def wait(self) -> None:
        self.pending.wait()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, one: Sum) -> Tensor:
        ctx.one = one
        return one.begin(x.detach())

    @staticmethod
    @once
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.one.wait()
        return grad, None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx, started: Tensor, one: Sum) -> Tensor:
        ctx.one = one
        one.wait()
        return started.view_as(started)

    @staticmethod
    @once
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.one.begin(grad.clone(memory_format=torch.contiguous_format)), None
