"""Task functions for the tests of groups and runs: a worker can only run what it can import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist

from blockshock_lib.records import row


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


def environment(ctx, name):
    return os.environ.get(name)


def cannot_be_sent_back(ctx):
    return lambda: None


def raises_on(ctx, rank):
    if ctx.rank == rank:
        raise ValueError(f"planted in rank {rank}\nwith a second line")


def leaves_on(ctx, rank):
    if ctx.rank == rank:
        sys.exit(3)


def complains_before_the_cause_dies(ctx):
    if ctx.rank == 0:
        raise RuntimeError("[pair.cc:534] Connection closed by peer")
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


def helper_then_sleep(ctx):
    """Starts a program of its own, as a compiler of kernels would, and then hangs."""
    helper = subprocess.Popen(["sleep", "600"])
    print(f"helper {helper.pid}", flush=True)
    time.sleep(600)


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


CONTEXT = {"code": {"commit": ""}, "machine": "0123456789ab", "libraries": {}, "emulated": False}


def params(groups: int = 1, processes: int = 1, case_seconds: float = 60) -> SimpleNamespace:
    return SimpleNamespace(
        hardware=SimpleNamespace(processes=processes, device="cpu", backend="gloo", threads=1),
        timing=SimpleNamespace(groups=groups),
        limits=SimpleNamespace(start_seconds=60, case_seconds=case_seconds),
    )


def measure(ctx, case, params, group):
    """Measures nothing, or fails as the case asks for; the call rate shows which process did it."""
    last = ctx.rank == ctx.world_size - 1
    if case.fault == "cuda oom" and last:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 1.00 GiB free.")
    if case.fault == "oom" and last:
        torch.empty(2**60, dtype=torch.uint8)
    if last and case.fault:
        print(f"{case.fault} at {time.monotonic()}", flush=True)
    if case.fault == "raise" and last:
        raise ValueError("planted\nwith a second line")
    if case.fault == "kill" and last:
        os.kill(os.getpid(), signal.SIGKILL)
    if case.fault == "hang" and last:
        time.sleep(600)
    if case.fault == "no time":
        return [row(method, "forward_kernel", 0.0) for method in case.methods]
    rows = [row(method, "forward_kernel", 1.5 + group, repeat=i) for method in case.methods for i in range(2)]
    return [*rows, row("machine", "flops", os.getpid())]
