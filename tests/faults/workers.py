"""Task functions for the tests of groups and runs: a worker can only run what it can import."""

import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist

from blockshock_lib.ranks import worker
from tests.cases import row


def rank_and(ctx, *values):
    return (ctx.rank, ctx.world_size, *values)


def total_of_ranks(ctx):
    x = torch.tensor([float(ctx.rank + 1)], device=ctx.device)
    dist.all_reduce(x)
    return x


def process_facts(ctx):
    print(f"said by rank {ctx.rank}")
    os.system("echo said by a program")
    return {"threads": torch.get_num_threads(), "device": str(ctx.device), "pid": os.getpid()}


def cannot_be_sent_back(ctx):
    return lambda: None


def raises_on(ctx, rank):
    if ctx.rank == rank:
        raise ValueError(f"planted in rank {rank}\nwith a second line")


def exits(ctx):
    sys.exit(3)


def emits(ctx, count):
    for number in range(count):
        ctx.emit(number)
    return ctx.rank, ctx.world_size


def waits_for_a_loss(ctx, rank):
    """The given rank dies; the others wait until they are told, and say of whom."""
    if ctx.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    while not ctx.lost():
        time.sleep(0.01)
    return sorted(ctx.lost())


def adds_up_without(ctx, rank):
    """The given rank raises while the others wait for it in a sum: whom they lost, and what the sum raised."""
    raises_on(ctx, rank)
    try:
        total_of_ranks(ctx)
    except RuntimeError as error:
        worker.leave()  # the other may wait for this rank, and not for the one that has gone
        return waits_for_a_loss(ctx, -1), type(error).__name__


def complains_before_the_cause_dies(ctx):
    if ctx.rank == 0:
        raise RuntimeError("[pair.cc:534] Connection closed by peer")
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Case:
    """Stands in for plan.Case, with a fault to plant."""

    name: str
    fault: str = ""
    methods: tuple[str, ...] = ("row_parallel", "block_shock")
    phase: str = "phase1"
    in_features: int = 128
    out_features: int = 128
    batch: int = 16
    dtype: str = "bf16"
    mask: dict = field(default_factory=lambda: {"name": "checkerboard"})
    workload: dict = field(default_factory=lambda: {"name": "gaussian"})
    world_size: int = 2
    emulated: bool = False
    device: str = "cpu"
    seed: int = 0

    @property
    def id(self) -> str:
        return f"{self.name:0>12}"

    @property
    def label(self) -> str:
        return f"case {self.name}"

    def as_dict(self) -> dict:
        return asdict(self)


CONTEXT = {"code": {"commit": "", "sources": "abc"}, "machine": "0123456789ab", "libraries": {}, "emulated": False}


def params(groups: int = 1, device: str = "cpu", case_seconds: float = 60) -> SimpleNamespace:
    return SimpleNamespace(
        hardware=SimpleNamespace(processes=1, device=device, backend="gloo", threads=1),
        timing=SimpleNamespace(groups=groups),
        limits=SimpleNamespace(start_seconds=60, case_seconds=case_seconds),
    )


def measure(ctx, study, case, params, group, done=()):
    """Measures nothing, or fails as the case asks for; the call rate shows which process did it."""
    fault = case.fault if ctx.rank == ctx.world_size - 1 else ""
    if fault:
        print(f"{fault} at {time.monotonic()}", flush=True)
    if fault == "cuda oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 1.00 GiB free.")
    if fault == "oom":
        torch.empty(2**60, dtype=torch.uint8)
    if fault == "raise":
        raise ValueError("planted\nwith a second line")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(600)
    if case.fault == "no time":
        return [row(method, "forward_kernel", 0.0) for method in case.methods]
    rows = [row(method, "forward_kernel", 1.5 + group, repeat=i) for method in case.methods for i in range(2)]
    return [*rows, row("machine", "flops", os.getpid())]
