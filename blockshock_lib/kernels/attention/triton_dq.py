"""dQ of block-sparse attention as a Triton kernel: a program holds some queries of a head and visits their blocks.

Scores and dP are computed here and in triton_dkdv.py, seven products in all instead of five; in return nothing is added
up by atomics, so that the gradients are the same in each launch, and no dQ in fp32 travels to memory. As in
triton_forward.py, a program whose result holds a NaN starts again.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from blockshock_lib.kernels.attention.triton_tiles import any_nan, first_row, head, seen_in, store, tile, weighed


@triton.jit(do_not_specialize=["q_len", "heads"])
def prepare(
    dout, out, lse, dlse, delta, level, dout_by, out_by, q_len, heads, D: constexpr, ROWS: constexpr,
):  # fmt: skip
    """delta = sum of dout * out, less dlse; level = lse / ln 2, or inf, which makes each weight 0, if none is seen.

    lse and dlse (or None) fp32 [B, H, q_len]; delta and level fp32 [B, H, q_blocks BLOCK], beyond q_len 0 and inf.
    """
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    start = tl.program_id(0) * ROWS
    grad = tile(head(dout, dout_by, b, h), start, dout_by[2], q_len, ROWS, D, True).to(tl.float32)
    value = tile(head(out, out_by, b, h), start, out_by[2], q_len, ROWS, D, True).to(tl.float32)
    total = tl.sum(grad * value, 1)
    rows = start + tl.arange(0, ROWS)
    at = tl.program_id(1).to(tl.int64) * q_len + rows
    if dlse is not None:
        total -= tl.load(dlse + at, mask=rows < q_len, other=0.0)
    log = tl.load(lse + at, mask=rows < q_len, other=-float("inf"))
    padded = tl.program_id(1).to(tl.int64) * tl.num_programs(0) * ROWS + rows
    tl.store(delta + padded, total)
    tl.store(level + padded, tl.where(log == -float("inf"), float("inf"), log * 1.4426950408889634))


@triton.jit
def _dq(
    q, dout, level, delta, k, v, k_s, v_s, k_len, power, lists, row, place,
    D: constexpr, BLOCK: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, GUARD: constexpr,
):  # fmt: skip
    PARTS: constexpr = BLOCK // BLOCK_N
    dq = tl.zeros((BLOCK_M, q.shape[1]), tl.float32)
    for PARTIAL in tl.static_range(2):
        begin, end = tl.load(lists.at[PARTIAL] + row), tl.load(lists.at[PARTIAL] + row + 1)
        block = tl.load(lists.blocks[PARTIAL] + begin, mask=begin < end, other=0)
        for i in tl.range(begin * PARTS, end * PARTS, num_stages=1 if GUARD and PARTIAL else None):
            start = block * BLOCK + i % PARTS * BLOCK_N
            keys = tile(k, start, k_s, k_len, BLOCK_N, D, PARTIAL)
            values = tile(v, start, v_s, k_len, BLOCK_N, D, PARTIAL)
            scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
            p = tl.exp2(scores * power - level[:, None])
            dp = tl.dot(dout, tl.trans(values), input_precision="ieee")
            ds = p * (dp - delta[:, None])
            if PARTIAL:
                number = tl.load(lists.tile + i // PARTS)
                seen = seen_in(lists.tiles, number, place, i % PARTS * BLOCK_N, BLOCK, BLOCK_M, BLOCK_N, False)
                ds = tl.where(seen, ds, 0.0)
            dq = weighed(dq, ds.to(keys.dtype), keys, seen if PARTIAL else True, GUARD and PARTIAL)
            block = tl.load(lists.blocks[PARTIAL] + (i + 1) // PARTS, mask=i + 1 < end * PARTS, other=0)
    return dq


@triton.jit(do_not_specialize=["q_len", "k_len", "q_blocks", "heads", "group", "plane_b", "plane_h"])
def by_rows(
    dout, q, k, v, level, delta, dq, dout_by, q_by, k_by, v_by, dq_by, lists, plane_b, plane_h,
    q_len, k_len, q_blocks, heads, group, scale,
    D: constexpr, BLOCK: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr,
):  # fmt: skip
    """dQ. Grid: q_blocks * BLOCK / BLOCK_M places of the order, B H heads."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    row, block, part = first_row(lists, b * plane_b + h * plane_h, q_blocks, BLOCK // BLOCK_M)
    start, place = block * BLOCK + part * BLOCK_M, part * BLOCK_M
    if start >= q_len:
        return
    k, v = head(k, k_by, b, h // group), head(v, v_by, b, h // group)
    queries = tile(head(q, q_by, b, h), start, q_by[2], q_len, BLOCK_M, D, True)
    grad = tile(head(dout, dout_by, b, h), start, dout_by[2], q_len, BLOCK_M, D, True)
    at = tl.program_id(1).to(tl.int64) * q_blocks * BLOCK + start + tl.arange(0, BLOCK_M)
    levels, deltas = tl.load(level + at), tl.load(delta + at)
    power = scale * 1.4426950408889634
    total = _dq(
        queries, grad, levels, deltas, k, v, k_by[2], v_by[2], k_len, power, lists, row, place,
        D, BLOCK, BLOCK_M, BLOCK_N, False,
    )  # fmt: skip
    if any_nan(total):
        total = _dq(
            queries, grad, levels, deltas, k, v, k_by[2], v_by[2], k_len, power, lists, row, place,
            D, BLOCK, BLOCK_M, 32, True,
        )  # fmt: skip
    dq = head(dq, dq_by, b, h)
    store(dq, start, dq_by[2], q_len, total * scale, BLOCK_M, D)
