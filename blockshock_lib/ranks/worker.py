"""Child of a group: one process a rank, which joins its group and then answers calls until it is told to leave.

Torch is imported only once the parent is being watched and the log is open: a child whose parent dies while it starts
ends at once, and a failing import is found in the log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch

LEAVE = b""  # what the parent sends instead of a call when the group shall end
LOST = b"lost "  # and while a call runs, with a rank that has died and that the call may lose
WATCH_SECONDS = 0.1
# What a healthy rank says when a peer has gone.
KNOCK_ON = (
    r"connection (closed|reset) by peer|broken pipe|socket closed|remote process exited|nccl communicator was aborted"
)


@dataclass(frozen=True)
class RankContext:
    """What a task function gets first. `log` holds what this rank prints; `emit` sends a value to the parent. `lost`:
    those of the ranks that this call may lose that have died so far. A gloo collective with one of them raises in the
    ranks that talk to it, which must `leave` the group; NCCL's hangs until a thread that asks here aborts it.
    """

    rank: int
    world_size: int
    device: torch.device
    log: Path
    emit: Callable[[Any], None] = lambda value: None
    lost: Callable[[], frozenset[int]] = frozenset


@dataclass(frozen=True)
class Answer:
    """A pickled value, or an error."""

    value: bytes = b""
    kind: str = ""
    message: str = ""
    traceback: str = ""
    time: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.kind


def main(pipe: Connection, log: Path, meeting: Path, environment: dict[str, str], *place: Any) -> None:
    """`meeting`: a folder, removed with the parent, in a file of which ranks meet. `place`: what `join` is given."""
    rank, size, _, backend, _ = place
    os.environ.clear()  # of the process that this one was forked from
    os.environ.update(environment)
    os.setpgrp()  # the parent ends a rank together with the compilers it may have started; Ctrl-C stays with the parent
    threading.Thread(target=watch, args=(os.getppid(), meeting), name="parent watch", daemon=True).start()
    ctx, lost = None, set()
    _open_log(log, log_of(meeting, rank, "stacks"))

    def store():
        from torch.distributed import FileStore

        return FileStore(str(meeting / "store"), size)

    def start() -> None:
        nonlocal ctx
        if backend == "gloo":
            use_loopback()
        emit = lambda value: pipe.send_bytes(pickle.dumps((value,)))  # noqa: E731
        ctx = RankContext(rank, size, join(*place, store), log, emit, heard)

    def heard() -> frozenset[int]:
        while pipe.poll():
            lost.add(int(pipe.recv_bytes().removeprefix(LOST)))
        return frozenset(lost)

    def run(message: bytes) -> Any:
        fn, args = pickle.loads(message)
        return fn(ctx, *args)

    pipe.send_bytes(pickle.dumps(answer(start)))  # the parent ends one that failed: leaving, it would fail its peers
    while (message := pipe.recv_bytes()) != LEAVE:
        if not message.startswith(LOST):
            pipe.send_bytes(pickle.dumps(answer(run, message)))
    leave()


def answer(fn: Callable[..., Any], *args: Any) -> Answer:
    """What `fn` gives, or how it fails. BaseException: a task that calls sys.exit() must be heard too, not vanish."""
    try:
        return Answer(value=pickle.dumps(fn(*args)))
    except BaseException as error:
        told = "".join(traceback.format_exception(error))
        print(told, file=sys.stderr, flush=True)
        return Answer(kind=type(error).__name__, message=str(error), traceback=told, time=time.monotonic())


def join(rank: int, size: int, device: str, backend: str, threads: int, store: Callable[[], Any]) -> torch.device:
    """Join a process group of `size` over `store()`, none where that is 1; this rank's device."""
    gc.disable()  # what an import makes stays: to look for garbage among it took a quarter of a rank's start and end
    import torch
    import torch.distributed as dist

    from blockshock_lib.ranks import products

    gc.freeze()
    gc.enable()
    torch.set_num_threads(threads)
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    else:
        products.widen()
    if size > 1:
        options = dict(rank=rank, world_size=size, device_id=place if backend == "nccl" else None)
        # Whoever called keeps the deadline, and can name the rank.
        dist.init_process_group(backend, store=store(), timeout=timedelta(days=1), **options)
    return place


def leave() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def use_loopback() -> None:
    """For ranks of one host: gloo need not listen on an outer interface, nor resolve a host name to find one."""
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def log_of(folder: Path, rank: int, kind: str = "log") -> Path:
    return folder / f"rank{rank}.{kind}"


def is_knock_on(message: str) -> bool:
    return bool(re.search(KNOCK_ON, message.lower()))


def root_cause(failures: dict[int, Answer]) -> int:
    """Of the ranks that failed together, the one that failed on its own account: a death by signal comes first (but for
    SIGABRT, which libraries raise when a peer is lost), then the earliest error; who only tells of a lost peer is last.
    """

    def order(rank: int) -> tuple[bool, bool, float]:
        one = failures[rank]
        killed = one.kind.startswith("SIG") and one.kind != "SIGABRT"
        return is_knock_on(one.message), not killed, one.time

    return min(failures, key=order)


def watch(above: int, meeting: Path | None = None) -> None:
    """In a thread: end this process, and what it has started, as soon as the process `above` is gone that it was forked
    from, or its parent, whom that one serves and outlives by nothing; remove `meeting` then.
    """
    # No other process can hold getppid back, as an inherited end of the parent's pipe could.
    parent = multiprocessing.parent_process()
    while os.getppid() == above and (parent is None or parent.is_alive()):
        time.sleep(WATCH_SECONDS)
    if meeting is not None:
        shutil.rmtree(meeting, ignore_errors=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpid(), signal.SIGKILL)  # its own group only, never one that it was born into
    os._exit(1)


def _open_log(path: Path, stacks: Path) -> None:
    # At the level of file descriptors, so that what NCCL and CUDA print from C++ is kept as well.
    log = open(path, "a", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.enable(log)
    # faulthandler answers in C without the interpreter's lock: a rank inside a hung collective can still be asked.
    faulthandler.register(signal.SIGUSR1, open(stacks, "w"), all_threads=True)  # noqa: SIM115
