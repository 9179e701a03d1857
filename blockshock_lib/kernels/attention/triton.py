"""Block-sparse attention by Triton kernels, forward and backward: the lists of a pattern decide what is computed."""

import importlib.util
import math
import os
from collections.abc import Mapping
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from blockshock_lib.kernels.attention.call import Call, explicit
from blockshock_lib.kernels.attention.lists import BlockLists, Rows


class Config(NamedTuple):
    """How "forward", "dq" or "dkdv" is cut: a block is computed in tiles of block_m queries and block_n keys."""

    kernel: str
    block_m: int
    block_n: int
    warps: int
    stages: int  # of the copies that are under way


Cuts = Mapping[str, Config]  # of each kernel; where there is none, the default of the head dimension is taken


class Lists(NamedTuple):
    """The lists of one direction as the kernels take them; of two the first is of full blocks, the other of partial."""

    at: tuple[Tensor, Tensor]
    blocks: tuple[Tensor, Tensor]
    tile: Tensor
    order: Tensor
    tiles: Tensor
    plane: Tensor  # int32 [B, H]


def _cuts(*sizes: tuple[int, int, int, int]) -> Cuts:
    return {kernel: Config(kernel, *size) for kernel, size in zip(("forward", "dq", "dkdv"), sizes, strict=True)}


UNTUNED: Cuts = {}
DEFAULTS = {
    64: _cuts((64, 128, 4, 3), (64, 128, 4, 3), (64, 64, 4, 3)),
    128: _cuts((128, 128, 8, 3), (128, 64, 8, 3), (64, 128, 8, 3)),
    256: _cuts((128, 32, 8, 3), (64, 32, 4, 2), (32, 64, 8, 2)),
}
"""Head dimension, rounded up to a power of two -> what is taken where nothing was tuned, of 16-bit values."""
SMALL = _cuts(*[(32, 32, 4, 2)] * 3)  # of 32-bit values, which the tensor cores do not take


def refuse(call: Call) -> str:
    dtype, interpreted = call.q.dtype, os.environ.get("TRITON_INTERPRET") == "1"
    if not call.q.is_cuda and not interpreted:
        return "it needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)"
    if not installed():
        return "triton is not installed: it comes with PyTorch's CUDA builds"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32) or (interpreted and dtype == torch.bfloat16):
        return f"it takes bf16 (not in the interpreter), fp16 and fp32, not {dtype}"
    if call.q.shape[3] > 256:
        return f"it takes head dimensions up to 256, not {call.q.shape[3]}"
    if call.scale < 0:
        return f"it takes a scale of 0 or more, not {call.scale:g}"
    return ""


@cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def attend(call: Call, cuts: Cuts = UNTUNED) -> tuple[Tensor, Tensor]:
    return explicit(partial(forward, cuts=cuts), partial(backward, cuts=cuts), call)


