"""The ways to add up the ranks' partial results, behind one table, and the one that a group takes for a size.

| backend | adds up | by | runs on |
|---|---|---|---|
| nccl | in place | NCCL | NVIDIA GPUs |
| one-shot | the workspace, with the bias, into another tensor | every rank reads all | 2, 4 or 8 GPUs of a host |
| two-shot | the same | every rank sums a share, then reads the others' | the same |
| gloo | in place | gloo | CPUs |

Which is fastest is measured (tuning.py); where nothing was, it is the library's. Those of the workspace are in symm.py.
"""

import weakref
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from blockshock_lib.comm import symm
from blockshock_lib.comm.ranks import Ranks
from blockshock_lib.errors import BlockShockError, UnsupportedError, first_line
from blockshock_lib.kernels.graph import stream_after
from blockshock_lib.kernels.tuning import store

SMALLEST_WORKSPACE = 1 << 20
# Backend -> its kernel in all_reduce.cu, for a partial result in a workspace; "" where a library adds up in place.
BACKENDS = {"nccl": "", "one-shot": "one_shot", "two-shot": "two_shot", "gloo": ""}
BLOCKS = (8, 16, 32, 64, 128)  # how many of a kernel are tried


class Way(NamedTuple):
    """A backend, and of how many blocks its kernel is; 0 for a library's own."""

    backend: str
    blocks: int = 0

    @property
    def kernel(self) -> str:
        return BACKENDS[self.backend]

    def valid(self) -> bool:
        return self.blocks >= 0


STORE = store.Store("all_reduce", {"all_reduce": Way})


def size_class(nbytes: int) -> int:
    """The power of two that is not smaller: one choice serves all sizes up to it, from half of it on."""
    return 1 << max(0, nbytes - 1).bit_length()


def fastest_first(ms: dict[Way, float]) -> dict[Way, float]:
    return dict(sorted(ms.items(), key=lambda one: (one[1], one[0])))


def measured(world: int, device: torch.device) -> dict[int, dict[Way, float]]:
    """Size class -> way -> ms, the fastest first, as kept on disk for so many ranks on GPUs like this one."""
    return {problem["nbytes"]: fastest_first(ms) for problem, ms in STORE.matching(*_kept_for(world, device))}


def keep(size: int, world: int, device: torch.device, ms: dict[Way, float]) -> None:
    problem, versions = _kept_for(world, device)
    STORE.keep({"nbytes": size, **problem}, versions, ms)


