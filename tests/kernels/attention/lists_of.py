"""Block lists of a mask, block by block, and attention in float64: what the kernels of attention are held against."""

import math

import torch

from blockshock_lib.kernels.attention.lists import BlockLists, Rows, pack


def brute_force(mask, block, plane=None):
    """BlockLists of a bool mask [planes, q_len, k_len]; plane: [B | 1, H | 1], as the lists hold it."""
    planes, q_len, k_len = mask.shape
    q_blocks, k_blocks = -(-q_len // block), -(-k_len // block)
    whole = torch.zeros(planes, q_blocks * block, k_blocks * block, dtype=torch.bool)
    whole[:, :q_len, :k_len] = mask
    beyond = whole.clone()
    beyond[:, q_len:] = True  # a query that is not there makes no block partial
    tiles, kinds = [], {}
    for plane_number in range(planes):
        for i in range(q_blocks):
            for j in range(k_blocks):
                at = plane_number, slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
                if whole[at].any():
                    kinds[plane_number, i, j] = None if beyond[at].all() else len(tiles)
                    tiles += [] if beyond[at].all() else [pack(whole[at])]
    rows = way(kinds, planes, q_blocks)
    columns = way({(p, j, i): kind for (p, i, j), kind in kinds.items()}, planes, k_blocks)
    tiles = torch.stack(tiles) if tiles else torch.zeros(0, block, block // 32, dtype=torch.int32)
    plane = torch.zeros(1, 1, dtype=torch.int32) if plane is None else plane.int()
    return BlockLists(block, q_len, k_len, rows, columns, tiles, plane, mask.sum((1, 2)))


def way(kinds, planes, n):
    full, partial, tile, full_at, partial_at, visits = [], [], [], [0], [0], []
    for p in range(planes):
        for i in range(n):
            row = sorted((j, kind) for (plane, block, j), kind in kinds.items() if (plane, block) == (p, i))
            full += [j for j, kind in row if kind is None]
            partial += [j for j, kind in row if kind is not None]
            tile += [kind for _, kind in row if kind is not None]
            full_at.append(len(full))
            partial_at.append(len(partial))
            visits.append(len(row))
    order = torch.tensor(visits).view(planes, n).argsort(dim=1, descending=True, stable=True).int()
    made = (torch.tensor(one, dtype=torch.int32) for one in (full_at, full, partial_at, partial, tile))
    return Rows(*made, order)


def plain(q, k, v, mask, scale):
    """Attention in float64 -> out, lse; mask bool, broadcast to [B, H, S, S_k]. A masked value never counts."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = (q.double() @ k.mT * scale).masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    return p @ v, lse
