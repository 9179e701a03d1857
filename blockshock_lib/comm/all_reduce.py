"""The ways to add up the ranks' partial results, behind one table, and the one that a group takes for a size.

| backend | adds up | by | runs on |
|---|---|---|---|
| nccl | in place | NCCL | NVIDIA GPUs |
| one-shot | the workspace, with the bias, into another tensor | every rank reads all | 2, 4 or 8 GPUs of a host |
| two-shot | the same | every rank sums a share, then reads the others' | the same |
| gloo | in place | gloo | CPUs |

Which is fastest is measured (tuning.py) and kept (choices.py); where nothing was measured it is the library's. The two
of the workspace are our kernels (symm.py), for GPUs that can read each other's memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from blockshock_lib.comm import choices, symm
from blockshock_lib.comm.choices import Way, size_class
from blockshock_lib.errors import UnsupportedError

if TYPE_CHECKING:
    from blockshock_lib.comm.group import Group

SMALLEST_WORKSPACE = 1 << 20


@dataclass(frozen=True)
class Backend:
    """One way to add up.

    Attributes:
        kernel: its name in all_reduce.cu; "" where a library adds up in place.
        blocks: how many blocks are tried, 0 where that is the library's affair.
    """

    kernel: str = ""
    blocks: tuple[int, ...] = (0,)

    @property
    def shares(self) -> bool:
        """Whether the partial result must lie in a workspace."""
        return bool(self.kernel)


BACKENDS = {
    "nccl": Backend(),
    "one-shot": Backend("one_shot", (8, 16, 32, 64, 128)),
    "two-shot": Backend("two_shot", (8, 16, 32, 64, 128)),
    "gloo": Backend(),
}


class Reducer:
    """The all-reduce of one process group on one device: what it can use, what was measured, and its workspace.

    One workspace serves all layers of the group, one after the other: calls on several streams wait for each other. A
    replayed CUDA graph is not seen: call `take_turn` before it.

    Attributes:
        device: of the tensors.
        why: why the ranks share no memory; "" when they do.
        library: the backend that is there without a measurement: "nccl" or "gloo".
        table: size class -> ways, the fastest first.
        space: the workspace, None until one was needed.
        captured: whether a CUDA graph may read it: then it is kept when a larger one takes its place.
    """

    def __init__(self, device: torch.device, why: str, library: str, table: dict[int, list[Way]]):
        self.device, self.why, self.library = device, why, library
        self.table = table
        self.space: symm.Workspace | None = None
        self._views: dict[tuple, Tensor] = {}
        self.captured = False
        self._outgrown: list[symm.Workspace] = []  # captured graphs still read them
        self._stream: torch.cuda.Stream | None = None

    def ways(self, nbytes: int) -> list[Way]:
        """What is known for that size, the fastest first; the library alone where nothing was measured."""
        return self.table.get(size_class(nbytes)) or [Way(self.library)]

    @property
    def shared_bytes(self) -> int:
        """Of symmetric memory held here, outside PyTorch's allocator and its peaks."""
        spaces = [self.space, *self._outgrown] if self.space else []
        return sum(symm.DATA + one.nbytes for one in spaces)

    def unsupported(self, backend: str) -> str:
        """Why that backend cannot run here; "" when it can."""
        if BACKENDS[backend].shares:
            return self.why
        return "" if backend == self.library else f"the process group adds up with {self.library} on {self.device.type}"

    def buffer(
        self, group: Group, rows: int, columns: int, dtype: torch.dtype, chunk: int | None = None
    ) -> Tensor | None:
        """See `Group.buffer`."""
        row = columns * dtype.itemsize
        if self.why or not rows * row or row % symm.PACKET or dtype not in symm.ELEMENTS:
            return None
        if not BACKENDS[self.ways(min(chunk or rows, rows) * row)[0].backend].shares:
            return None
        return self.room(group, rows, columns, dtype)

    def room(self, group: Group, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """[rows, columns] of the workspace, which grows if need be. Collective; where it cannot, all ranks raise."""
        nbytes = rows * columns * dtype.itemsize
        self.take_turn()
        found = self._views.get((rows, columns, dtype))
        if found is None:
            with torch.inference_mode(False):  # what is made in that mode can be written in no other
                if self.space is None or nbytes > self.space.nbytes:
                    self._grow(group, nbytes)
                found = self._views[rows, columns, dtype] = self.space.view(rows, columns, dtype)
        return found

    def sum(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None, way: Way | None = None) -> Tensor:
        """The sum of what the ranks have in the workspace at x, plus bias, in `out` or else in a new tensor."""
        if not x.is_contiguous() or self.space is None or not self.space.holds(x):
            raise ValueError("what is added up is contiguous and lies in the workspace as it is now")
        self.take_turn()
        way = way or self._sharing(x.nbytes)
        out = torch.empty_like(x) if out is None else out
        # The kernel reads the bias by packets; one of another dtype or an odd address is added after.
        fits = bias is not None and bias.dtype == x.dtype and bias.is_contiguous() and not bias.data_ptr() % symm.PACKET
        self.space.sum(BACKENDS[way.backend].kernel, x, bias if fits else None, out, way.blocks)
        return out if bias is None or fits else out.add_(bias)

    def _sharing(self, nbytes: int) -> Way:
        """The fastest way that reads the workspace; a last, smaller chunk may be of a size that was not measured."""
        if BACKENDS[(first := self.ways(nbytes)[0]).backend].shares:
            return first
        size = size_class(nbytes)
        near = sorted(self.table, key=lambda other: max(size, other) // min(size, other))
        return next(way for one in near for way in self.table[one] if BACKENDS[way.backend].shares)

    def _grow(self, group: Group, nbytes: int) -> None:
        if self._capturing():
            raise UnsupportedError(
                "the all-reduce's workspace cannot grow while a CUDA graph is captured: call the layer once before"
            )
        larger = symm.Workspace(group, max(SMALLEST_WORKSPACE, size_class(nbytes)), self.device)
        if self.captured:
            self._outgrown.append(self.space)
        self.space, self._views, self.captured = larger, {}, False

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def take_turn(self) -> None:
        """See `Group.take_turn`."""
        if self.device.type != "cuda":
            return
        if torch.cuda.is_current_stream_capturing():
            self.captured = True
            return
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)  # 0.1 us, current_stream 4 us
        if self._stream is None or raw != self._stream.cuda_stream:
            now = torch.cuda.current_stream(self.device)
            if self._stream is not None:
                now.wait_stream(self._stream)
            self._stream = now


_reducers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Reducer]] = weakref.WeakKeyDictionary()