def _kept_for(world: int, device: torch.device) -> tuple[dict, dict[str, str]]:
    # The sources are the kernels, how they are launched, and the numbers of blocks that are tried.
    cuda = device.type == "cuda"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else ""
    problem = {"world": world, "gpu": torch.cuda.get_device_name(device) if cuda else device.type}
    return problem, store.versions(symm.SOURCE, Path(symm.__file__), Path(__file__), nccl=nccl)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Reducer:
    """The all-reduce of one process group on one device.

    One workspace serves all layers of the group, one after the other: calls on several streams wait for each other. A
    replayed CUDA graph is not seen: call `wait_for_last_stream` before it. `why` the ranks share no memory is "" when
    they do; `library` is what adds up without a measurement; `table`: size class -> way -> ms, the fastest first.
    """

    def __init__(self, device: torch.device, why: str, library: str, table: dict[int, dict[Way, float]]):
        self.device, self.why, self.library, self.table = device, why, library, table
        self.space: symm.Workspace | None = None  # until one was needed
        self.captured = False  # whether a CUDA graph may read it: then it is kept when a larger one takes its place
        self._outgrown: list[symm.Workspace] = []
        self._views: dict[tuple, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def ways(self, nbytes: int) -> list[Way]:
        """The fastest first; the library alone where nothing was measured."""
        return list(self.table.get(size_class(nbytes)) or [Way(self.library)])

    @property
    def shared_bytes(self) -> int:
        return sum(symm.DATA + one.nbytes for one in (self.space, *self._outgrown) if one)

    def buffer(self, group: Ranks, rows: int, columns: int, dtype: torch.dtype, chunk: int | None) -> Tensor | None:
        if self.why or not rows * (row := columns * dtype.itemsize) or row % symm.PACKET or dtype not in symm.ELEMENTS:
            return None
        fastest = self.ways(min(chunk or rows, rows) * row)[0]
        return self.workspace(group, rows, columns, dtype) if fastest.kernel else None

    def workspace(self, group: Ranks, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """[rows, columns] of the workspace, which grows if need be. Collective; where it cannot, all ranks raise."""
        self.wait_for_last_stream()
        found = self._views.get((rows, columns, dtype))
        if found is None:
            with torch.inference_mode(False):  # what is made in that mode can be written in no other
                self._grow(group, rows * columns * dtype.itemsize)
                found = self._views[rows, columns, dtype] = self.space.view(rows, columns, dtype)
        return found

    def reserve(self, group: Ranks, nbytes: int) -> bool:
        """Whether the ranks share so many bytes. A collective where it must grow; `why` says later why it cannot."""
        if not self.why and (self.space is None or nbytes > self.space.nbytes):
            try:
                self.workspace(group, 1, nbytes, torch.uint8)
            except (BlockShockError, RuntimeError) as error:  # the same on all ranks
                if isinstance(error, torch.OutOfMemoryError) or _capturing(self.device):
                    raise  # another call may be smaller, or not in a graph
                self.why = first_line(error)
        return not self.why

    def holds(self, x: Tensor) -> bool:
        return self.space is not None and self.space.holds(x)

    def sum(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None, way: Way | None = None) -> Tensor:
        """The sum of what the ranks have in the workspace at x, plus bias, in `out` or else in a new tensor."""
        if not x.is_contiguous() or not self.holds(x):
            raise ValueError("what is added up is contiguous and lies in the workspace as it is now")
        self.wait_for_last_stream()
        way = way or self.ways(x.nbytes)[0]
        if not way.kernel:  # a last, smaller chunk may be of a size that was not measured: as the nearest
            size = size_class(x.nbytes)
            near = sorted(self.table, key=lambda other: max(size, other) // min(size, other))
            way = next(way for one in near for way in self.table[one] if way.kernel)
        out = torch.empty_like(x) if out is None else out
        # The kernel reads the bias by packets; one of another dtype or an odd address is added after.
        fits = bias is not None and bias.dtype == x.dtype and bias.is_contiguous() and not bias.data_ptr() % symm.PACKET
        self.space.sum(way.kernel, x, bias if fits else None, out, way.blocks)
        return out if bias is None or fits else out.add_(bias)

    def _grow(self, group: Ranks, nbytes: int) -> None:
        if self.space is not None and nbytes <= self.space.nbytes:
            return
        if _capturing(self.device):
            why = "the workspace that ranks share cannot grow while a CUDA graph is captured"
            raise UnsupportedError(f"{why}: call the layer once before")
        larger = symm.Workspace(group, max(SMALLEST_WORKSPACE, size_class(nbytes)), self.device)
        if self.captured and self.space is not None:
            self._outgrown.append(self.space)
        self.space, self._views, self.captured = larger, {}, False

    def wait_for_last_stream(self) -> None:
        if self.device.type != "cuda":
            return
        if torch.cuda.is_current_stream_capturing():
            self.captured = True
            return
        self._stream = stream_after(self._stream, self.device)


_reducers: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Reducer]] = weakref.WeakKeyDictionary()


def made(handle: dist.ProcessGroup, device: torch.device) -> Reducer | None:
    return _reducers.get(handle, {}).get(device)


def reducer(group: Ranks, device: torch.device) -> Reducer:
    """The group's, made at the first call, which on CUDA is a collective."""
    if (found := made(handle := group.handle, device)) is not None:
        return found
    if device.type == "cuda" and device.index is None:
        return reducer(group, torch.device("cuda", torch.cuda.current_device()))
    if _capturing(device):
        raise UnsupportedError("a group's first all-reduce cannot be captured: call the layer once before the graph")
    why, table = symm.impossible(group.world_size, device), {}
    if device.type == "cuda" or not why:
        # All ranks take rank 0's table: another process may write the file between two ranks' looks at it.
        mine = measured(group.world_size, device) if group.rank == 0 else {}
        seen = group.gather_objects((symm.facts(group.world_size, device), mine))
        why, table = symm.reason([facts for facts, _ in seen]), seen[0][1]
    # Of the process group's libraries the one for the device; a configuration reads "cpu:gloo,cuda:nccl".
    libraries = dict(pair.split(":") for pair in dist.get_backend_config(handle).split(","))
    one = Reducer(device, why, libraries.get(device.type, "gloo"), table)
    _reducers.setdefault(handle, {})[device] = one
    return one


class Reduction:
    """A call that adds up the ranks' x [rows, columns] by one way, over and over, from where that way reads it."""

    def __init__(self, one: Reducer, group: Ranks, way: Way, x: Tensor):
        self.one, self.handle, self.way, self.x = one, group.handle, way, x
        self.place = one.workspace(group, *x.shape, x.dtype) if way.kernel else torch.empty_like(x)
        self.reset()

    def __call__(self) -> Tensor:
        if self.way.kernel:
            return self.one.sum(self.place, way=self.way)
        dist.all_reduce(self.place, group=self.handle)
        return self.place

    def reset(self) -> None:
        """Puts x back: what is added up in place time after time grows to infinity. No collective."""
        self.place.copy_(self.x)
