"""Ranks as threads of one process: every method of several ranks on one device, checked but with no claim about speed.

The threads take turns: one runs until its next collective, then the next. So nothing runs beside a rank's timed work or
captured graph, and every run draws the same random numbers.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockshock_lib.comm.group import Group, Pending, refuse_gradient
from blockshock_lib.errors import UnsupportedError


class _Stopped(BaseException):
    """Another rank failed. No Exception, as no `except Exception` of a rank may go on after it."""


class _Turns:
    def __init__(self, world_size: int):
        self.turns = [threading.Semaphore(0) for _ in range(world_size)]
        self.table: list = [None] * world_size  # what each rank has laid there
        self.error: BaseException | None = None

    def give(self, rank: int) -> None:
        self.turns[rank % len(self.turns)].release()

    def take(self, rank: int) -> None:
        self.turns[rank].acquire()
        if self.error is not None:
            raise _Stopped

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        for turn in self.turns:
            turn.release()

    def share(self, rank: int, call: str, value: object) -> list:
        """Every rank's value, in rank order; RuntimeError where the ranks are not in the same call."""
        self.table[rank] = call, value
        self.give(rank + 1)
        self.take(rank)  # all have laid theirs
        calls, values = zip(*self.table, strict=True)
        self.give(rank + 1)
        self.take(rank)  # all have read
        if len(set(calls)) > 1:
            said = ", ".join(f"{r} {c}" for r, c in enumerate(calls))
            raise RuntimeError(f"the ranks wait in different calls: {said}")
        return list(values)


def _added(every: list[Tensor]) -> Tensor:
    total = every[0].float() if every[0].itemsize == 2 else every[0].clone()
    for other in every[1:]:
        total += other
    return total


@dataclass(frozen=True)
class LocalGroup(Group):
    """The collectives of one thread with the others of its `run`. Sums are made in rank order, those of 16 bits in fp32
    and rounded once: all ranks get the same bits.
    """

    turns: _Turns | None = None

    def _of_all(self, call: str, x: Tensor, make: Callable[[list[Tensor]], Tensor]) -> Tensor:
        # What is made of every rank's x; nobody goes on before all have read.
        refuse_gradient(x)
        if x.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                raise UnsupportedError("a collective of ranks that are threads cannot be captured in a CUDA graph")
            torch.cuda.current_stream(x.device).synchronize()
        made = make(self.turns.share(self.rank, f"{call} {list(x.shape)} {x.dtype}", x))
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        self.turns.share(self.rank, "read", None)
        return made

    def all_reduce(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        x.copy_(self._of_all("all_reduce", x, _added))
        return x if bias is None else x.add_(bias)

    def start_all_reduce(self, x: Tensor) -> Pending:
        return Pending(self.all_reduce(x))

    def _gather(self, x: Tensor, started: bool) -> tuple[Tensor, None]:
        return self._of_all("all_gather", x, torch.cat), None

    def start_all_to_all(self, give: Sequence[Tensor], take: Sequence[Tensor]) -> Callable[[], None]:
        for x in give:
            refuse_gradient(x)
        for mine, theirs in zip(take, self.turns.share(self.rank, "all_to_all", give), strict=True):
            mine.copy_(theirs[self.rank])
        self.turns.share(self.rank, "read", None)
        return lambda: None

    def gather_objects(self, value: object) -> list:
        return self.turns.share(self.rank, "gather_objects", value)

    def max_over_ranks(self, values: list[float], device: torch.device) -> list[float]:
        return [max(column) for column in zip(*self.turns.share(self.rank, "max_over_ranks", values), strict=True)]

    def barrier(self, token: Tensor) -> None:
        self.turns.share(self.rank, "barrier", None)


def run(world_size: int, fn: Callable[[Group], object]) -> list:
    """What fn(group) returns on so many ranks, each a thread with the caller's grad mode.

    Raises what the first rank to fail raised, with its rank as a note; the others end at their next collective.
    RuntimeError where the ranks are in different collectives, or one has ended.
    """
    turns, results, grad = _Turns(world_size), [None] * world_size, torch.is_grad_enabled()

    def play(rank: int) -> None:
        try:
            turns.take(rank)
            # One thread of autograd serves a GPU's backwards: a collective in one would wait there for the others.
            with torch.set_grad_enabled(grad), torch.autograd.set_multithreading_enabled(False):
                results[rank] = fn(LocalGroup(rank, world_size, turns=turns))
                turns.share(rank, "the end", None)
            turns.give(rank + 1)
        except _Stopped:
            pass
        except BaseException as error:
            error.add_note(f"on rank {rank} of {world_size}")
            turns.fail(error)

    threads = [threading.Thread(target=play, args=(r,), name=f"rank {r}", daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    turns.give(0)
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C
        turns.fail(error)
        raise
    if turns.error is not None:
        raise turns.error
    return results