def reducer(group: Group, device: torch.device) -> Reducer:
    """The group's, made at the first call, which on CUDA is a collective."""
    handle = group.handle
    found = _reducers.get(handle, {}).get(device)
    if found is None and device.type == "cuda" and device.index is None:
        return reducer(group, torch.device("cuda", torch.cuda.current_device()))
    return found or _make(group, handle, device)


def made(handle: dist.ProcessGroup, device: torch.device) -> Reducer | None:
    """The group's if there is one already: no collective."""
    found = _reducers.get(handle)
    return found.get(device) if found else None


def holding(handle: dist.ProcessGroup, x: Tensor) -> Reducer | None:
    """The reducer in whose workspace x lies; None where x is an ordinary tensor."""
    one = made(handle, x.device)
    return one if one is not None and one.space is not None and one.space.holds(x) else None


def _make(group: Group, handle: dist.ProcessGroup, device: torch.device) -> Reducer:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError("a group's first all-reduce cannot be captured: call the layer once before the graph")
    why, table = symm.impossible(group.world_size, device), {}
    if device.type == "cuda" or not why:
        # All ranks take rank 0's table: another process may write the file between two ranks' looks at it.
        seen: list = [None] * group.world_size
        mine = choices.table(group.world_size, device) if group.rank == 0 else {}
        dist.all_gather_object(seen, (symm.facts(group.world_size, device), mine), group=handle)
        why, table = symm.reason([facts for facts, _ in seen]), seen[0][1]
    one = Reducer(device, why, _library(handle, device), table)
    _reducers.setdefault(handle, {})[device] = one
    return one


def _library(handle: dist.ProcessGroup, device: torch.device) -> str:
    """Of the process group's libraries the one for the device; a configuration reads "cpu:gloo,cuda:nccl"."""
    by_device = dict(pair.split(":") for pair in dist.get_backend_config(handle).split(","))
    return by_device.get(device.type, "gloo")


@dataclass(frozen=True)
class Reduction:
    """A call that adds up the ranks' x, over and over.

    Attributes:
        start: x of this rank.
        place: where it reads x, and may write.
        add: the call itself.
    """

    start: Tensor
    place: Tensor
    add: Callable[[], Tensor]

    def __call__(self) -> Tensor:
        return self.add()

    def reset(self) -> None:
        """Puts x back: what is added up in place time after time grows to infinity. No collective."""
        self.place.copy_(self.start)


def reductions(group: Group, x: Tensor) -> dict[str, Reduction]:
    """See `Group.reductions`."""
    one, own = reducer(group, x.device), x.clone()  # x may lie in the workspace
    return {way.backend: call(one, group, way, own) for way in one.ways(x.nbytes)}


def call(one: Reducer, group: Group, way: Way, x: Tensor) -> Reduction:
    """x [rows, columns] put where that way reads it, and the call that adds it up there."""
    if BACKENDS[way.backend].shares:
        place = one.room(group, *x.shape, x.dtype)
        found = Reduction(x, place, lambda: one.sum(place, way=way))
    else:
        place, handle = torch.empty_like(x), group.handle

        def in_place() -> Tensor:
            dist.all_reduce(place, group=handle)
            return place

        found = Reduction(x, place, in_place)
    found.reset()
    return found
