"""Symmetric memory for ranks without GPUs: ordinary memory, and a sum by gloo that reads it and writes elsewhere; or
ranks as threads, which read each other's.
"""

import contextlib
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist

from blockshock_lib.comm import all_reduce, local, symm
from blockshock_lib.comm.all_reduce import Way, size_class


class Workspace(symm.Workspace):
    made: list[int] = []  # noqa: RUF012  bytes of each, in this process
    sums: list[tuple] = []  # noqa: RUF012  (kernel, bytes, blocks, whether the kernel adds the bias)

    def __init__(self, group, nbytes, device):
        self.rank, self.world, self.nbytes = group.rank, group.world_size, nbytes
        self.handle = group.reference
        self.memory = torch.zeros(symm.DATA + nbytes, dtype=torch.uint8, device=device)
        self.begin = self.memory.data_ptr() + symm.DATA
        Workspace.made.append(nbytes)

    def prepare(self, dtype):
        pass

    def sum(self, name, x, bias, out, blocks):
        Workspace.sums.append((name, x.nbytes, blocks, bias is not None))
        total = x.float()
        dist.all_reduce(total, group=self.handle())
        out.copy_(total if bias is None else total + bias.float())
        if name == "two_shot":
            x.fill_(torch.nan)
        return out


@contextlib.contextmanager
def installed(table: dict[int, list[Way]] | None = None):
    """The fake in place of the real one, for groups that have not added up before; with rank 0's table."""
    facts = [{"why": "", "host": "here", "device": r, "reaches": [0, 1, 2, 3]} for r in range(4)]
    Workspace.made.clear(), Workspace.sums.clear(), all_reduce._reducers.clear()
    known = {size_class(nbytes): ways for nbytes, ways in (table or {}).items()}
    with (
        mock.patch.object(symm, "Workspace", Workspace),
        mock.patch.object(symm, "impossible", lambda world, device: ""),
        mock.patch.object(symm, "facts", lambda world, device: facts[dist.get_rank()]),
        mock.patch.object(all_reduce, "measured", lambda world, device: known),
    ):
        yield Workspace
    all_reduce._reducers.clear()


class Seen(symm.Workspace):
    """Of a rank that is a thread: the peers' memory is theirs."""

    def __init__(self, group, nbytes, device):
        self.nbytes, self.group, self.rank = nbytes, group, group.rank
        self.memory = torch.full((symm.DATA + nbytes,), 0x7F, dtype=torch.uint8, device=device)  # large, or NaN
        self.begin = self.memory.data_ptr() + symm.DATA
        self.every = group.gather_objects(self.memory)

    def peer(self, rank, rows, columns, dtype):
        return self.every[rank][symm.DATA :][: rows * columns * dtype.itemsize].view(dtype).view(rows, columns)

    def meet(self):
        self.group.barrier(self.memory)


@dataclass(frozen=True)
class Sharing(local.LocalGroup):
    """Ranks as threads that share memory: `run` gives one for each."""

    kept: list = field(default_factory=list)

    def _sharing(self, device, nbytes):
        self.kept[:] = self.kept or [all_reduce.Reducer(device, "", "gloo", {})]
        return self.kept[0] if nbytes and self.kept[0].reserve(self, nbytes) else None

    def _reducer(self, device):
        return self.kept[0] if self.kept else None


def run(world, fn, space=Seen):
    """As local.run; `space`: of a class in place of symm.Workspace."""
    with mock.patch.object(symm, "Workspace", space):
        return local.run(world, lambda group: fn(Sharing(group.rank, group.world_size, turns=group.turns)))
