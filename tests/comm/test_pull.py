"""Rows of the other ranks' tensors: read from their memory, by a fake of it, or sent; and what a fault does to them."""

import pytest
import torch

from blockshock_lib.comm import all_reduce, local, pull
from blockshock_lib.errors import UnsupportedError
from tests.comm import fake_symm

SIZES = (5, 1, 4)  # rows of each rank
# What rank r reads of rank s: chosen places, a slice, or nothing.
PLACES = [
    [torch.tensor(sorted({0, size - 1})) if (r + s) % 3 else slice(0, 0) for s, size in enumerate(SIZES)]
    for r in (0, 1, 2)
]
PLACES[1] = [slice(size // 2, size) for size in SIZES]
SHAPES = {torch.bfloat16: (2, 3, 8), torch.float64: (4,), torch.float32: (3,), torch.int8: (5,)}


def drawn(rank, turn, dtype):
    draw = torch.Generator().manual_seed(10 * turn + rank)
    return torch.randint(-100, 100, (SIZES[rank], *SHAPES[dtype]), generator=draw).to(dtype)


def pulls(group, direct=True, turns=4):
    """How many of several pulls, one after the other, gave other rows than they should."""
    wrong = 0
    for turn in range(turns):
        for dtype in SHAPES:
            x = drawn(group.rank, turn, dtype)
            give, want = [each[group.rank] for each in PLACES], PLACES[group.rank]
            found = group.start_pull(x, give, want, max(SIZES), direct)()
            x.zero_()  # what the caller does with its own tensor is seen by nobody
            right = torch.cat([drawn(rank, turn, dtype)[rows] for rank, rows in enumerate(want)])
            wrong += found.dtype != dtype or not torch.equal(found, right)
    return wrong


@pytest.mark.parametrize("run", [fake_symm.run, local.run])
@pytest.mark.parametrize("direct", [True, False])
def test_rows_of_peers_are_those_that_are_asked_for(run, direct):
    assert run(3, lambda group: pulls(group, direct)) == [0, 0, 0]


def without(first):
    """Memory whose ranks read before all have written, or else write again before all have read."""

    class Faulty(fake_symm.Seen):
        met = 0

        def meet(self):
            self.met += 1
            if self.met % 2 != first:
                super().meet()

    return Faulty


class WrongPeer(fake_symm.Seen):
    def peer(self, rank, *size):
        return super().peer((rank + 1) % 3, *size)


@pytest.mark.parametrize("space", [without(True), without(False), WrongPeer])
def test_a_meeting_that_is_missing_and_a_wrong_peer_are_seen(space):
    assert sum(fake_symm.run(3, pulls, space)) > 0


def test_memory_that_one_rank_cannot_make_is_done_without_and_that_of_a_graph_is_refused(monkeypatch):
    def refused(group, nbytes, device):
        group.barrier(torch.zeros(1))
        raise UnsupportedError("on rank 1: no such handle")

    def on(group):
        return pulls(group, turns=2), group.kept[0].why

    assert fake_symm.run(3, on, refused) == [(0, "on rank 1: no such handle")] * 3
    monkeypatch.setattr(all_reduce, "_capturing", lambda device: True)
    with pytest.raises(UnsupportedError, match="cannot grow while a CUDA graph is captured"):
        fake_symm.run(3, pulls)


def test_what_lies_in_the_workspace_is_not_copied_there():
    def on(group):
        (one,) = group.kept or [group._sharing(torch.device("cpu"))]
        assert one.reserve(group, 64)
        x = one.workspace(group, 2, 8, torch.float32).fill_(group.rank)
        every = [slice(0, 2)] * 2
        return pull.start(one, group, x, every, 2, beside=False)()[:, 0].tolist()

    assert fake_symm.run(2, on) == [[0, 0, 1, 1]] * 2
