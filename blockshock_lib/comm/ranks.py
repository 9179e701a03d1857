"""The ranks of one run, and how they agree; no sums."""

import contextlib
import pickle
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

# Its functions default to the world as it is when they are imported. An optimizer imports them, and where the world
# exists by then they keep it for good: destroyed or not, gloo's threads live on and abort Python's exit.
import torch.distributed.nn.functional

from blockshock_lib.errors import UnsupportedError, first_line

PATIENCE = 60.0  # seconds after which the ranks that wait in a collective say for whom
DEADLINE = 1800.0  # seconds after which they give up, as torch's process groups do
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Ranks:
    """One rank's view of the ranks it works with."""

    rank: int = 0
    world_size: int = 1
    # To the process group; weak because a layer must not keep alive a group that its user destroyed: gloo's threads
    # would outlive the interpreter and abort the process as it exits.
    reference: weakref.ref | None = None

    @classmethod
    def of(cls, handle: dist.ProcessGroup | None = None) -> Self:
        """The group behind `handle`, by default the world; a single rank when torch.distributed is not initialised."""
        if not dist.is_initialized():
            return cls()
        handle = handle or dist.group.WORLD
        if dist.get_rank(handle) < 0:
            raise UnsupportedError("this rank is not in that process group: only its members make the layer")
        hash(reference := weakref.ref(handle))  # which it keeps: a key also when the group is gone
        return cls(dist.get_rank(handle), dist.get_world_size(handle), reference)

    def __deepcopy__(self, memo: dict) -> Self:
        return self

    def __reduce__(self) -> tuple:
        if self.reference:
            raise UnsupportedError(
                "a layer that ranks share cannot be pickled, as each holds its part: save its state_dict(), "
                "which every rank calls, or use blockshock_lib.checkpoint.save"
            )
        return type(self), (self.rank, self.world_size)

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """The process group, or None. UnsupportedError when it has been destroyed."""
        found = self.reference() if self.reference else None
        if self.reference and found is None:
            raise UnsupportedError("this layer's process group has been destroyed: make the layer again in a new one")
        return found

    def meet(self, what: str) -> None:
        """Returns once every rank has called it. After 60 s a warning names the ranks that have not called `what`,
        and after half an hour an UnsupportedError: a collective alone would hang without a word.
        """
        if (handle := self.handle) is None or self.world_size == 1:
            return
        store, number = dist.distributed_c10d._get_process_group_store(handle), _meetings.get(handle, 0)
        keys = [[f"blockshock/{n}/{rank}" for rank in range(self.world_size)] for n in (number, number - 2)]
        store.set(keys[0][self.rank], "")
        start, pause, patience = time.monotonic(), 1e-4, PATIENCE
        while not store.check(keys[0]):
            time.sleep(pause := min(2 * pause, 0.1))
            if (waited := time.monotonic() - start) > patience:
                missing = [rank for rank, key in enumerate(keys[0]) if not store.check([key])]
                said = (
                    f"ranks {missing} of {self.world_size} have not called {what} for {waited:.0f} s: every rank must"
                )
                if patience == DEADLINE and missing:
                    raise UnsupportedError(said)
                warnings.warn(said, stacklevel=2)
                patience = DEADLINE
        if number > 1:
            store.delete_key(keys[1][self.rank])  # all ranks have left that meeting, as they were in the one after it
        _meetings[handle] = number + 1

    def gather_objects(self, value: object) -> list:
        """Every rank's `value`, in rank order. torch's own needs NumPy, which torch does not bring."""
        if self.handle is None:
            return [value]
        on_gpu = "nccl" in dist.get_backend(self.handle)
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=device)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes, group=self.handle)
        padded = torch.zeros(self.world_size, int(sizes.max()), dtype=torch.uint8, device=device)
        padded[self.rank, : len(data)] = data.to(device)
        dist.all_reduce(padded, group=self.handle)
        return [pickle.loads(bytes(row[:size])) for row, size in zip(padded.tolist(), sizes.tolist(), strict=True)]

    def max_over_ranks(self, values: list[float], device: torch.device) -> list[float]:
        """The elementwise maximum over the ranks; how the slowest rank becomes the sample. Every rank gets it."""
        if self.world_size == 1 or self.handle is None or not values:
            return list(values)
        t = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(t, op=dist.ReduceOp.MAX, group=self.handle)
        return t.tolist()

    def first_error(self, error: str, device: torch.device) -> tuple[int, str]:
        """On every rank the lowest with an `error`, and that, or (-1, ""): before a collective that would hang."""
        if not any(self.max_over_ranks([float(bool(error))], device)):
            return -1, ""
        return next((rank, text) for rank, text in enumerate(self.gather_objects(error)) if text)

    @contextlib.contextmanager
    def raise_together(self, device: torch.device) -> Iterator[None]:
        """Around a step that each rank makes by itself before a collective: where it fails on one, all raise
        torch.OutOfMemoryError, or UnsupportedError where it was not for memory, with the lowest such rank's reason.
        """
        failed, reason = None, ""
        try:
            yield
        except Exception as error:
            failed, reason = error, first_line(error)
        rank, reason = self.first_error(reason, device)
        if reason:
            # Symmetric memory has no class of its own for it: the driver's "out of memory" is a RuntimeError there.
            kind = torch.OutOfMemoryError if "out of memory" in reason.lower() else UnsupportedError
            raise kind(f"on rank {rank}: {reason}") from failed

    def barrier(self, token: torch.Tensor) -> None:
        """Lets the ranks (on CUDA: their streams) start the next thing together. `token`: any small tensor."""
        if self.handle is not None:
            dist.all_reduce(token, op=dist.ReduceOp.MAX, group=self.handle)
