"""Rows of the other ranks' tensors: read from their memory, by a fake of it, or sent; and what a fault does to them."""

import pytest
import torch

from blockshock_lib.comm import all_reduce, local
from blockshock_lib.errors import UnsupportedError
from tests.comm import fake_symm

SIZES = (5, 1, 4)  # rows of each rank
PLACES = [[torch.arange(r % 2, size, 2) for size in SIZES] for r in range(3)]  # what rank r reads of each; or nothing
PLACES[0] = [slice(size // 2, size) for size in SIZES]
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


@pytest.mark.parametrize(("run", "direct"), [(fake_symm.run, True), (fake_symm.run, False), (local.run, True)])
def test_rows_of_peers_are_those_that_are_asked_for(run, direct):
    assert run(3, lambda group: pulls(group, direct)) == [0, 0, 0]


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
