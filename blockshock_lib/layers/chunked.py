"""A forward cut along the batch: a chunk's collective runs on a stream of its own beside the next one's product."""

import torch
from torch import Tensor, nn

from blockshock_lib.comm.pull import side_stream

ROWS = 8  # a chunk is a multiple of: what cuSPARSELt takes without padding


def multiply(layer: nn.Module, x: Tensor) -> Tensor:
    """y [B, N] of x [B, K] on every rank, in `layer.chunks` chunks at most."""
    rows = _rows(layer, x)
    if rows >= x.shape[0]:
        return layer.reduce(layer.local(x))
    main, side = (torch.cuda.current_stream(x.device), side_stream(x.device)) if x.is_cuda else (None, None)
    if layer.transposed_y:
        y, into = x.new_empty(layer.out_features, x.shape[0]).t(), None
    else:
        y, into = x.new_empty(x.shape[0], layer.out_features), layer.workspace(x, rows)
        into = y if into is None else into
    partials = []  # kept until both streams are done with them: the allocator knows of one only
    for start in range(0, x.shape[0], rows):
        chunk = slice(start, start + rows)
        places = [] if into is None else [into[chunk]]
        if into is None and layer.collective == "all-reduce":  # the next piece would lie in the workspace too
            places = [x.new_empty(layer.out_features, len(x[chunk]))]
        partials.append(layer.local(x[chunk], *places))
        if side is not None:
            side.wait_stream(main)
        with torch.cuda.stream(side):  # None is no change
            layer.reduce(partials[-1], y[chunk])
    if side is not None:
        main.wait_stream(side)
    return y


def sizes(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """One chunk of each size that the layer cuts x [B, K] into."""
    return list({len(chunk): chunk for chunk in x.split(_rows(layer, x))}.values())


def _rows(layer: nn.Module, x: Tensor) -> int:
    """Of a chunk; the batch's or more where it is not cut."""
    if layer.chunks == 1 or not layer.collective or layer.group.world_size == 1:
        return x.shape[0]
    return -(-x.shape[0] // layer.chunks // ROWS) * ROWS
