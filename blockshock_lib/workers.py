"""A group of worker processes, one a rank, seen from the parent: start, call, watch, stop.

The parent alone keeps time and decides how a group ends. After any failure the whole group is killed and stays dead,
because what is left of it may hang in a collective; the next case gets a fresh one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from blockshock_lib import worker
from blockshock_lib.children import Children
from blockshock_lib.errors import DeadlineError, LaunchError, RankError

GRACE_SECONDS = 0.3  # how long a first error waits for the one that caused it

# What a healthy rank says when a peer has gone: never the cause where another rank has failed too.
KNOCK_ON = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "remote process exited",
    "nccl communicator was aborted",
)


class WorkerGroup:
    """Worker processes, one a rank, that run module-level functions and share a process group.

    With one process there is no process group. Use it as a context manager, or call `close`: no process outlives it,
    the parent, or a failure.

    Args:
        processes: the number of ranks.
        device: "cpu", or "cuda" for cuda:<rank> on each rank.
        backend: "gloo" or "nccl"; left out, what the device asks for.
        threads: torch threads a rank.
        logs: folder to whose rank<r>.log rank r appends what it prints; left out, a temporary one.
        start_seconds: deadline for all ranks to join.

    Raises:
        RankError: a rank failed while starting.
        DeadlineError: the ranks did not all join in time.
    """

    def __init__(
        self,
        processes: int,
        *,
        device: Literal["cpu", "cuda"] = "cpu",
        backend: Literal["gloo", "nccl"] | None = None,
        threads: int = 1,
        logs: Path | None = None,
        start_seconds: float = 120,
    ):
        backend = backend or ("nccl" if device == "cuda" else "gloo")
        if processes < 1 or (backend == "nccl" and device != "cuda"):
            raise LaunchError(f"{processes} processes with {backend} on {device} are no group of workers")
        # A custodian that outlives a killed parent clears the folder that it names.
        meeting = Path(tempfile.mkdtemp(prefix="blockshock-", dir=os.environ.get("BLOCKSHOCK_SCRATCH") or None))
        self._size, self._logs = processes, meeting / "logs" if logs is None else Path(logs)
        common = dict(device=device, backend=backend, threads=threads, logs=self._logs, meeting=meeting)
        self._children = Children(self._places(common | {"processes": processes, "parent": os.getpid()}), meeting)
        with self._killed_on_failure():
            self._collect(start_seconds)

    @property
    def alive(self) -> bool:
        """Whether every rank can take a call."""
        return self._children.alive

    @property
    def pids(self) -> list[int]:
        """Process id of each rank that was started here, in rank order."""
        return self._children.pids

    def call(self, fn: Callable[..., Any], *args: Any, seconds: float) -> list[Any]:
        """Run `fn(ctx, *args)` on every rank and return each rank's result in rank order.

        `fn` lives in an importable module; its arguments and result are pickled, tensors by value.

        Raises:
            LaunchError: `fn` cannot be found by a worker, or the group has ended. Nothing was run.
            RankError: a rank raised or died; it is named, with its own traceback. The group is dead.
            DeadlineError: no answer from all ranks within `seconds`; it has every rank's stacks. The group is dead.
        """
        if self._children.ended:
            raise LaunchError("this group of workers has ended; start a fresh one")
        message = pack_call(fn, args)
        with self._killed_on_failure():
            self._children.tell(message)
            answers = self._collect(seconds)
            try:
                return [pickle.loads(answer) for answer in answers]
            except Exception as error:
                raise LaunchError(f"the results of {fn.__qualname__} cannot be rebuilt here: {error}") from error

    def close(self) -> None:
        """Let the ranks leave their process group and exit; kill what has not left after 5 s."""
        if self._children.ended:
            return
        with self._killed_on_failure():
            self._children.leave()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close() if kind is None else self._children.end()

    @contextlib.contextmanager
    def _killed_on_failure(self):
        # BaseException: an interrupt must not leave ranks behind in a collective.
        try:
            yield
        except BaseException:
            self._children.end()
            raise

    def _places(self, common: dict[str, Any]) -> list[worker.Place]:
        # Where each rank stands that is started here.
        return [worker.Place(rank=rank, gpu=rank, **common) for rank in range(self._size)]

    def _collect(self, seconds: float) -> list[bytes]:
        # One pickled value from every rank, in rank order; or the error that says which rank failed first, and why.
        deadline = time.monotonic() + seconds
        answers, failed = self._children.answers, False
        while len(answers) < self._size:
            news = self._children.hear(deadline - time.monotonic())
            if not failed and any(not answers[rank].ok for rank in news):
                failed, deadline = True, time.monotonic() + GRACE_SECONDS
            if not news and time.monotonic() >= deadline:
                break
        failures = {rank: answer for rank, answer in answers.items() if not answer.ok}
        if failures:
            errors = {r: RankError(r, a.kind, a.message, a.traceback) for r, a in failures.items()}
            raise root_cause(errors, {rank: answer.time for rank, answer in failures.items()})
        if len(answers) < self._size:
            raise DeadlineError(seconds, self._children.stacks())
        return [answers[rank].value for rank in range(self._size)]


def call(fn: Callable[..., Any], *args: Any, processes: int = 2, seconds: float = 60, **options: Any) -> list[Any]:
    """Start a group, run `fn(ctx, *args)` on every rank once, and end the group.

    `options`, results and errors are those of `WorkerGroup` and its `call`. Nothing is started for a call that cannot
    be sent to a worker.
    """
    pack_call(fn, args)
    with WorkerGroup(processes, **options) as group:
        return group.call(fn, *args, seconds=seconds)


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...] = ()) -> bytes:
    """Pickle a call for the workers; raise LaunchError, with a hint, when a worker could not find or rebuild it."""
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
    if module in (None, "__main__", "__mp_main__") or not name or "<" in name:
        raise LaunchError(
            f"{name or fn!r} (module {module}) cannot be found by a worker process: "
            "move it into a .py file, at the top level, and import it from there"
        )
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise LaunchError(f"{module}.{name} and its arguments cannot be sent to a worker: {error}") from error


def root_cause(failures: dict[int, RankError], times: dict[int, float]) -> RankError:
    """Of the ranks that failed together, the one that failed on its own account.

    A death by signal comes first (but for SIGABRT, which libraries raise when a peer is lost), then the earliest error;
    errors that only tell of a lost peer come last.
    """

    def order(rank: int) -> tuple[int, float]:
        failure = failures[rank]
        if failure.kind.startswith("SIG") and failure.kind != "SIGABRT":
            return 0, times[rank]
        text = failure.message.lower()
        return (2 if any(words in text for words in KNOCK_ON) else 1), times[rank]

    return failures[min(failures, key=order)]
