"""A group of worker processes, one a rank, seen from the parent: start, call, watch, stop.

The parent alone keeps time and decides how a group ends. After any failure the whole group is killed and stays dead,
because what is left of it may hang in a collective; the next case gets a fresh one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from blockshock_lib import worker
from blockshock_lib.errors import DeadlineError, LaunchError, RankError

GRACE_SECONDS = 0.3  # how long a first error waits for the one that caused it
CLOSE_SECONDS = 5.0  # NCCL captured in a CUDA graph can hang destroy_process_group (pytorch#115388)
STACK_SECONDS = 1.0

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
        meeting = Path(tempfile.mkdtemp(prefix="blockshock-"))
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        # A finalizer also runs when the group is forgotten or the interpreter ends.
        self._finalizer = weakref.finalize(self, _stop, self._processes, self._pipes, meeting)
        with self._killed_on_failure():
            self._logs = meeting / "logs" if logs is None else Path(logs)
            self._logs.mkdir(parents=True, exist_ok=True)
            self._seen = {name: _size(self._logs / name) for r in range(processes) for name in (_log(r), _stacks(r))}
            spawn = multiprocessing.get_context("spawn")
            for rank in range(processes):
                place = worker.Place(rank, processes, device, backend, threads, self._logs, meeting, os.getpid())
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=worker.main, args=(place, theirs), name=f"rank {rank}", daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
            self._collect(start_seconds)

    @property
    def alive(self) -> bool:
        """Whether every rank can take a call."""
        return self._finalizer.alive and all(process.is_alive() for process in self._processes)

    @property
    def pids(self) -> list[int]:
        """Process id of each rank, in rank order."""
        return [process.pid for process in self._processes]

    def call(self, fn: Callable[..., Any], *args: Any, seconds: float) -> list[Any]:
        """Run `fn(ctx, *args)` on every rank and return each rank's result in rank order.

        `fn` lives in an importable module; its arguments and result are pickled, tensors by value.

        Raises:
            LaunchError: `fn` cannot be found by a worker, or the group has ended. Nothing was run.
            RankError: a rank raised or died; it is named, with its own traceback. The group is dead.
            DeadlineError: no answer from all ranks within `seconds`; it has every rank's stacks. The group is dead.
        """
        if not self._finalizer.alive:
            raise LaunchError("this group of workers has ended; start a fresh one")
        message = pack_call(fn, args)
        with self._killed_on_failure():
            for pipe in self._pipes:
                # A rank that died since the last call is found, and named, while collecting.
                with contextlib.suppress(OSError):
                    pipe.send_bytes(message)
            answers = self._collect(seconds)
            try:
                return [pickle.loads(answer) for answer in answers]
            except Exception as error:
                raise LaunchError(f"the results of {fn.__qualname__} cannot be rebuilt here: {error}") from error

    def close(self) -> None:
        """Let the ranks leave their process group and exit; kill what has not left after 5 s."""
        if not self._finalizer.alive:
            return
        with self._killed_on_failure():
            for pipe in self._pipes:
                with contextlib.suppress(OSError):
                    pipe.send_bytes(worker.LEAVE)
            deadline = time.monotonic() + CLOSE_SECONDS
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()))
        self._end()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.close() if kind is None else self._end()

    @contextlib.contextmanager
    def _killed_on_failure(self):
        # BaseException: an interrupt must not leave ranks behind in a collective.
        try:
            yield
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        self._finalizer()
        for rank in range(len(self._processes)):
            path = self._logs / _stacks(rank)
            if path.exists() and not _size(path):
                path.unlink(missing_ok=True)

    def _collect(self, seconds: float) -> list[bytes]:
        # One pickled value from every rank, in rank order; or the error that says which rank failed first, and why.
        deadline = time.monotonic() + seconds
        values: dict[int, bytes] = {}
        failures: dict[int, RankError] = {}
        times: dict[int, float] = {}
        while len(values) + len(failures) < len(self._pipes):
            rest = {r: p for r, p in enumerate(self._pipes) if r not in failures}
            sources = {pipe: r for r, pipe in rest.items() if r not in values}
            sources |= {self._processes[r].sentinel: r for r in rest}
            ready = wait(list(sources), max(0.0, deadline - time.monotonic()))
            for rank in {sources[one] for one in ready}:
                answer = self._hear(rank)
                if answer.ok:
                    values[rank] = answer.value
                    continue
                if not failures:
                    deadline = time.monotonic() + GRACE_SECONDS
                values.pop(rank, None)
                failures[rank] = RankError(rank, answer.kind, answer.message, answer.traceback)
                times[rank] = answer.time
            if not ready and time.monotonic() >= deadline:
                break
        if failures:
            raise root_cause(failures, times)
        if len(values) < len(self._pipes):
            raise DeadlineError(seconds, self._ask_stacks())
        return [values[rank] for rank in range(len(self._pipes))]

    def _hear(self, rank: int) -> worker.Answer:
        with contextlib.suppress(EOFError, OSError):
            if self._pipes[rank].poll():
                return pickle.loads(self._pipes[rank].recv_bytes())
        process = self._processes[rank]
        process.join(1.0)
        kind, message = _death(process.exitcode)
        lines = self._new_text(_log(rank)).splitlines()[-30:]
        told = "\n".join(["(last lines of its log)", *lines])
        return worker.Answer(kind=kind, message=message, traceback=told, time=time.monotonic())

    def _ask_stacks(self) -> dict[int, str]:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        # faulthandler does not say when it has written all: it has once nothing more comes.
        ranks = range(len(self._processes))
        found, before = {}, None
        end = time.monotonic() + STACK_SECONDS
        while time.monotonic() < end and (found != before or not all(found.values())):
            time.sleep(0.1)
            before, found = found, {rank: self._new_text(_stacks(rank)) for rank in ranks}
        return {rank: text or "(no stack: this rank was still starting, or stopped)" for rank, text in found.items()}

    def _new_text(self, name: str) -> str:
        # Logs are appended to; what an earlier group wrote is not this one's.
        try:
            return (self._logs / name).read_bytes()[self._seen[name] :].decode(errors="replace")
        except OSError:
            return ""


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


def _death(code: int | None) -> tuple[str, str]:
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"SIG{-code}"
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return name, f"the process was ended by {name}{hint}"
    hint = "" if code is None else f" with exit code {code}"
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    guard = f"; if {Path(main).name} starts groups, it needs `if __name__ == '__main__':`" if main and code == 1 else ""
    return "Exit", f"the process ended{hint} without an answer{guard}"


def _stop(processes: list, pipes: list[Connection], meeting: Path) -> None:
    for process in processes:
        # The rank leads a process group of its own, with whatever it has started.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    for process in processes:
        process.join(CLOSE_SECONDS)
    for pipe in pipes:
        pipe.close()
    shutil.rmtree(meeting, ignore_errors=True)


def _log(rank: int) -> str:
    return f"rank{rank}.log"


def _stacks(rank: int) -> str:
    return f"rank{rank}.stacks"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
