"""Child of a run: one process a rank, which joins its group and then answers calls until it is told to leave.

Torch is imported only once the parent is being watched and the log is open, so that even a child whose parent dies
while it starts ends at once, and a failing import is found in the log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import ipaddress
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch

    from blockshock_lib.params import Params
    from blockshock_lib.plan import Case

LEAVE = b""  # what the parent sends instead of a call when the group shall end
WATCH_SECONDS = 0.1


@dataclass(frozen=True)
class RankContext:
    """What a task function gets as its first argument.

    Attributes:
        rank: 0 .. world_size - 1.
        world_size: the number of processes in the group; with one process there is no process group.
        device: where this rank computes, "cpu" or "cuda:<index>".
        log: the file that holds what this rank prints.
    """

    rank: int
    world_size: int
    device: torch.device
    log: Path


class Store(NamedTuple):
    """A TCPStore that somebody else serves, and what this group's keys begin with."""

    host: str
    port: int
    prefix: str


@dataclass(frozen=True)
class Place:
    """Where a rank stands and how it joins its group: all that a child is told when it starts."""

    rank: int
    processes: int
    device: str
    backend: str
    threads: int
    logs: Path
    meeting: Path  # removed with its parent; holds the rendezvous file where there is no `store`
    parent: int  # process id
    gpu: int  # index of its GPU on this machine
    store: Store | None = None  # where the ranks meet that are not all children of one parent


@dataclass(frozen=True)
class Answer:
    """What a rank sends back: a pickled value, or an error with its kind, message, own traceback and time."""

    value: bytes = b""
    kind: str = ""
    message: str = ""
    traceback: str = ""
    time: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.kind


def measure(ctx: RankContext, case: Case, params: Params, group: int) -> list[dict[str, Any]]:
    """Measure one case with every method of it: the rows of the case, the same on every rank.

    Chrome traces go to the run's folder, beside the logs. See engine.experiment.measure.
    """
    from blockshock_lib.engine import experiment
    from blockshock_lib.layers.problem import LinearProblem
    from blockshock_lib.plan import expand

    cases = expand(params)
    try:
        return experiment.measure(
            LinearProblem(case, ctx.device, draw=group),
            params,
            group_index=group,
            traces=ctx.log.parent.parent / "traces",
            last=case == cases[-1],
            smallest=case == next(one for one in cases if one.optimizer == case.optimizer),
            first=case == next((one for one in cases if replace(one, batch=case.batch) == case), case),
        )
    finally:
        if ctx.device.type == "cuda":
            import torch

            # The next case must not run out of memory for what this one left in cycles and in the allocator's cache.
            gc.collect()
            torch.cuda.empty_cache()


def main(place: Place, pipe: Connection) -> None:
    """Join the group, say so through the pipe, then answer calls until told to leave."""
    os.setpgrp()  # the parent ends a rank together with the compilers it may have started; Ctrl-C stays with the parent
    threading.Thread(target=_watch, args=(place,), name="parent watch", daemon=True).start()
    _open_log(place)
    answer = _answer(_join, place)
    pipe.send_bytes(pickle.dumps(answer))
    if not answer.ok:
        _wait_for_end(pipe)
    ctx = pickle.loads(answer.value)
    while (message := pipe.recv_bytes()) != LEAVE:
        pipe.send_bytes(pickle.dumps(_answer(_run, ctx, message)))
    _leave()


def _run(ctx: RankContext, message: bytes) -> Any:
    fn, args = pickle.loads(message)
    return fn(ctx, *args)


def _answer(fn, *args) -> Answer:
    # BaseException: a task that calls sys.exit() must be heard too, not vanish.
    try:
        return Answer(value=pickle.dumps(fn(*args)))
    except BaseException as error:
        told = "".join(traceback.format_exception(error))
        print(told, file=sys.stderr, flush=True)
        return Answer(kind=type(error).__name__, message=str(error), traceback=told, time=time.monotonic())


def _join(place: Place) -> RankContext:
    gc.disable()  # what an import makes stays: to look for garbage among it took a quarter of a rank's start and end
    import torch

    gc.freeze()
    gc.enable()
    torch.set_num_threads(place.threads)
    device = torch.device("cpu")
    if place.device == "cuda":
        device = torch.device("cuda", place.gpu)
        torch.cuda.set_device(device)
    if place.processes > 1:
        import torch.distributed as dist

        if place.backend == "gloo" and (place.store is None or is_loopback(place.store.host)):
            _use_loopback()
        dist.init_process_group(
            place.backend,
            store=_store(place),
            rank=place.rank,
            world_size=place.processes,
            timeout=timedelta(days=1),  # the parent keeps the deadline, and it can name the rank
            device_id=device if place.backend == "nccl" else None,
        )
    return RankContext(place.rank, place.processes, device, log_of(place.logs, place.rank))


def _store(place: Place):
    import torch.distributed as dist

    if place.store is None:
        return dist.FileStore(str(place.meeting / "store"), place.processes)
    host, port, prefix = place.store
    return dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False, wait_for_workers=False))


def is_loopback(host: str) -> bool:
    """Whether the host's name says that it is this machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _use_loopback() -> None:
    # All ranks are on this host: gloo need not listen on an outer interface, nor resolve a host name to find one.
    import socket

    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def log_of(logs: Path, rank: int) -> Path:
    """What a rank prints."""
    return logs / f"rank{rank}.log"


def stacks_of(logs: Path, rank: int) -> Path:
    """The stacks that a rank was asked for."""
    return logs / f"rank{rank}.stacks"


def _leave() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _wait_for_end(pipe: Connection) -> None:
    # A rank that could not join stays until the parent ends it: were it to leave, its peers would fail with noise.
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    sys.exit(1)


def _open_log(place: Place) -> None:
    # At the level of file descriptors, so that what NCCL and CUDA print from C++ is kept as well.
    path = log_of(place.logs, place.rank)
    log = open(path, "a", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.enable(log)
    # faulthandler answers in C without the interpreter's lock: a rank inside a hung collective can still be asked.
    stacks = open(stacks_of(place.logs, place.rank), "a")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)


def _watch(place: Place) -> None:
    # getppid changes as soon as the parent is gone, however it went, and no other process can hold it back
    # as an inherited end of a pipe could.
    while os.getppid() == place.parent:
        time.sleep(WATCH_SECONDS)
    shutil.rmtree(place.meeting, ignore_errors=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpid(), signal.SIGKILL)  # its own group only, never one that it was born into
    os._exit(1)
