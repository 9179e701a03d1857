"""What is added up at once is written where the ranks add it up, and copied nowhere."""

from dataclasses import dataclass, field

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blockshock_lib import gpt
from blockshock_lib.comm import local
from blockshock_lib.layers.gpt import streams
from tests.layers.gpt.test_model import CLOSE, NAMES, batch, drawn, trained


@dataclass(frozen=True)
class Shared(local.LocalGroup):
    """Memory for all sums, as symmetric memory is: a sum goes into a new tensor, and what was there is overwritten."""

    memory: list[torch.Tensor] = field(default_factory=list)

    def buffer(self, rows, columns, dtype, device):
        self.memory[:] = self.memory or [torch.empty(1 << 12, dtype=dtype)]
        return self.memory[0][: rows * columns].view(rows, columns)

    def all_reduce(self, x):
        summed = super().all_reduce(x.clone())
        if self.memory and x.data_ptr() == self.memory[0].data_ptr():
            self.memory[0].fill_(torch.nan)
        return summed


def shared(group):
    return Shared(group.rank, group.world_size, turns=group.turns)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_share_memory_are_the_tracks(name):
    whole = drawn(name, 2)
    right = trained(whole, 2)
    for mine in local.run(2, lambda group: trained(gpt.GPT.of(drawn(name, 2), shared(group)), 2)):
        torch.testing.assert_close(mine, right, **CLOSE)


class Copies(TorchDispatchMode):
    """Counts copies into memory that is there already."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **kwargs or {})


def copied(group, name):
    made = gpt.GPT.of(drawn(name, 2), shared(group))
    with torch.no_grad(), Copies() as copies:
        made(batch()[0])
    return copies.count


@pytest.mark.parametrize("name", ["tensor_parallel", "parallel", "spd", "grouped(2)", "selective(0)", "desync(2)"])
def test_a_sum_that_is_awaited_at_once_copies_nothing(name, monkeypatch):
    def copies():
        return {*local.run(2, lambda group: copied(group, name))}

    (least,) = copies()
    monkeypatch.setattr(streams.Streams, "room", lambda self, members: None)
    assert copies() == {least + len(gpt.named(name, 4).syncs)}
