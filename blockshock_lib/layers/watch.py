"""Says within a minute which rank makes other passes than the rest: a collective would hang, or sum unlike batches.

Each rank counts its forwards and backwards, without a collective or a wait for the GPU. A thread lays the count in the
process group's store now and then, and reads the other ranks'.
"""

import atexit
import contextlib
import functools
import threading
import warnings
import weakref
from collections import defaultdict, deque

import torch.distributed as dist
from torch import nn

from blockshock_lib.errors import UnsupportedError

PERIOD = 20.0  # seconds between two looks: a rank that is behind, and whose count stood still between them, is named
_stopped = threading.Event()


class Passes:
    """Of the layers of one process group, by this rank; `last`: (number, digest of all until then, layer, what)."""

    def __init__(self):
        self.number = self.digest = 0
        self.last: deque[tuple[int, int, weakref.ref, str]] = deque(maxlen=1000)
        self.seen: list[tuple[int, int]] = []  # each rank's number and digest, at the last look
        self.unlike = ""

    def name(self, number: int) -> str:
        for found, _, layer, what in self.last.copy():
            if found == number and (alive := layer()) is not None:
                return f"{what} of {describe(alive)}"
        return "an earlier pass"

    def look(self, handle: dist.ProcessGroup) -> None:
        store, me, world = dist.distributed_c10d._get_process_group_store(handle), dist.get_rank(handle), handle.size()
        keys, digests = [f"blockshock/passes/{rank}" for rank in range(world)], {n: d for n, d, *_ in self.last.copy()}
        store.set(keys[me], f"{max(digests)} {digests[max(digests)]}")
        texts = [store.get(key).decode() if store.check([key]) else "0 0" for key in keys]
        before, self.seen = self.seen, [tuple(map(int, text.split())) for text in texts]
        for rank, (number, digest) in enumerate(self.seen):
            if digests.get(number, digest) != digest and not self.unlike:
                self.unlike = f"rank {rank} passed x of another shape than rank {me}, in or before {self.name(number)}"
                warnings.warn(self.unlike, stacklevel=1)
        still = [before[rank] == now for rank, now in enumerate(self.seen)] if before else [False] * world
        behind = [rank for rank in range(world) if still[rank] and self.seen[rank][0] < self.seen[me][0]]
        if behind and still[me]:
            what = self.name(min(self.seen)[0] + 1)
            warnings.warn(f"ranks {behind} of {world} have not called the {what}: every rank must", stacklevel=1)


_groups: defaultdict[weakref.ref[dist.ProcessGroup], Passes] = defaultdict(Passes)


def describe(layer: nn.Module) -> str:
    """A layer in a message: by its dotted name in the model where that is known."""
    return f"{layer.path}: {type(layer).__name__}({layer.extra_repr()})".removeprefix(": ")


def count(layer: nn.Module, what: str, shape: tuple[int, ...]) -> None:
    """Of a pass that every rank of a connected group makes. UnsupportedError: ranks passed x of other shapes before."""
    passes = _groups[layer.group.reference]
    _start()
    if passes.unlike:
        raise UnsupportedError(passes.unlike)
    passes.number, passes.digest = passes.number + 1, hash((passes.digest, *shape))
    passes.last.append((passes.number, passes.digest, weakref.ref(layer), what))


@functools.cache
def _start() -> None:
    threading.Thread(target=watch, daemon=True).start()


def watch() -> None:
    while not _stopped.wait(PERIOD):
        _look()


def _look() -> None:  # of its own, so that no variable keeps a process group alive while the thread waits
    for reference, passes in list(_groups.items()):
        with contextlib.suppress(Exception):  # a group that is being destroyed
            passes.look(reference()) if reference() else _groups.pop(reference)


atexit.register(_stopped.set)
