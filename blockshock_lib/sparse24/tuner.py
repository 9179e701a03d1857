"""The search for an algorithm in a process of its own, so that one that crashes costs a candidate and not the run.

An illegal instruction in a kernel breaks the whole CUDA context, and a process cannot replace its context. So `Tuner`
starts a child that searches (`python -m blockshock_lib.sparse24.tuner`) and keeps it for the next search. The child
says what it is about to try. When it dies, finds its context broken or falls silent, the last thing it named is the
culprit, and a new child goes on with the trials made so far and without the culprit.

Both speak JSON, a line a message. To the child, for each search: shape, rows, dtype, seconds, known (trials), without.
From the child: {"ready"}, then for each search {"trying"} and {"trial"} by turns, and at the end {"done", "library"} or
{"failed"} or {"broken"}; after these two the child is gone. A way to multiply has its JSON form (ways.py).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing import connection
from pathlib import Path

import torch

from blockshock_lib.sparse24 import cslt_tune, ways
from blockshock_lib.sparse24.tuning import BrokenContextError, Error, Found, Setting, Trial, fastest_right
from blockshock_lib.sparse24.ways import Way

COMMAND = (sys.executable, "-m", "blockshock_lib.sparse24.tuner")
RESTARTS = 5
START_SECONDS = 120.0  # importing torch from a cold disk, and making a CUDA context
SILENCE_SECONDS = 20.0  # one trial takes about 0.1 s
IDLE_SECONDS = 300
ALARM_SECONDS = 40  # beyond SILENCE_SECONDS: only for a child that hangs and whose parent is no longer there to end it
WATCH_SECONDS = 0.2

_ROOT = Path(__file__).parents[2]


@functools.cache
def shared() -> Tuner:
    """The tuner of this process; its child is started by the first search and ended with the process."""
    tuner = Tuner()
    atexit.register(tuner.close)
    return tuner


class _Gone(Exception):
    """The child died, broke its context or fell silent."""


class _Crash(Exception):
    """The child is gone because of `step`: a way to multiply, or the name of another step of the search."""

    def __init__(self, step: Way | str, how: str):
        super().__init__(f"{step if isinstance(step, str) else ways.words(step)} ({how})")
        self.step, self.how = step, how


class Tuner:
    """The parent's side: one child, for one device.

    Args:
        command: starts the child; it is given the parent's process id and the device as its last two arguments.
        silence: seconds without a word after which the child counts as hung.
        restarts: how many crashes one search may have. After the last, only what has run well so far is considered.
    """

    def __init__(self, command: Sequence[str] = COMMAND, *, silence: float = SILENCE_SECONDS, restarts: int = RESTARTS):
        self.command, self.silence, self.restarts = tuple(command), silence, restarts
        self.process: subprocess.Popen | None = None
        self._device, self._heard = "", b""

    def search(self, shape: tuple[int, int], rows: int, dtype: torch.dtype, device: torch.device) -> Found:
        """`cslt_tune.search` in the child; what crashed there is among the trials and in `Found.crashes`.

        Never raises for what happens in the child: `Found.failed` says why there is no result.
        """
        trials: dict[Way, Trial] = {}
        crashes: list[_Crash] = []
        library, failed = None, ""
        try:
            for left in range(self.restarts, -1, -1):
                request = {
                    "shape": shape,
                    "rows": rows,
                    "dtype": str(dtype).removeprefix("torch."),
                    "seconds": cslt_tune.SECONDS if left or not trials else 0,
                    "known": [_plain(trial) for trial in trials.values()],
                    "without": [crash.step for crash in crashes if isinstance(crash.step, str)],
                }
                try:
                    self._start(device)
                    library, failed = self._ask(request, trials)
                    break
                except _Crash as crash:
                    crashes.append(crash)
                    if not isinstance(crash.step, str):
                        trials[crash.step] = Trial(crash.step, crashed=crash.how)
            exhausted = len(crashes) > self.restarts  # the last process crashed as well
            if exhausted or (not left and not failed and fastest_right(trials.values()) is None):
                failed = f"given up after {len(crashes)} crashes"
        except _Gone as gone:
            self._kill()
            failed = f"the process that searches did not start: {gone}"
        except BaseException:
            self._kill()  # interrupted: what the child goes on to say would be taken for the next search's answer
            raise
        return Found(tuple(trials.values()), library, tuple(map(str, crashes)), failed)

    def _ask(self, request: dict, trials: dict[Way, Trial]) -> tuple[Setting | None, str]:
        """One search by the child: (library's pick, why it failed). Trials are added to `trials` as they come."""
        step: Way | str = "the start of the search"
        try:
            self._say(request)
            while not (word := self._hear(self.silence)).keys() & {"done", "failed"}:
                if "trying" in word:
                    step = word["trying"] if isinstance(word["trying"], str) else ways.from_json(word["trying"])
                else:
                    trial = _trial(word["trial"])
                    trials[trial.way] = trial
        except _Gone as gone:
            self._kill()
            raise _Crash(step, str(gone)) from None
        if "failed" in word:
            self._kill()
            return None, word["failed"]
        return word["library"] and Setting(*word["library"]), ""

    def close(self) -> None:
        """End the child: it leaves when its input closes, and is killed if it does not."""
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2)
        self._kill()

    def _start(self, device: torch.device) -> None:
        if self.process is not None and self.process.poll() is None and self._device == str(device):
            return
        self.close()
        path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [*self.command, str(os.getpid()), str(device)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
        self._device, self._heard = str(device), b""
        self._hear(START_SECONDS)

    def _say(self, message: dict) -> None:
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
        except OSError:
            raise _Gone(self._end()) from None

    def _hear(self, seconds: float) -> dict:
        """The child's next message."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._heard:
            if not connection.wait([self.process.stdout], max(0.0, deadline - time.monotonic())):
                raise _Gone(f"{seconds:g} s without a word")
            if not (more := self.process.stdout.read(1 << 16)):
                raise _Gone(self._end())
            self._heard += more
        line, self._heard = self._heard.split(b"\n", 1)
        word = json.loads(line)
        if "broken" in word:
            raise _Gone(word["broken"])
        return word

    def _end(self) -> str:
        """How the child ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        code = self.process.returncode
        if code is None:
            return "it closed its output"
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"

    def _kill(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that hangs inside the driver may stay a while
            process.wait(5)
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def main(search: Callable[..., Found] = cslt_tune.search) -> None:
    """The child: answer searches until the input closes, the parent is gone or nothing was asked for long."""
    parent, device = int(sys.argv[-2]), torch.device(sys.argv[-1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides what it means
    # The alarm's default action needs no interpreter: it also ends a child whose main thread hangs in a library that
    # holds the interpreter's lock, where the watching thread cannot run.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    threading.Thread(target=_watch, args=(parent,), name="parent watch", daemon=True).start()
    # What libraries print must not come between the messages, at the level of file descriptors as it may come from C++.
    words = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**word: object) -> None:
        signal.alarm(ALARM_SECONDS)
        print(json.dumps(word), file=words, flush=True)

    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    say(ready=True)
    signal.alarm(IDLE_SECONDS)
    for line in sys.stdin:
        signal.alarm(ALARM_SECONDS)
        task = json.loads(line)
        try:
            found = search(
                tuple(task["shape"]),
                task["rows"],
                getattr(torch, task["dtype"]),
                device,
                seconds=task["seconds"],
                known=[_trial(trial) for trial in task["known"]],
                without=task["without"],
                started=lambda step: say(trying=step if isinstance(step, str) else ways.as_json(step)),
                ended=lambda trial: say(trial=_plain(trial)),
            )
            say(done=True, library=found.library)
        except BrokenContextError as error:
            say(broken=str(error))
            os._exit(1)  # not through the libraries' own ends, which may hang in the broken context
        except Exception as error:
            traceback.print_exc()
            say(failed=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            os._exit(1)
        signal.alarm(IDLE_SECONDS)
    os._exit(0)


def _watch(parent: int) -> None:
    # getppid changes as soon as the parent is gone, however it went, and no other process can hold it back as an
    # inherited end of a pipe could.
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os._exit(1)


def _plain(trial: Trial) -> dict:
    return {**asdict(trial), "way": ways.as_json(trial.way)}


def _trial(plain: dict) -> Trial:
    error = plain["error"] and Error(*plain["error"])
    return Trial(**{**plain, "way": ways.from_json(plain["way"]), "error": error})


if __name__ == "__main__":
    main()
