"""Ranks under torchrun, on one machine or several: it starts, watches and ends them.

Rank 0 calls functions as a WorkerGroup does; the others run what it calls. A rank that fails writes its error where
torchrun looks for it and ends: torchrun then ends the others, names the first, and may start all of them anew.
"""

import contextlib
import faulthandler
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from blockshock_lib.errors import DeadlineError, LaunchError
from blockshock_lib.ranks import worker
from blockshock_lib.ranks.group import CLOSE_SECONDS, pack_call

JOIN_SECONDS = 300.0  # for the last machine to arrive
PEER_SECONDS = 3.0  # how long a rank that lost a peer waits for torchrun, which ends it, before it speaks itself


class Job:
    """This process's place in a job of two ranks or more, `local` on its machine, which torchrun has started anew
    `restarts` times; `name` tells it from other jobs. As a context manager it joins the others' process group.
    """

    alive = True  # a rank that fails ends the job
    device = "cpu"  # or "cuda", where the ranks compute: to be set before it is entered

    def __init__(self, environment: Mapping[str, str]):
        environment = {"LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0", **environment}
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
        self.rank, self.size, self.local, self.restarts, _ = (_whole(name, environment) for name in names)
        if self.rank >= self.size or not environment.get("MASTER_ADDR"):
            place = f"rank {self.rank} of {self.size} at MASTER_ADDR={environment.get('MASTER_ADDR', '')!r}"
            raise LaunchError(f"{place} is no rank of a job, which count from 0: start the ranks with torchrun")
        # The same in every start of one job. What torchrun calls it where nobody did says nothing: there, its process.
        called = environment.get("TORCHELASTIC_RUN_ID", "")
        self.name = f"agent {os.getppid()}" if called in ("", "none") else called
        self._one_host = environment["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1")
        self._logs, self._threads = Path(), 1

    def __enter__(self) -> "Job":
        threading.Thread(target=worker.watch, args=(os.getppid(),), daemon=True).start()  # torchrun may be killed
        if self._one_host:
            worker.use_loopback()
        device, backend = (f"cuda:{self.local}", "nccl") if self.device == "cuda" else ("cpu", "gloo")
        with _deadline(JOIN_SECONDS):
            self._torch_device = worker.join(self.rank, self.size, device, backend, 1, self._store)

            import torch.distributed as dist

            # Orders and answers: beside the ranks' own group, whose collectives may be measured or captured.
            self._control = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is not None:
            return _tell(error)
        if not self.rank:
            self._share(None)
        # NCCL captured in a CUDA graph can hang it (pytorch#115388)
        leaving = threading.Thread(target=worker.leave, daemon=True)
        leaving.start()
        leaving.join(CLOSE_SECONDS)

    @contextlib.contextmanager
    def group(
        self, processes: int, *, device: str, logs: Path, threads: int = 1, environment: Any = (), **_: Any
    ) -> Iterator["Job"]:
        """In the place of a fresh WorkerGroup: the ranks of the job, who keep one process group from first to last."""
        if lacks := [f"{name}={value}" for name, value in dict(environment).items() if os.environ.get(name) != value]:
            raise LaunchError(f"{' '.join(lacks)} was asked for after the ranks had joined: set it for torchrun")
        if (processes, device) != (self.size, self.device):
            ranks = f"{self.size} ranks on {self.device}"
            raise LaunchError(f"{processes} processes on {device} were asked for, and torchrun has started {ranks}")
        self._logs, self._threads = Path(logs), threads
        yield self

    def call(
        self,
        fn: Callable[..., Any],
        *args: Any,
        seconds: float,
        on_emit: Callable[[int, Any], None] = lambda rank, value: None,
        may_lose: Collection[int] = (),
    ) -> list[Any]:
        """As WorkerGroup.call, but only what rank 0 emits is heard, and what fails or is late ends its process."""
        if may_lose:
            raise LaunchError("torchrun ends a job that has lost a rank: run this on one machine without it")
        return self._run(self._share((seconds, self._threads, self._logs, pack_call(fn, args))), on_emit)

    def follow(self) -> None:
        """What the ranks other than 0 do: run what it calls, until it ends the job."""
        while (order := self._share(None)) is not None:
            self._run(order, lambda rank, value: None)

    def _store(self):
        from torch.distributed import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        # The agent's store outlives a start of the ranks, with the addresses of those that have gone.
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_SECONDS)))
        return PrefixStore(f"blockshock/{self.restarts}", store)

    def _share(self, order: Any) -> Any:
        import torch.distributed as dist

        shared = [order]
        dist.broadcast_object_list(shared, group=self._control)
        return shared[0]

    def _run(self, order: tuple[float, int, Path, bytes], on_emit: Callable) -> list[Any] | None:
        import torch
        import torch.distributed as dist

        seconds, threads, logs, message = order
        end = time.monotonic() + seconds + PEER_SECONDS
        torch.set_num_threads(threads)
        log = worker.log_of(logs, self.rank)
        ctx = worker.RankContext(self.rank, self.size, self._torch_device, log, partial(on_emit, self.rank))
        with _deadline(seconds):
            fn, args = pickle.loads(message)
            mine = fn(ctx, *args)
        answers = None if self.rank else [None] * self.size  # rank 0's alone
        with _deadline(end - time.monotonic()):
            dist.gather_object(mine, answers, group=self._control)
        return answers


def job(environment: Mapping[str, str] = os.environ) -> Job | None:
    """The job that this process is a rank of; None for an ordinary process, and where torchrun started one rank only.
    LaunchError where one of torchrun's variables is missing or no number, or a SLURM step of several tasks has started
    this process itself.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return Job(environment) if _whole("WORLD_SIZE", environment) > 1 else None
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if {"SLURM_STEP_ID", "SLURM_PROCID"} <= environment.keys() and tasks != "1":
        start = "have it start one torchrun on each machine, which starts the ranks"
        raise LaunchError(f"srun has started {tasks} tasks of this command: {start}")


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    # No parent keeps the time: a rank that is still in here after so long tells torchrun, and ends with its stacks.
    def late() -> None:
        try:
            raise DeadlineError(seconds, {})  # torchrun's report takes it from what is being handled
        except DeadlineError as error:
            _tell(error)
        faulthandler.dump_traceback()
        os._exit(1)

    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell(error: BaseException) -> None:
    # torchrun names the rank whose error was written first, to the second: who only lost a peer lets that one speak.
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    print(error, file=sys.stderr, flush=True)
    if worker.is_knock_on(str(error)):
        time.sleep(PEER_SECONDS)
    get_error_handler().record_exception(error)


def _whole(name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise LaunchError(f"the environment variable {name} is {text!r}, not a number: start the ranks with torchrun")
    return int(text)
