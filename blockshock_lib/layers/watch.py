"""Says which rank makes other passes than the rest, within a minute: a collective would hang, or sum unlike batches.

Each rank counts its forwards and backwards; but for the first two, which compare what they pass, without a collective
or a wait for the GPU. A thread lays the count in the group's store now and then, and reads the other ranks'.
"""

import atexit
import contextlib
import functools
import itertools
import math
import os
import statistics
import sys
import threading
import traceback
import warnings
import weakref
from collections import defaultdict, deque

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockshock_lib.errors import UnsupportedError

CHECK = os.environ.get("BLOCKSHOCK_CHECK") == "1"  # the ranks compare what they pass each time: slow
PASSED = {  # the layer's count of what was compared, what a pass is given, and what makes it the same
    "forward": ("met_forward", "x", "pass it the same batch, with one seed for all that comes before it"),
    "backward": ("met_backward", "dy", "have the same loss behind it, of the same targets and with one seed"),
}
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
    if _parents is not None and _parents is dist.group.WORLD:
        raise UnsupportedError(f"{describe(layer)}: a forked process is no rank of its parent's group: spawn it")
    passes = _groups[layer.group.reference]
    _start()
    if passes.unlike:
        raise UnsupportedError(passes.unlike)
    passes.number, passes.digest = passes.number + 1, hash((passes.digest, *shape))
    passes.last.append((passes.number, passes.digest, weakref.ref(layer), what))


def before_pass(layer: nn.Module, what: str, x: Tensor) -> None:
    """Counts a "forward" or "backward" of ranks that share a layer; before the first two of each, all with CHECK, a
    collective compares their x, or dy: of an x that a pipeline asks for shapes with, which is uninitialised, its shape.
    """
    if not (layer.collective and layer.group.connected):
        return
    met, name, way = PASSED[what]
    compared = (getattr(layer, met) < 2 or CHECK) and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    # All ranks refuse a compared pass at once: the watch, which one rank may hear before another, keeps silent of it.
    count(layer, what, () if compared else x.shape)
    if not compared:
        return
    setattr(layer, met, getattr(layer, met) + 1)
    values = x.detach().reshape(-1)
    step = next(n for n in itertools.count(-(-len(values) // 64)) if math.gcd(n, x.shape[-1]) == 1)  # of all channels
    sample = [0.0] if _asked_for_shapes() else values[::step].tolist()
    given = {f"shape of {name}": x.shape, "form": getattr(layer, "form", ""), "chunks": layer.chunks}
    (given, first), *others = layer.group.gather_objects((given, sample))
    sizes = sorted(map(abs, first))
    usual = statistics.mean(sizes[: -(-9 * len(sizes) // 10)])  # of all but a few large channels
    near = [(abs(a) + usual) / 10 + sizes[-1] / 100 for a in first]  # what comes before may round otherwise elsewhere
    for rank, (other, found) in enumerate(others, 1):
        unlike = any(abs(a - b) > c for a, b, c in zip(first, found, near, strict=False))
        if odd := next((one for one in given if given[one] != other[one]), name * unlike):
            how = f"all ranks of a layer {way}" if odd.endswith(name) else f"set layer.{odd} to the same on all ranks"
            raise UnsupportedError(f"{describe(layer)}: rank {rank} was given another {odd} than rank 0: {how}")


def _asked_for_shapes() -> bool:
    callers = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
    stage = "torch.distributed.pipelining.stage"
    names = {frame.f_code.co_name for frame in callers if frame.f_globals.get("__name__") == stage}
    return bool(names) and not names & {"forward_one_chunk", "backward_one_chunk"}  # which pass real batches


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


def _after_fork() -> None:
    global _parents
    _parents = dist.group.WORLD


_parents = None  # the group of the process that forked this one
os.register_at_fork(after_in_child=_after_fork)
atexit.register(_stopped.set)
