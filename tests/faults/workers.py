"""Fake cases for the tests of runs, and what measures them: nothing, or with a fault. Ranks import this file."""

import os
import signal
import time
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from blockshock_lib.studies.linear.params import Case as Linear
from tests.cases import case, row


@dataclass(frozen=True)
class Case(Linear):
    """One of the linear study, with a fault to plant."""

    name: str = ""
    fault: str = ""
    id = property(lambda self: f"{self.name:0>12}")
    label = property(lambda self: f"case {self.name}")


def faulty(name: str, fault: str = "", **changes) -> Case:
    fields = dict(phase="phase1", methods=("row_parallel", "block_shock"), in_features=128, emulated=False) | changes
    return Case(**vars(case(**fields)), name=name, fault=fault)


CONTEXT = {"code": {"commit": "", "sources": "abc"}, "machine": "0123456789ab", "libraries": {}, "emulated": False}


def params(groups: int = 1, device: str = "cpu", case_seconds: float = 300, processes: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        hardware=SimpleNamespace(processes=processes, device=device, backend="gloo", threads=1, environment={}),
        timing=SimpleNamespace(groups=groups),
        limits=SimpleNamespace(start_seconds=300, case_seconds=case_seconds),
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
    if fault in ("kill", "kill late") and not done:
        if fault == "kill late":  # it has said something, and left what it can go on from
            (ctx.log.parent.parent / "records" / f"{case.id}-{group}.state").touch()
            ctx.emit([row("block_shock", "flops", 7.0, repeat=1)])
        os.kill(os.getpid(), signal.SIGKILL)
    if fault in ("meet", "hang"):
        ctx.log.parent.mkdir(exist_ok=True)
        (ctx.log.parent / f"met-{case.name}-{group}").touch()
        while fault == "meet" and len(list(ctx.log.parent.glob(f"met-*-{group}"))) < 2:  # until another has begun too
            time.sleep(0.01)
    if fault == "hang":
        time.sleep(600)
    if case.fault == "no time":
        return [row(method, "forward_kernel", 0.0) for method in case.methods]
    rows = [row(method, "forward_kernel", 1.5 + group, repeat=i) for method in case.methods for i in range(2)]
    return [*rows, row("machine", "flops", os.getpid())]
