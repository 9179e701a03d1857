"""A stand-in for CUDA graphs on a CPU, and what the ranks of a test run with it; a spawned process imports them."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from blockshock_lib.layers import BlockShockLinear, graphed
from blockshock_lib.sparse24 import packing
from tests.layers.tasks import K, built, problem


class Memory:
    """Like a CUDA graph, it computes from the memory that the layer had when it was captured, whatever became of the
    layer since, and into memory that is always the same.
    """

    made: list[Memory] = []  # noqa: RUF012

    def __init__(self, compute, x):
        layer = compute.__self__
        self.weight, self.cols, self.group = layer.weight.detach(), layer.cols, layer.group
        self.bias = None if layer.bias is None else layer.bias.detach()
        self.packed = [t.detach() for t in layer.packed.data] if isinstance(layer, BlockShockLinear) else None
        self.x, self.y = torch.full_like(x, torch.nan), None
        self.replays, self.released = 0, False
        Memory.made.append(self)

    def __call__(self, x):
        assert not self.released
        self.replays += 1
        self.x.view(x.shape).copy_(x)
        weight = packing.unpack(*self.packed) if self.packed else self.weight
        y = self.group.all_reduce(F.linear(self.x[:, self.cols], weight))
        y = y if self.bias is None else y + self.bias
        self.y = y if self.y is None else self.y.copy_(y)
        return self.y.clone()

    def release(self):
        self.released = True

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot pickle a CUDA graph")


def on_this_machine(monkeypatch=None):
    """Lets layers on a CPU capture `Memory`."""
    Memory.made = []
    put = monkeypatch.setattr if monkeypatch else setattr
    put(graphed, "Capture", Memory)
    put(graphed, "capturable", lambda x: True)


def alike(ctx, cases):
    """Each case captured, replayed, trained on and, on rank 1 alone, captured anew; what differs from the layer."""
    on_this_machine()
    wrong = []
    w, bias, _, _ = problem(torch.float32)
    for name, mask, changes in cases:
        Memory.made, layer = [], built(name, mask, w, bias, **changes)
        with layer.graphed() as fast:
            for call in range(6):
                if call == 3:
                    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
                    layer(torch.ones(2, K)).square().mean().backward()
                    optimizer.step()
                if call == 5 and ctx.rank == 1:
                    layer.weight.data = layer.weight.data.clone()
                x = torch.randn(2, 3, K, generator=torch.Generator().manual_seed(call))
                with torch.no_grad():
                    if not torch.allclose(fast(x), layer(x), rtol=1e-5, atol=1e-5):
                        wrong.append(f"{name} {mask} {changes}: call {call}")
        seen = len(Memory.made), sum(one.replays for one in Memory.made)
        if seen != ((2, 4) if ctx.rank else (1, 5)):
            wrong.append(f"{name} {mask} {changes}: {seen} captures and replays")
    return wrong


def destroyed(ctx):
    """How often a layer is captured that is given another process group, and what it says after that has gone."""
    on_this_machine()
    w, bias, x, _ = problem(torch.float32)
    fast = built("row_parallel", "checkerboard", w, bias).graphed()
    with torch.no_grad():
        fast(x)
        fast.layer.group = type(fast.layer.group).of(handle := dist.new_group())
        fast(x)
        dist.destroy_process_group(handle)
        del handle
        try:
            fast(x)
        except Exception as error:
            return len(Memory.made), f"{type(error).__name__}: {error}"
    return len(Memory.made), "nothing"
