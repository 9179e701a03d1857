"""Rows of the other ranks' tensors, read from their memory by PyTorch: what lies together by the GPUs' copy engines.

Every rank publishes its rows in the workspace of the group's sums (all_reduce.py), all meet, each reads, all meet.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blockshock_lib.comm.all_reduce import Reducer
from blockshock_lib.comm.ranks import Ranks

Rows = Tensor | slice  # int64 places, or from start to stop
# As wide as a row allows: PyTorch's kernel that picks rows moves an element a thread.
_ELEMENTS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)


def count(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def row_bytes(x: Tensor) -> int:
    return math.prod(x.shape[1:]) * x.itemsize


def start(one: Reducer, group: Ranks, x: Tensor, want: Sequence[Rows], most: int, beside: bool) -> Callable[[], Tensor]:
    """Starts to read rows want[r] of rank r's x, all x of `most` rows at most, on a stream of its own where `beside`;
    returns what waits and gives them in rank order. An x at the beginning of the workspace is not copied.
    """
    place = one.workspace(group, most, row_bytes(x) // x.itemsize, x.dtype)
    if x.data_ptr() != place.data_ptr() or not x.is_contiguous():
        place[: len(x)].view(x.shape).copy_(x)
    wide = next(each for each in _ELEMENTS if not row_bytes(x) % each.itemsize)
    size, counts = (most, row_bytes(x) // wide.itemsize, wide), list(map(count, want))
    out = torch.empty((sum(counts), size[1]), dtype=wide, device=x.device)  # of this stream, which waits for the other
    side = side_stream(x.device) if beside and x.is_cuda else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):  # None is no change
        one.wait_for_last_stream()  # the next to use the workspace waits for this one
        one.space.meet()
        parts = out.split(counts)
        for step in range(group.world_size):  # at no time do all read of one
            rank = (group.rank + step) % group.world_size
            theirs, rows = one.space.peer(rank, *size), want[rank]
            if isinstance(rows, slice):
                parts[rank].copy_(theirs[rows])
            else:
                torch.index_select(theirs, 0, rows, out=parts[rank])
        one.space.meet()

    def wait() -> Tensor:
        if side is not None:
            torch.cuda.current_stream(x.device).wait_stream(side)
        return out.view(x.dtype).view(len(out), *x.shape[1:])

    return wait


@functools.cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # its few blocks start before a product's many
