"""The ranks of one run and the collectives between them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from blockshock_lib.comm import all_reduce, tuning
from blockshock_lib.comm.all_reduce import Reduction
from blockshock_lib.comm.pending import Pending
from blockshock_lib.errors import UnsupportedError, first_line

# torch 2.13 renamed the call and warns about the old name; 2.11 has the old name only.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Group:
    """One rank's view of the ranks it works with.

    Attributes:
        rank: this rank, 0-based.
        world_size: how many ranks share the work.
        reference: weak, to the process group; None for a single rank, or for one of several ranks emulated in one
            process. Weak because a layer must not keep alive a group that its user destroyed: gloo's threads would
            outlive the interpreter and abort the process as it exits.
    """

    rank: int = 0
    world_size: int = 1
    reference: weakref.ref | None = None

    @classmethod
    def of(cls, handle: dist.ProcessGroup | None = None) -> Group:
        """The group behind `handle` (default: the world); a single rank when torch.distributed is not initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        handle = handle or dist.group.WORLD
        return cls(dist.get_rank(handle), dist.get_world_size(handle), weakref.ref(handle))

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """The process group, or None. UnsupportedError when it has been destroyed."""
        found = self.reference() if self.reference else None
        if self.reference and found is None:
            raise UnsupportedError("this layer's process group has been destroyed: make the layer again in a new one")
        return found

    def _collective(self, x: torch.Tensor) -> None:
        if torch.is_grad_enabled() and x.requires_grad:
            raise UnsupportedError(
                "this collective has no backward: call the layer under torch.no_grad() or detach its input"
            )
        if self.handle is None and self.world_size > 1:
            raise UnsupportedError(f"{self.world_size} ranks share this layer but no process group joins them")

    def buffer(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device, chunk: int | None = None
    ) -> torch.Tensor | None:
        """Where a partial result [rows, columns] should be written so that `all_reduce` need not copy it; or None, and
        any tensor does.

        It is overwritten by the next that is asked for: add it up before. The ranks ask for the same sizes in the same
        order. May be a collective, the first time and when a larger one than ever is asked for.

        Args:
            chunk: how many rows are added up at a time; default all.

        Raises:
            UnsupportedError: a collective is needed and a CUDA graph is being captured.
        """
        if self.world_size == 1 or self.reference is None:
            return None
        return all_reduce.reducer(self, device).buffer(self, rows, columns, dtype, chunk)

    def all_reduce(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum of `x` over the ranks, plus `bias` once. Contiguous, of any shape; with a bias [N], [..., N].

        An `x` in a `buffer`, or rows of it, may be overwritten, and the sum is written into `out`, a new tensor by
        default. Any other is added up in place, and returned; `out` is then not looked at.
        """
        self._collective(x)
        if self.world_size > 1:
            if (shared := all_reduce.holding(self.handle, x)) is not None:
                return shared.sum(x, bias, out)
            dist.all_reduce(x, group=self.handle)
        return x if bias is None else x.add_(bias)

    def take_turn(self, device: torch.device) -> None:
        """Has the current stream wait for the stream of the group's last sum, if that was another. Before the replay of
        a CUDA graph that holds a sum; the other calls here do so by themselves. No collective.
        """
        if self.world_size > 1 and self.reference is not None and (one := all_reduce.made(self.handle, device)):
            one.take_turn()

    def shared_bytes(self, device: torch.device) -> int:
        """Bytes of symmetric memory that this rank's sums hold now: one workspace for all layers of the group, which no
        peak of PyTorch's allocator counts. No collective.
        """
        joined = self.world_size > 1 and self.reference is not None
        one = all_reduce.made(self.handle, device) if joined else None
        return one.shared_bytes if one else 0

    def tune(self, nbytes: int, device: torch.device) -> None:
        """Has all_reduce take the fastest way for partial results of that size: measured once, kept on disk.

        Collective. Without it, and where the ranks' GPUs share no memory, NCCL (gloo on CPUs) adds up.
        """
        if self.world_size > 1 and self.reference is not None:
            tuning.tune(self, nbytes, device)

    def reductions(self, x: torch.Tensor) -> dict[str, Reduction]:
        """Every way to add up the ranks' x [rows, columns] that was measured for its size, the fastest first: backend
        -> a call on a copy, to be timed: it overwrites what it and the others read, until it is `reset`. Collective,
        and so is each call; valid until the next `buffer`.
        """
        return all_reduce.reductions(self, x) if self.world_size > 1 and self.reference is not None else {}

    def start_all_reduce(self, x: torch.Tensor) -> Pending:
        """`all_reduce` started: what runs until `wait` is overlapped with it. `x` must not be touched until then."""
        self._collective(x)
        if self.world_size == 1:
            return Pending(x)
        return Pending(x, dist.all_reduce(x, group=self.handle, async_op=True))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenation of every rank's `x` along its first dimension, in rank order: [n, ...] -> [world_size
        * n, ...].
        """
        self._collective(x)
        if self.world_size == 1:
            return x
        out = x.new_empty((self.world_size * x.shape[0], *x.shape[1:]))
        _gather_single(out, x, group=self.handle)
        return out

    def start_all_gather(
        self, x: torch.Tensor, finish: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> Pending:
        """`all_gather` started; `finish` is applied to what `wait` returns."""
        self._collective(x)
        if self.world_size == 1:
            return Pending(x, finish=finish)
        out = x.new_empty((self.world_size * x.shape[0], *x.shape[1:]))
        return Pending(out, _gather_single(out, x, group=self.handle, async_op=True), finish)

    def exchange(self, x: torch.Tensor, peer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Swaps `x` with the tensor of the same shape and dtype that rank `peer` gives; returns the peer's.

        Every rank of the group calls it, in pairs. `x` and `out`, where the peer's is written, are contiguous.
        """
        self._collective(x)
        out = torch.empty_like(x) if out is None else out
        if peer == self.rank:
            return out.copy_(x)
        other = dist.get_global_rank(self.handle, peer)
        swap = [dist.P2POp(dist.isend, x, other, self.handle), dist.P2POp(dist.irecv, out, other, self.handle)]
        for work in dist.batch_isend_irecv(swap):
            work.wait()
        return out

    def largest(self, values: list[float], device: torch.device) -> list[float]:
        """The elementwise maximum over the ranks; how the slowest rank becomes the sample. Every rank gets it."""
        if self.world_size == 1 or self.handle is None or not values:
            return list(values)
        t = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(t, op=dist.ReduceOp.MAX, group=self.handle)
        return t.tolist()

    def first_word(self, word: str, device: torch.device) -> tuple[int, str]:
        """The lowest rank with a non-empty `word`, and the word; (-1, "") when no rank has one. Every rank gets it.

        How the ranks agree that one of them failed before any of them enters a collective that would hang.
        """
        if self.handle is None:
            return (self.rank, word) if word else (-1, "")
        if not any(self.largest([float(bool(word))], device)):
            return -1, ""
        words: list[str] = [""] * self.world_size
        dist.all_gather_object(words, word, group=self.handle)
        return next((r, w) for r, w in enumerate(words) if w)

    @contextlib.contextmanager
    def together(self, device: torch.device) -> Iterator[None]:
        """Around a step that each rank makes by itself before a collective: where it fails on one, all raise.

        Raises:
            torch.OutOfMemoryError: a rank ran out of memory.
            UnsupportedError: a rank failed otherwise. Both name the lowest such rank and its reason.
        """
        failed, word = None, ""
        try:
            yield
        except Exception as error:
            failed, word = error, first_line(error)
        rank, word = self.first_word(word, device)
        if word:
            # Symmetric memory has no class of its own for it: the driver's "out of memory" is a RuntimeError there.
            kind = torch.OutOfMemoryError if "out of memory" in word.lower() else UnsupportedError
            raise kind(f"on rank {rank}: {word}") from failed

    def align(self, token: torch.Tensor) -> None:
        """Lets the ranks (on CUDA: their streams) start the next thing together. `token`: any small tensor."""
        if self.handle is not None:
            dist.all_reduce(token, op=dist.ReduceOp.MAX, group=self.handle)
