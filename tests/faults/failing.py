"""What the ranks of the tests run. A hundred groups start with it, so it imports only what every rank loads anyway."""

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from blockshock_lib.ranks import worker


def total(ctx):
    if not dist.is_initialized():  # ranks that were forked: they wait as a collective would
        time.sleep(600)
    x = torch.tensor([float(ctx.rank + 1)], device=ctx.device)
    dist.all_reduce(x)
    return x


def fails_on(ctx, rank, how):
    """Says when it fails, in one of the ways of HOWS; the other rank is inside a collective by then or soon."""
    if ctx.rank == rank:
        print("last words", flush=True)
        return HOWS[how][0]()
    total(ctx)


def _raise():
    raise ValueError("planted\nwith a second line")


# How a rank fails -> its kind, what is in its message, and what is told beside it.
HOWS = {
    "raise": (_raise, "ValueError", "planted", r"in fails_on[\s\S]*in _raise[\s\S]*ValueError: planted"),
    "SIGKILL": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        *("SIGKILL", "ended by SIGKILL", r"\(last lines of its log\)\nlast words"),
    ),
    "SIGSEGV": (
        lambda: os.kill(os.getpid(), signal.SIGSEGV),
        *("SIGSEGV", "ended by SIGSEGV", r"Fatal Python error[\s\S]*in fails_on"),
    ),
    "exit": (lambda: sys.exit(3), "SystemExit", "3", r"in fails_on[\s\S]*SystemExit: 3"),
    "no pickle": (lambda: lambda: None, "AttributeError|PicklingError", "lambda", "in answer"),
}


def only_rank_zero_reduces(ctx):
    if ctx.rank == 0:
        total(ctx)


def mismatched(ctx):
    """Rank 0 waits for a sum, rank 1 for a broadcast from rank 0."""
    if ctx.rank == 0:
        total(ctx)
        return
    dist.broadcast(torch.zeros(1, device=ctx.device), src=0)
    time.sleep(600)


def hangs_in_python(ctx):
    if ctx.rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)  # its stack comes a second late, as on a busy machine
        time.sleep(600)


def helper_then_sleep(ctx):
    """Starts a program of its own, as a compiler of kernels would, and then hangs."""
    helper = subprocess.Popen(["sleep", "600"])
    print(f"helper {helper.pid}", flush=True)
    time.sleep(600)


def rank_and(ctx, *values):
    return (ctx.rank, ctx.world_size, *values)


def process_facts(ctx):
    print(f"said by rank {ctx.rank}")
    os.system("echo said by a program")
    return {"threads": torch.get_num_threads(), "device": str(ctx.device), "pid": os.getpid()}


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
    if ctx.rank == rank:
        _raise()
    try:
        total(ctx)
    except RuntimeError as error:
        worker.leave()  # the other may wait for this rank, and not for the one that has gone
        return waits_for_a_loss(ctx, -1), type(error).__name__


def complains_before_the_cause_dies(ctx):
    if ctx.rank == 0:
        raise RuntimeError("[pair.cc:534] Connection closed by peer")
    time.sleep(1)  # on a busy machine
    os.kill(os.getpid(), signal.SIGKILL)