def forward(
    call: Call, cuts: Cuts = UNTUNED, splits: int | None = None, made: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """out, and lse in fp32. splits: programs that share a row of blocks; few queries need several.

    made: out and lse of a faster kernel, and int32 [B, H, blocks / 64]: only what is not 0 there is computed again.
    """
    from blockshock_lib.kernels.attention import triton_forward  # here, as Triton comes with PyTorch's CUDA builds only

    lists, (q, k, v) = call.lists, map(dense, (call.q, call.k, call.v))
    batch, heads, q_len, dim = q.shape
    config = fitted(_cut("forward", call, cuts), lists.block, q_len)
    places = lists.q_blocks * (lists.block // config.block_m)
    splits = splits or _splits(q, places * batch * heads, lists.k_blocks)
    out = torch.empty_like(q)[None] if splits == 1 else q.new_empty((splits, *q.shape), dtype=torch.float32)
    lse, bad = q.new_empty((splits, *q.shape[:3]), dtype=torch.float32), None
    if made is not None:
        out, lse, bad = made[0][None], made[1][None], made[2]
    with torch.cuda.device_of(q):
        triton_forward.forward[places, batch * heads, splits](
            *(q, k, v, out, lse),
            *(q.stride()[:3], k.stride()[:3], v.stride()[:3], out.stride()[:4], *taken(lists.rows, call)),
            *(q_len, lists.k_len, lists.q_blocks, heads, heads // k.shape[1], call.scale / math.log(2), bad),
            **fixed(config, lists, dim),
        )
    if splits == 1:
        return out[0], lse[0]
    whole = lse.logsumexp(0)
    share = (lse - whole.clamp(min=torch.finfo(lse.dtype).min)).exp()  # -inf less -inf is no number
    return (out * share[..., None]).sum(0).to(q.dtype), whole


def backward(
    call: Call, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, cuts: Cuts = UNTUNED
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, the same in each launch; `out` and `lse` may be those over more keys than these."""
    from blockshock_lib.kernels.attention import triton_backward

    lists, (q, k, v) = call.lists, map(dense, (call.q, call.k, call.v))
    dout, out = dense(dout.to(q.dtype)), dense(out)
    batch, heads, q_len, dim = q.shape
    rows, columns = (fitted(_cut(kernel, call, cuts), lists.block) for kernel in ("dq", "dkdv"))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta, level = torch.empty((2, batch, heads, lists.q_blocks * lists.block), dtype=torch.float32, device=q.device)
    dlse = None if dlse is None else dlse.float().contiguous()
    inputs, strides = (dout, q, k, v, level, delta), [x.stride()[:3] for x in (dout, q, k, v)]
    with torch.cuda.device_of(q):
        triton_backward.prepare[lists.q_blocks * (lists.block // 32), batch * heads](
            *(dout, out, lse.float().contiguous(), dlse, delta, level, dout.stride()[:3], out.stride()[:3]),
            *(q_len, heads),
            **dict(D=dim, ROWS=32, num_warps=4),
        )
        triton_backward.by_rows[lists.q_blocks * (lists.block // rows.block_m), batch * heads](
            *(*inputs, dq, *strides, dq.stride()[:3], *taken(lists.rows, call)),
            *(q_len, lists.k_len, lists.q_blocks, heads, heads // k.shape[1], float(call.scale)),
            **fixed(rows, lists, dim),
        )
        grid = lists.k_blocks * (lists.block // columns.block_n), batch * k.shape[1]
        bad = torch.empty(grid, dtype=torch.int32, device=q.device)
        for cut in (columns, columns._replace(block_m=min(32, columns.block_m), stages=1)):
            triton_backward.by_columns[grid](
                *(*inputs, dk, dv, *strides, dk.stride()[:3], dv.stride()[:3], *taken(lists.columns, call)),
                *(q_len, lists.k_len, lists.k_blocks, heads, heads // k.shape[1], float(call.scale), bad),
                **dict(**fixed(cut, lists, dim), RAGGED=q_len % lists.block != 0, GUARD=cut is not columns),
            )
    return dq, dk, dv


def candidates(head_dim: int, block: int) -> dict[str, list[Config]]:
    """Kernel, "forward", "dq" or "dkdv" -> what is worth timing where blocks are of this size, the default first."""
    dim, found = _padded(head_dim), {}
    for kernel, default in DEFAULTS[dim].items():
        cuts = [default]
        sums = 2 if kernel == "dkdv" else 1  # fp32 [held, dim], in registers beside the scores
        operands = 1 if kernel == "forward" else 2
        for held, visited, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
            registers = held * (sums * dim + operands * visited) / (32 * warps)
            shared = 2 * dim * (operands * held + 2 * visited * stages)
            if 64 <= registers <= 192 and shared <= 220 * 1024:
                size = (visited, held) if kernel == "dkdv" else (held, visited)
                cuts.append(Config(kernel, *size, warps, stages))
        found[kernel] = list(dict.fromkeys(fitted(cut, block) for cut in cuts))
    return found


def dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def fitted(config: Config, block: int, q_len: int | None = None) -> Config:
    """The config cut down to what divides the block, and to few queries."""
    most = block & -block  # the largest power of two that divides it
    rows = most if q_len is None else min(most, max(16, 1 << (q_len - 1).bit_length()))
    m, n = min(config.block_m, rows), min(config.block_n, most)
    warps = min(config.warps, 4) if m * n < 32 * 64 else config.warps
    return config._replace(block_m=m, block_n=n, warps=warps)


def fixed(config: Config, lists: BlockLists, dim: int) -> dict[str, int]:
    """What is compiled into a kernel."""
    blocks = dict(D=dim, BLOCK=lists.block, BLOCK_M=config.block_m, BLOCK_N=config.block_n)
    return dict(**blocks, num_warps=config.warps, num_stages=config.stages)


def taken(way: Rows, call: Call) -> tuple[Lists, int, int]:
    """And the strides of `plane`: outside of the tuple, so that no kernel is compiled for each."""
    plane = call.lists.plane.expand(call.q.shape[:2])
    at, blocks = (way.full_at, way.partial_at), (way.full, way.partial)
    return Lists(at, blocks, way.tile, way.order, call.lists.tiles, plane), *plane.stride()


def _cut(kernel: str, call: Call, cuts: Cuts) -> Config:
    default = SMALL if call.q.itemsize == 4 else DEFAULTS[_padded(call.q.shape[3])]
    return cuts.get(kernel, default[kernel])


def _padded(dim: int) -> int:
    return max(64, 1 << (dim - 1).bit_length())


def _splits(q: Tensor, programs: int, k_blocks: int) -> int:
    """Enough for two programs a multiprocessor, each with four blocks or more where its row is full."""
    if not q.is_cuda:
        return 1
    there = 2 * torch.cuda.get_device_properties(q.device).multi_processor_count
    return max(1, min(there // max(programs, 1), k_blocks // 4, 64))
