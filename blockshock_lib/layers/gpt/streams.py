"""What the ranks read: the sum that all know, and beside it what each has made by itself and is not summed yet."""

from functools import partial, reduce
from operator import add

import torch
from torch import Tensor

from blockshock_lib.comm import Group
from blockshock_lib.layers.gpt.ranks import Sum
from blockshock_lib.layers.gpt.schedule import Schedule

_total = partial(reduce, add)  # of a list, which is not empty, in its order


class Streams:
    """The state of one forward: x [B, S, W], the embedding, at first, and then what a schedule's operations make of it.

    Partial results are [B, S, W] on a real rank. On one device they are [n, B, S, W] where a track reads its own, and
    else summed over the n tracks already, [B, S, W]: the only place where the two ways differ is where a sum is made.
    """

    def __init__(self, schedule: Schedule, x: Tensor, ranks: int, group: Group):
        self.schedule, self.shared, self.ranks, self.group = schedule, x, ranks, group
        self.made: dict[int, Tensor] = {}  # by sublayer: partial results that are not in `own` and not all summed
        self.own: dict[tuple[int, bool], Tensor] = {}  # (lands, mean): the sum of those that are read
        self.sums: dict[int, tuple[Sum, Tensor]] = {}

    def read(self) -> Tensor:
        """[B, S, W], or on one device [n, B, S, W] where the tracks differ."""
        x = self.shared
        for own in self.own.values():
            x = x + own
        return x

    def show(self, t: int, bias: Tensor) -> None:
        """The bias of sublayer t is added, and where it is private this rank's own partial result."""
        step = self.schedule.steps[t]
        self.shared = self.shared + bias
        if step.private:
            key, own = (step.lands, step.mean), self.made.pop(t)
            # One of 16 bits stays as it is, several are added in the stream's own dtype.
            self.own[key] = self.own[key].to(self.shared.dtype) + own if key in self.own else own

    def room(self, members: tuple[int, ...]) -> Tensor | None:
        """Where what `members` make, [B S, W], is written best, so that its sum copies nothing; None where no sum is of
        these alone and waits for nothing else, or gradients are wanted, which writes into given memory do not have.
        """
        x = self.shared
        if self.group.world_size == 1 or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return None
        waits = any(sync.members == members and not sync.overlap for sync in self.schedule.syncs)
        return self.group.buffer(x.shape[0] * x.shape[1], x.shape[2], x.dtype, x.device) if waits else None

    def start(self, i: int) -> None:
        """Begins the sum of all that syncs[i] brings together."""
        sync, steps = self.schedule.syncs[i], self.schedule.steps
        parts = [(mean, own) for (lands, mean), own in self.own.items() if lands == sync.lands]
        parts += [(steps[t].mean, self.made[t]) for t in sync.members if t in self.made]
        parts = [x / self.ranks if mean else x for mean, x in parts]
        dtype = self.made[sync.start].dtype  # what 16-bit products have added up to in fp32 travels in 16 bits
        for t in sync.members:
            if not steps[t].private:
                self.made.pop(t)
        if self.group.world_size == 1:
            apart = [x for x in parts if x.dim() == 4]
            whole = [x for x in parts if x.dim() == 3] + ([_total(apart).sum(0)] if apart else [])
            self.sums[i] = None, _total(whole)
            return
        *first, last = parts
        room = self.room(sync.members) if first else None
        x = _total(parts).to(dtype) if room is None else torch.add(_total(first), last, out=room.view_as(last))
        kept = any(x is other for other in (*self.own.values(), *self.made.values()))
        over_ranks = Sum(self.group, sync.overlap > 0)
        self.sums[i] = over_ranks, over_ranks.start(x.clone() if kept else x)

    def land(self, i: int) -> None:
        """Adds the sum, and forgets what this rank had of it."""
        over_ranks, started = self.sums.pop(i)
        self.shared = self.shared + (over_ranks.land(started) if over_ranks else started)
        self.own = {key: own for key, own in self.own.items() if key[0] != self.schedule.syncs[i].lands}
