"""A search in a process of its own, so that a way that crashes costs a candidate and not the run.

A process cannot replace a CUDA context that is broken. So a `Search` starts a child, which imports the same `Search`,
and keeps it for the next problem. Where it dies, finds its context broken or falls silent, what it last said it would
try is the culprit, and a new child goes on with the trials so far and without the culprit. Over a pipe it is sent
(problem, seconds, known trials, steps to leave out), and sends pairs: "ready" once, then for each search "trying" a way
or a step and its "trial" by turns, at the end "done", or else "failed" or "broken" and is gone.
"""

import atexit
import contextlib
import ctypes
import os
import pkgutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

from blockshock_lib.errors import first_line
from blockshock_lib.kernels.tuning.search import BrokenContextError, Found, Trial, Way, leaders, same, words

START_SECONDS = 120.0  # importing torch from a cold disk, and making a CUDA context
IDLE_SECONDS = 300
PR_SET_PDEATHSIG = 1

_ROOT = Path(__file__).parents[3]


class _Gone(Exception):
    """The child died, broke its context or fell silent: how."""


@dataclass(eq=False)
class Search:
    """A search, and the process that makes it; started by the first `find`, and ended with the thread that called it:
    another thread's `find` starts another.

    `run`: (problem, device or its name, *, seconds, known, without, started, ended) -> trials; see `search.search`.
    `started` hears of other steps by name too; `without` lists those to leave out.
    """

    name: str  # "module:NAME" of this object
    kinds: Mapping[str, type]  # name -> the NamedTuple of one kind of ways
    run: Callable[..., list[Trial]]
    seconds: float  # after which no further candidate of a kind is started
    silence: float = 20.0  # after so long without a word the process counts as hung; one trial takes about 0.1 s
    restarts: int = 5
    command: tuple[str, ...] = (sys.executable, "-m", __name__)
    process: subprocess.Popen | None = field(default=None, init=False)

    def find(self, problem: dict, device: Any) -> Found:
        """The search on this torch.device. Never raises for what happens in the child: `Found.failed` says it."""
        trials, crashes, without, failed = {}, [], [], ""
        if device.type == "cuda":  # the child needs a quiet GPU, and the memory that is only held in reserve here
            import torch

            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        for left in range(self.restarts, -1, -1):
            seconds = self.seconds if left or not trials else 0
            step: Way | str = ""
            try:
                self._start(device)
                step = "the start of the search"
                with contextlib.suppress(OSError):  # of a child that has ended: it is heard
                    self._pipe.send((problem, seconds, list(trials.values()), without))
                while (message := self._hear(self.silence))[0] not in ("done", "failed"):
                    what, told = message
                    if what == "trying":
                        step = told
                    else:
                        trials[same(told.way)] = told
                failed = message[1]
                break
            except _Gone as gone:
                self._kill()
                if not step:
                    failed = f"the process that searches did not start: {gone}"
                    break
                if isinstance(step, str):
                    without.append(step)
                else:
                    trials[same(step)] = Trial(step, crashed=str(gone))
                    step = words(step, self.kinds)
                crashes.append(f"{step} ({gone})")
            except BaseException:
                self._kill()  # interrupted: what the child goes on to say would be taken for the next search's answer
                raise
        if failed:
            self._kill()
        elif len(crashes) > self.restarts or (not left and not leaders(trials.values())):
            failed = f"given up after {len(crashes)} crashes"
        return Found(tuple(trials.values()), tuple(crashes), failed)

    def close(self) -> None:
        """End the child: it leaves when its pipe closes, and is killed if it does not."""
        if self.process is not None:
            self._pipe.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2)
        self._kill()

    def _start(self, device: Any) -> None:
        if self.process is not None and self.process.poll() is None and self._device == str(device):
            return
        self.close()
        atexit.register(self.close)
        path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._device = str(device)
        self._pipe, theirs = connection.Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [*self.command, self.name, str(os.getpid()), self._device, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what libraries print there is no answer to the command that this process carries out
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            )
        self._hear(START_SECONDS)

    def _hear(self, seconds: float) -> tuple[str, Way | Trial | str]:
        """The child's next message; _Gone where none comes."""
        try:
            if not self._pipe.poll(seconds):
                raise _Gone(f"{seconds:g} s without a word")
            what, told = self._pipe.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(min(seconds, 5))
            if (code := self.process.returncode) is None:
                raise _Gone("it closed its pipe") from None
            raise _Gone(signal.Signals(-code).name if code < 0 else f"exit status {code}") from None
        if what == "broken":
            raise _Gone(told)
        return what, told

    def _kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process that hangs inside the driver may stay
                process.wait(5)
            self._pipe.close()


def main() -> None:
    """The child: answer searches until the pipe closes, the parent is gone or nothing was asked for long."""
    name, parent, device, pipe = sys.argv[-4:]
    pipe = connection.Connection(int(pipe))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides what it means
    # The system ends this process with the parent's thread that started it. A thread of its own could not where a
    # library holds the interpreter's lock.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return

    def say(what: str, told: object = "") -> None:
        pipe.send((what, told))

    search: Search = pkgutil.resolve_name(name)
    if device.startswith("cuda"):
        import torch

        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    say("ready")
    while pipe.poll(IDLE_SECONDS):
        try:
            problem, seconds, known, without = pipe.recv()
        except (EOFError, OSError):
            break
        told = {"started": partial(say, "trying"), "ended": partial(say, "trial")}
        try:
            search.run(problem, device, seconds=seconds, known=known, without=without, **told)
            say("done")
        except BrokenContextError as error:
            say("broken", str(error))
            break
        except Exception as error:
            traceback.print_exc()
            say("failed", f"{type(error).__name__}: {first_line(error)}")
            break
    os._exit(0)  # never through the libraries' own ends, which may hang in a broken context


if __name__ == "__main__":
    main()
