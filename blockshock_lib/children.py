"""The ranks that this process has started as its children: start, tell, hear, ask for stacks, end.

Nothing here decides how a group ends: see `workers` for ranks of one machine, `joined.group` for more machines.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from blockshock_lib import worker

CLOSE_SECONDS = 5.0  # NCCL captured in a CUDA graph can hang destroy_process_group (pytorch#115388)
STACK_SECONDS = 1.0
NO_STACK = "(no stack: this rank was still starting, or stopped)"


class Children:
    """Worker processes of this process. None outlives `end`, the object, or this process.

    Args:
        places: where each of them stands; its logs are appended to.
        meeting: folder that is removed with them.

    Attributes:
        answers: rank -> what it last said to `tell`; while it starts, whether it has joined.
    """

    def __init__(self, places: Sequence[worker.Place], meeting: Path):
        self.answers: dict[int, worker.Answer] = {}
        self._logs = {place.rank: place.logs for place in places}
        self._processes: dict[int, multiprocessing.process.BaseProcess] = {}
        self._pipes: dict[int, Connection] = {}
        # A finalizer also runs when the group is forgotten or the interpreter ends.
        self._finalizer = weakref.finalize(self, _stop, self._processes, self._pipes, meeting)
        try:
            for logs in self._logs.values():
                logs.mkdir(parents=True, exist_ok=True)
            self._seen = {
                path: _size(path)
                for rank, logs in self._logs.items()
                for path in (worker.log_of(logs, rank), worker.stacks_of(logs, rank))
            }
            spawn = multiprocessing.get_context("spawn")
            for place in places:
                ours, theirs = spawn.Pipe()
                name = f"rank {place.rank}"
                process = spawn.Process(target=worker.main, args=(place, theirs), name=name, daemon=True)
                process.start()
                theirs.close()
                self._processes[place.rank] = process
                self._pipes[place.rank] = ours
        except BaseException:
            self.end()
            raise

    @property
    def ended(self) -> bool:
        """Whether `end` was called."""
        return not self._finalizer.alive

    @property
    def alive(self) -> bool:
        """Whether every one of them can take a call."""
        return not self.ended and all(process.is_alive() for process in self._processes.values())

    @property
    def pids(self) -> list[int]:
        """Process id of each, in rank order."""
        return [process.pid for process in self._processes.values()]

    def tell(self, message: bytes) -> None:
        """Send a call, or `worker.LEAVE`, to all of them. One that has died is found, and named, by `hear`."""
        self.answers.clear()
        for pipe in self._pipes.values():
            with contextlib.suppress(OSError):
                pipe.send_bytes(message)

    def hear(self, seconds: float) -> list[int]:
        """The ranks that have answered, or died, within `seconds`; [] when none has. Their word is in `answers`.

        One that has answered well is still listened to: should it die while others compute, its answer says so.
        """
        rest = [r for r in self._processes if r not in self.answers or self.answers[r].ok]
        sources: dict[object, int] = {self._pipes[r]: r for r in rest if r not in self.answers}
        sources |= {self._processes[r].sentinel: r for r in rest}
        ready = {sources[one] for one in wait(list(sources), max(0.0, seconds))}
        self.answers |= {rank: self._hear(rank) for rank in ready}
        return sorted(ready)

    def stacks(self) -> dict[int, str]:
        """Rank -> the stacks of all its threads now, in at most a second."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        # faulthandler does not say when it has written all: it has once nothing more comes.
        found, before = {}, None
        end = time.monotonic() + STACK_SECONDS
        while time.monotonic() < end and (found != before or not all(found.values())):
            time.sleep(0.1)
            before, found = found, {r: self._new_text(worker.stacks_of(self._logs[r], r)) for r in self._logs}
        return {rank: text or NO_STACK for rank, text in found.items()}

    def leave(self) -> None:
        """Let them leave their process group and exit; `end` what has not left after 5 s."""
        self.tell(worker.LEAVE)
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        self.end()

    def end(self) -> None:
        """Kill what still runs, and remove the meeting folder and the files of stacks that nobody asked for."""
        self._finalizer()
        for rank, logs in self._logs.items():
            path = worker.stacks_of(logs, rank)
            if path.exists() and not _size(path):
                path.unlink(missing_ok=True)

    def _hear(self, rank: int) -> worker.Answer:
        with contextlib.suppress(EOFError, OSError):
            if self._pipes[rank].poll():
                return pickle.loads(self._pipes[rank].recv_bytes())
        process = self._processes[rank]
        process.join(1.0)
        kind, message = _death(process.exitcode)
        lines = self._new_text(worker.log_of(self._logs[rank], rank)).splitlines()[-30:]
        told = "\n".join(["(last lines of its log)", *lines])
        return worker.Answer(kind=kind, message=message, traceback=told, time=time.monotonic())

    def _new_text(self, path: Path) -> str:
        # Logs are appended to; what an earlier group wrote is not this one's.
        try:
            return path.read_bytes()[self._seen[path] :].decode(errors="replace")
        except OSError:
            return ""


def _death(code: int | None) -> tuple[str, str]:
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"SIG{-code}"
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return name, f"the process was ended by {name}{hint}"
    hint = "" if code is None else f" with exit code {code}"
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    guard = f"; if {Path(main).name} starts groups, it needs `if __name__ == '__main__':`" if main and code == 1 else ""
    return "Exit", f"the process ended{hint} without an answer{guard}"


def _stop(processes: dict, pipes: dict[int, Connection], meeting: Path) -> None:
    for process in processes.values():
        # The rank leads a process group of its own, with whatever it has started.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    for process in processes.values():
        process.join(CLOSE_SECONDS)
    for pipe in pipes.values():
        pipe.close()
    shutil.rmtree(meeting, ignore_errors=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
