"""Tasks that fail or hang. A hundred groups start with this file, so it imports only what every rank loads anyway."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def total(ctx):
    dist.all_reduce(torch.ones(1, device=ctx.device))


def fails_on(ctx, rank, how):
    """Fails one rank in one of the ways of HOWS, and says when; the other is inside a collective by then or soon."""
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
