"""Tasks that fail or hang. A hundred groups start with this file, so it imports only what every rank loads anyway."""

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist


def total(ctx):
    if not dist.is_initialized():  # ranks that were forked: they wait as a collective would
        time.sleep(600)
    dist.all_reduce(torch.ones(1, device=ctx.device))


def fails_on(ctx, rank, how):
    """Says when it fails, in one of the ways of HOWS; the other rank is inside a collective by then or soon."""
    if ctx.rank == rank:
        print(f"last words at {time.monotonic()}", flush=True)
        HOWS[how]()
    total(ctx)


def _raise():
    raise ValueError("planted\nwith a second line")


HOWS = {
    "raise": _raise,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda: sys.exit(3),
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
        time.sleep(600)


def helper_then_sleep(ctx):
    """Starts a program of its own, as a compiler of kernels would, and then hangs."""
    helper = subprocess.Popen(["sleep", "600"])
    print(f"helper {helper.pid}", flush=True)
    time.sleep(600)
