"""Functions that the ranks of a test run; a spawned process imports them by name."""

import torch
import torch.distributed as dist

from blockshock_lib.comm import Group
from blockshock_lib.errors import UnsupportedError


def collectives(ctx):
    group, cpu = Group.of(), torch.device("cpu")
    mine = torch.full((2,), float(ctx.rank + 1))
    group.align(torch.zeros(1))
    return {
        "rank": group.rank,
        "sum": group.all_reduce(mine.clone()).tolist(),
        "gathered": group.all_gather(mine[None]).tolist(),
        "largest": group.largest([float(ctx.rank), 5.0 - ctx.rank], cpu),
        "word": group.first_word("oom: 3 GiB" if ctx.rank == 1 else "", cpu),
        "no word": group.first_word("", cpu),
    }


def use_after_destroy(ctx):
    handle = dist.new_group()
    group = Group.of(handle)
    before = group.all_reduce(torch.ones(1)).item()
    dist.destroy_process_group(handle)
    del handle
    try:
        group.all_reduce(torch.ones(1))
    except UnsupportedError as error:
        return before, str(error)
    return before, "the group is still alive"


def exchanged(ctx):
    """What the pairs of a group swap, and whether a started collective gives what the plain one does."""
    group = Group.of()
    mine = torch.full((2, 3), float(ctx.rank), dtype=torch.bfloat16)
    out = torch.empty_like(mine)
    got = group.exchange(mine, ctx.rank ^ 1, out=out)
    total = group.start_all_reduce(mine.clone())
    parts = group.start_all_gather(mine, torch.t)
    return got is out, got[0, 0].item(), total.wait()[0, 0].item(), parts.wait().tolist()
