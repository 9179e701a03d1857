"""A group of worker processes, one a rank, seen from the parent, which alone keeps time.

After any failure the whole group is killed, because what is left of it may hang in a collective. A call may allow the
loss of ranks: then the others go on, and the group is good for nothing more afterwards.
"""

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
from collections.abc import Callable, Collection, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from blockshock_lib.errors import DeadlineError, LaunchError, RankError, first_line
from blockshock_lib.ranks import worker

SCRATCH = "BLOCKSHOCK_SCRATCH"  # where a run keeps what is temporary
CLOSE_SECONDS = 5.0  # NCCL captured in a CUDA graph can hang destroy_process_group (pytorch#115388)
GRACE_SECONDS = 0.3  # how long a first error waits for an earlier one; who tells of a lost peer waits CLOSE_SECONDS


class Lost(NamedTuple):
    """In the place of the result of a rank that died, where the call allowed it."""

    rank: int
    reason: str


class WorkerGroup(contextlib.AbstractContextManager):
    """Worker processes, one a rank, that run module-level functions and share a process group; one rank has none.

    A context manager, or call `close`: no process outlives it, the parent, or a failure. RankError or DeadlineError
    where not all ranks join within `start_seconds`. Rank r computes with `threads` torch threads, where device is
    "cuda" on cuda:<first + r>, and appends what it prints to rank<first + r>.log in the folder `logs`, by default a
    temporary one. `environment`: variables that the workers set before they import torch.
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
        first: int = 0,
        environment: Mapping[str, str] = MappingProxyType({}),
    ):
        backend = backend or ("nccl" if device == "cuda" else "gloo")
        if processes < 1 or (backend == "nccl" and device != "cuda"):
            raise LaunchError(f"{processes} processes with {backend} on {device} are no group of workers")
        # Where a run has a scratch folder, what a killed parent leaves there is swept with it.
        self._meeting = Path(tempfile.mkdtemp(prefix="blockshock-", dir=os.environ.get(SCRATCH) or None))
        folder = self._meeting if logs is None else Path(logs)
        self._logs = [worker.log_of(folder, first + rank) for rank in range(processes)]
        self._processes: dict[int, BaseProcess] = {}
        self._pipes: dict[int, Connection] = {}
        # Also when the group is forgotten or the interpreter ends.
        self._end = weakref.finalize(self, _stop, self._processes, self._pipes, self._meeting)
        with self._ended_on_failure():
            folder.mkdir(parents=True, exist_ok=True)
            # Logs are appended to; what an earlier group wrote is not this one's.
            self._seen = [log.stat().st_size if log.exists() else 0 for log in self._logs]
            early = any(name.startswith(("TORCH", "TRITON")) for name in environment)  # read as it is imported
            start = starter("cuda" if early else device)
            for rank in range(processes):
                self._pipes[rank], theirs = start.Pipe()
                where = f"cuda:{first + rank}" if device == "cuda" else device
                args = theirs, self._logs[rank], self._meeting, dict(os.environ) | dict(environment)
                args += rank, processes, where, backend, threads
                self._processes[rank] = start.Process(target=worker.main, args=args, name=f"rank {rank}", daemon=True)
                self._processes[rank].start()
                theirs.close()
            self._collect(start_seconds)

    @property
    def alive(self) -> bool:
        return self._end.alive and all(process.is_alive() for process in self._processes.values())

    def call(
        self,
        fn: Callable[..., Any],
        *args: Any,
        seconds: float,
        on_emit: Callable[[int, Any], None] = lambda rank, value: None,
        may_lose: Collection[int] = (),
    ) -> list[Any]:
        """The results, in rank order, of `fn(ctx, *args)` on every rank; pickled, as is `fn` by its module and name.

        `on_emit(rank, value)` hears each `ctx.emit(value)`; what it raises ends the group. A rank of `may_lose` that
        fails gives a `Lost`, the others go on (see `RankContext.lost`), and the group is no longer `alive`. LaunchError
        where `fn` cannot be found by a worker, or the group has ended: nothing was run. RankError or DeadlineError
        where a rank raised or died, or not all answered within `seconds`: the group is dead.
        """
        if not self._end.alive:
            raise LaunchError("this group of workers has ended; start a fresh one")
        message = pack_call(fn, args)
        with self._ended_on_failure():
            self._tell(message)
            answers = self._collect(seconds, on_emit, may_lose)
            try:
                return [one if isinstance(one, Lost) else pickle.loads(one.value) for one in answers]
            except Exception as error:
                raise LaunchError(f"the results of {fn.__qualname__} cannot be rebuilt here: {error}") from error

    def close(self) -> None:
        try:
            if self.alive:
                self._tell(worker.LEAVE)
                deadline = time.monotonic() + CLOSE_SECONDS
                for process in self._processes.values():
                    process.join(max(0.0, deadline - time.monotonic()))
        finally:
            self._end()

    def __exit__(self, kind, error, trace) -> None:
        self.close() if kind is None else self._end()

    @contextlib.contextmanager
    def _ended_on_failure(self):
        try:
            yield
        except BaseException:  # an interrupt must not leave ranks behind in a collective
            self._end()
            raise

    def _tell(self, message: bytes) -> None:
        for pipe in self._pipes.values():
            with contextlib.suppress(OSError):  # one that has died is found, and named, by `_hear`
                pipe.send_bytes(message)

    def _collect(
        self, seconds: float, on_emit: Callable | None = None, may_lose: Collection[int] = ()
    ) -> list[worker.Answer | Lost]:
        deadline, failures, answers = time.monotonic() + seconds, {}, {}
        while len(answers) < len(self._processes):
            for rank in self._ready(answers, max(0.0, deadline - time.monotonic())):
                message = self._hear(rank)
                if not isinstance(message, worker.Answer):
                    on_emit(rank, *message)
                    continue
                answers[rank] = message
                if not message.ok and rank in may_lose:
                    _kill(self._processes[rank])  # also one that raised: no peer must wait for it in a collective
                    self._tell(worker.LOST + str(rank).encode())
                    answers[rank] = Lost(rank, f"{message.kind}: {first_line(message.message)}")
                elif not message.ok:
                    grace = CLOSE_SECONDS if worker.is_knock_on(message.message) else GRACE_SECONDS
                    deadline = min(time.monotonic() + grace, deadline if failures else float("inf"))
                    failures[rank] = message
            if time.monotonic() >= deadline:  # also where a rank says something all the time
                break
        if failures:
            rank = worker.root_cause(failures)
            raise RankError(rank, failures[rank].kind, failures[rank].message, failures[rank].traceback)
        if len(answers) < len(self._processes):
            raise DeadlineError(seconds, self._stacks())
        return [answers[rank] for rank in sorted(answers)]

    def _ready(self, answers: dict[int, worker.Answer | Lost], seconds: float) -> list[int]:
        # The ranks that have said something, or died, within `seconds`. One that has answered well is still listened
        # to: should it die while others compute, its answer says so.
        rest = [r for r in self._processes if r not in answers or getattr(answers[r], "ok", False)]
        sources = {self._processes[r].sentinel: r for r in rest} | {self._pipes[r]: r for r in rest if r not in answers}
        return sorted({sources[source] for source in wait(list(sources), seconds)})

    def _hear(self, rank: int) -> worker.Answer | tuple[Any]:
        # Its answer, or what it emits; where it has died an answer that says so.
        with contextlib.suppress(EOFError, OSError):
            if self._pipes[rank].poll():
                return pickle.loads(self._pipes[rank].recv_bytes())
        now = time.monotonic()  # before its core is written, so that who died first is told apart
        self._processes[rank].join(CLOSE_SECONDS)
        kind, message = _death(self._processes[rank].exitcode)
        log = _read(self._logs[rank])[self._seen[rank] :].decode(errors="replace")
        told = "\n".join(["(last lines of its log)", *log.splitlines()[-30:]])
        return worker.Answer(kind=kind, message=message, traceback=told, time=now)

    def _stacks(self) -> dict[int, str]:
        # The stacks of all threads of each rank now; kept beside the logs too.
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        files = [worker.log_of(self._meeting, rank, "stacks") for rank in self._processes]
        texts, before, until, ranks = [], None, time.monotonic() + CLOSE_SECONDS, self._processes.values()
        # faulthandler does not say when it has written all: once all that live began, and two looks find the same.
        while texts != before or any(not text and rank.is_alive() for text, rank in zip(texts, ranks, strict=True)):
            if time.monotonic() >= until:
                break
            time.sleep(0.35)
            before, texts = texts, [_read(file).decode(errors="replace") for file in files]
        for log, text in zip(self._logs, texts, strict=True):
            with contextlib.suppress(OSError), log.with_suffix(".stacks").open("a") as file:
                file.write(text)
        return dict(enumerate(text or "(no stack: this rank was still starting, or stopped)" for text in texts))


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...] = ()) -> bytes:
    """A call for the workers; LaunchError, with a hint, when a worker could not find or rebuild it."""
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
    if module in (None, "__main__", "__mp_main__") or not name or "<" in name:
        hint = "move it into a .py file, at the top level, and import it from there"
        raise LaunchError(f"{name or fn!r} (module {module}) cannot be found by a worker process: {hint}")
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise LaunchError(f"{module}.{name} and its arguments cannot be sent to a worker: {error}") from error


def starter(device: str) -> BaseContext:
    # A GPU's ranks are spawned. Those of a CPU are forked, at once, from a server that has imported the slow
    # libraries and computes nothing. It lives as long as this process. Of a kernel that a command started, which is
    # killed in the end, the command's scratch folder takes the server's files.
    spawn, place = multiprocessing.get_context("spawn"), tempfile.tempdir
    if device == "cuda":
        return spawn
    multiprocessing.set_forkserver_preload(["torch.distributed.tensor", "torch._dynamo", "pandas", "pydantic"])
    try:
        if "BLOCKSHOCK_RUN" in os.environ:
            tempfile.tempdir = os.environ.get(SCRATCH)
        forkserver.ensure_running()
    except OSError:  # the path of its socket is too long
        return spawn
    finally:
        tempfile.tempdir = place
    return multiprocessing.get_context("forkserver")


def _death(code: int | None) -> tuple[str, str]:
    # Kind and message of a process that ended before it had answered.
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"SIG{-code}"
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return name, f"the process was ended by {name}{hint}"
    hint = "" if code is None else f" with exit code {code}"
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    guard = f"; if {Path(main).name} starts groups, it needs `if __name__ == '__main__':`" if main and code == 1 else ""
    return "Exit", f"the process ended{hint} without an answer{guard}"


def _kill(process: BaseProcess) -> None:
    # The rank leads a process group of its own, with whatever it has started.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _stop(processes: dict[int, BaseProcess], pipes: dict[int, Connection], meeting: Path) -> None:
    started = [process for process in processes.values() if process.pid is not None]
    for process in started:
        _kill(process)
    for process in started:
        process.join(CLOSE_SECONDS)
    for pipe in pipes.values():
        pipe.close()
    shutil.rmtree(meeting, ignore_errors=True)


def _read(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""
