"""The collectives between the ranks of one run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from blockshock_lib.comm import all_reduce, pull, tuning
from blockshock_lib.comm.all_reduce import Reducer, Reduction
from blockshock_lib.comm.pull import Rows
from blockshock_lib.comm.ranks import Ranks
from blockshock_lib.errors import UnsupportedError

# torch 2.13 renamed the call and warns about the old name; 2.11 has the old name only.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SUM = dist.AllreduceOptions()
_SUM.asyncOp = False


@dataclass(frozen=True)
class Pending:
    """The result of a collective that may still be running; read it through `wait` only."""

    result: Tensor
    work: dist.Work | None = None  # None where there was nothing to communicate
    finish: Callable[[Tensor], Tensor] | None = None  # result -> what the caller wants, for example its transpose

    def wait(self) -> Tensor:
        """On CUDA the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.result if self.finish is None else self.finish(self.result)


def refuse_gradient(x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise UnsupportedError("this collective has no backward: call the layer under torch.no_grad() or detach x")


def unkept(x: Tensor) -> Tensor:
    """x, or under selective activation checkpointing, which may keep x and have it summed once more, a copy."""
    modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else ()
    return x.clone() if any(type(mode).__module__ == "torch.utils.checkpoint" for mode in modes) else x


@dataclass(frozen=True)
class Group(Ranks):
    """The collectives of one rank with the ranks it works with. UnsupportedError where x wants a gradient."""

    @property
    def connected(self) -> bool:
        return self.world_size > 1 and self.reference is not None

    def buffer(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device, chunk: int | None = None
    ) -> Tensor | None:
        """Where a partial result [rows, columns] is best written, so that `all_reduce` need not copy it; None where any
        tensor does. `chunk`: how many rows are added up at a time; default all.

        It is overwritten by the next: add it up before. The ranks ask for the same sizes in the same order. Making the
        first, or a larger one than ever, is a collective, and an UnsupportedError while a CUDA graph is captured.
        """
        return all_reduce.reducer(self, device).buffer(self, rows, columns, dtype, chunk) if self.connected else None

    def all_reduce(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Sum of `x` over the ranks, plus `bias` [N] once; contiguous.

        An `x` in a `buffer`, or rows of it, may be overwritten, and the sum is written into `out`, a new tensor by
        default. Any other is added up in place, and returned; `out` is then not looked at.
        """
        self._check(x)
        if (shared := self._reducer(x.device)) is not None and shared.holds(x):
            return shared.sum(x, bias, out)
        # Not started and waited for: NCCL then stays on the current stream. dist.all_reduce takes 1.5 us more.
        if self.world_size > 1 and (work := self.handle.allreduce([x], _SUM)) is not None:
            work.wait()
        return x if bias is None else x.add_(bias)

    def start_all_reduce(self, x: Tensor) -> Pending:
        """`all_reduce` started: what runs until `wait` is overlapped with it. `x` must not be touched until then."""
        self._check(x)
        return Pending(x, self.handle.allreduce([x]) if self.world_size > 1 else None)

    def wait_for_last_stream(self, device: torch.device) -> None:
        """Makes the current stream wait for the last all-reduce when that ran on another; no collective. To be called
        before the replay of a CUDA graph that holds an all-reduce; the other calls here do so by themselves.
        """
        if reducer := self._reducer(device):
            reducer.wait_for_last_stream()

    def shared_bytes(self, device: torch.device) -> int:
        """Bytes of symmetric memory of this rank's sums: no peak of PyTorch's allocator counts it. No collective."""
        return reducer.shared_bytes if (reducer := self._reducer(device)) else 0

    def unshared(self, device: torch.device) -> str:
        """Why these ranks share no memory, as far as they have tried to; "" where they do."""
        return reducer.why if (reducer := self._reducer(device)) else "no call has asked for it"

    def tune(self, nbytes: int, device: torch.device) -> None:
        """Makes all_reduce take the fastest backend for that size: measured once, and kept on disk. Collective."""
        if self.connected:
            tuning.tune(self, nbytes, device)

    def reductions(self, x: Tensor) -> dict[str, Reduction]:
        """Every way measured for the size of x [rows, columns], the fastest first: backend -> a call on a copy, which
        it overwrites until it is `reset`. Collective, as each call; valid until the next `buffer`.
        """
        if not self.connected:
            return {}
        one, own = all_reduce.reducer(self, x.device), x.clone()  # x may lie in the workspace
        return {way.backend: all_reduce.Reduction(one, self, way, own) for way in one.ways(x.nbytes)}

    def shared(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Where what `all_gather` reads is best written; None where ranks share no memory. Otherwise as `buffer`."""
        one = self._sharing(device, rows * columns * dtype.itemsize)
        return None if one is None else one.workspace(self, rows, columns, dtype)

    def all_gather(self, x: Tensor, direct: bool = False) -> Tensor:
        """Every rank's `x` [n, ...] in rank order, [world_size * n, ...]; `direct`: GPUs that share memory read it."""
        if direct and (one := self._sharing(x.device, x.nbytes)) is not None:
            refuse_gradient(x)
            return pull.start(one, self, x, [slice(0, len(x))] * self.world_size, len(x), beside=False)()
        return self._gather(x, False)[0]

    def start_all_gather(self, x: Tensor, finish: Callable[[Tensor], Tensor] | None = None) -> Pending:
        """`all_gather` started; `finish` is applied to what `wait` returns."""
        return Pending(*self._gather(x, True), finish)

    def exchange(self, x: Tensor, peer: int, out: Tensor | None = None) -> Tensor:
        """Swaps `x` with the tensor of the same shape and dtype that rank `peer` gives; returns the peer's, in `out`.
        Every rank of the group calls it, in pairs. Both are contiguous.
        """
        out, none = torch.empty_like(x) if out is None else out, x.new_empty(0)
        give, take = ([one if r == peer else none for r in range(self.world_size)] for one in (x, out))
        self.start_all_to_all(give, take)()
        return out

    def start_all_to_all(self, give: Sequence[Tensor], take: Sequence[Tensor]) -> Callable[[], None]:
        """give[r], contiguous, goes to rank r, and what rank r gives into take[r], of the same shape and dtype; what is
        empty does not travel. Returns what waits for it: until then none of them is touched.
        """
        for x in give:
            self._check(x)
        swap = []
        for peer, (mine, theirs) in enumerate(zip(give, take, strict=True)):
            if peer == self.rank:
                theirs.copy_(mine)
                continue
            other = dist.get_global_rank(self.handle, peer)
            swap += [dist.P2POp(dist.isend, mine, other, self.handle)] if mine.numel() else []
            swap += [dist.P2POp(dist.irecv, theirs, other, self.handle)] if theirs.numel() else []
        works = dist.batch_isend_irecv(swap) if swap else []

        def wait() -> None:
            for work in works:
                work.wait()
            swap.clear()  # until now their memory was in use

        return wait

    def start_pull(
        self, x: Tensor, give: Sequence[Rows], want: Sequence[Rows], most: int, direct: bool = True
    ) -> Callable[[], Tensor]:
        """Starts to fetch rows want[r] of rank r's x [n, ...], which rank r knows as its give[this rank]: int64 places
        or a slice. `most`, the same on all ranks: of n. Returns what waits for the rows of all ranks and gives them,
        [sum of wanted rows, ...], in rank order; nothing else of this group may be started before it was called.

        GPUs that share memory read them if `direct`; else they are sent. Collective; a CUDA graph can hold it after
        one call of as many bytes.
        """
        refuse_gradient(x)
        if direct and (one := self._sharing(x.device, most * pull.row_bytes(x))) is not None:
            return pull.start(one, self, x, want, most, beside=True)
        counts = list(map(pull.count, want))
        out = x.new_empty((sum(counts), *x.shape[1:]))
        wait = self.start_all_to_all([x[rows].contiguous() for rows in give], out.split(counts))
        return lambda: wait() or out

    def _check(self, x: Tensor) -> None:
        refuse_gradient(x)
        if self.handle is None and self.world_size > 1:
            raise UnsupportedError(f"{self.world_size} ranks share this layer but no process group joins them")

    def _gather(self, x: Tensor, started: bool) -> tuple[Tensor, dist.Work | None]:
        self._check(x)
        if self.world_size == 1:
            return x, None
        out = x.new_empty((self.world_size * x.shape[0], *x.shape[1:]))
        return out, _gather_single(out, x, group=self.handle, async_op=started)

    def _sharing(self, device: torch.device, nbytes: int) -> Reducer | None:
        """The group's, where its ranks share so much memory, which they make if need be: a collective."""
        one = all_reduce.reducer(self, device) if self.connected and nbytes else None
        return one if one is not None and one.reserve(self, nbytes) else None

    def _reducer(self, device: torch.device) -> Reducer | None:
        return all_reduce.made(self.handle, device) if self.connected else None
