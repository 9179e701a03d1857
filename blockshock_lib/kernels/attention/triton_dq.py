"""dQ of block-sparse attention as a Triton kernel: a program holds some queries of a head and visits their blocks.

Scores and dP are computed here and in triton_dkdv.py, seven products in all instead of five; in return nothing is added
up by atomics, so that the gradients are the same in each launch, and no dQ in fp32 travels to memory. As in
triton_forward.py, a program whose result holds a NaN starts again with what is not finite left out.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from blockshock_lib.kernels.attention.triton_tiles import any_nan, first_row, poison, seen_in, store, tile, weighed


@triton.jit(do_not_specialize=["q_len", "heads"])
def prepare(
    dout,
    out,
    lse,  # fp32 [B, H, q_len]
    dlse,  # the same, or None
    delta,  # fp32 [B, H, q_blocks BLOCK], beyond q_len 0
    level,  # the same, beyond q_len inf
    dout_b,
    dout_h,
    dout_s,
    out_b,
    out_h,
    out_s,
    q_len,
    heads,
    D: constexpr,
    ROWS: constexpr,
):
    """delta = sum of dout * out, less dlse; level = lse / ln 2, or inf, which makes each weight 0, if none is seen."""
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    start = tl.program_id(0) * ROWS
    grad = tile(dout + b * dout_b + h * dout_h, start, dout_s, q_len, ROWS, D, True).to(tl.float32)
    value = tile(out + b * out_b + h * out_h, start, out_s, q_len, ROWS, D, True).to(tl.float32)
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
def _visit_keys(
    dq,  # fp32 [BLOCK_M, DIM]
    q,
    dout,
    level,
    delta,
    k,
    v,
    k_s,
    v_s,
    k_len,
    power,
    listed,
    begin,
    end,
    numbers,
    tiles,
    place,
    D: constexpr,
    BLOCK: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    PARTIAL: constexpr,
    GUARD: constexpr,
):
    PARTS: constexpr = BLOCK // BLOCK_N
    block = tl.load(listed + begin, mask=begin < end, other=0)
    for i in tl.range(begin * PARTS, end * PARTS, num_stages=1 if GUARD else None):
        start = block * BLOCK + i % PARTS * BLOCK_N
        keys = tile(k, start, k_s, k_len, BLOCK_N, D, PARTIAL)
        values = tile(v, start, v_s, k_len, BLOCK_N, D, PARTIAL)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        p = tl.exp2(scores * power - level[:, None])
        dp = tl.dot(dout, tl.trans(values), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        if PARTIAL:
            number = tl.load(numbers + i // PARTS)
            seen = seen_in(tiles, number, place, i % PARTS * BLOCK_N, BLOCK, BLOCK_M, BLOCK_N, False)
            ds = tl.where(seen, ds, 0.0)
        dq = weighed(dq, ds.to(keys.dtype), keys, GUARD)
        block = tl.load(listed + (i + 1) // PARTS, mask=i + 1 < end * PARTS, other=0)
    return dq


@triton.jit
def _dq(
    q,
    dout,
    level,
    delta,
    k,
    v,
    k_s,
    v_s,
    k_len,
    power,
    full,
    full_begin,
    full_end,
    partial,
    begin,
    end,
    numbers,
    tiles,
    place,
    D: constexpr,
    BLOCK: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    GUARD: constexpr,
):
    dq = tl.zeros((BLOCK_M, q.shape[1]), tl.float32)
    dq = _visit_keys(
        dq, q, dout, level, delta, k, v, k_s, v_s, k_len, power, full, full_begin, full_end, numbers, tiles, place,
        D, BLOCK, BLOCK_M, BLOCK_N, False, False,
    )  # fmt: skip
    return _visit_keys(
        dq, q, dout, level, delta, k, v, k_s, v_s, k_len, power, partial, begin, end, numbers, tiles, place,
        D, BLOCK, BLOCK_M, BLOCK_N, True, GUARD,
    )  # fmt: skip


@triton.jit(do_not_specialize=["q_len", "k_len", "q_blocks", "heads", "group", "plane_b", "plane_h"])
def by_rows(
    dout,
    q,
    k,
    v,
    level,
    delta,
    dq,
    dout_b,
    dout_h,
    dout_s,
    q_b,
    q_h,
    q_s,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    dq_b,
    dq_h,
    dq_s,
    full_at,
    full,
    partial_at,
    partial,
    numbers,
    order,
    tiles,
    plane,
    plane_b,
    plane_h,
    q_len,
    k_len,
    q_blocks,
    heads,
    group,
    scale,
    D: constexpr,
    BLOCK: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
):
    """dQ. Grid: q_blocks * BLOCK / BLOCK_M places of the order, B H heads."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    row, block, part = first_row(plane, plane_b, plane_h, b, h, order, q_blocks, tl.program_id(0), BLOCK // BLOCK_M)
    start, place = block * BLOCK + part * BLOCK_M, part * BLOCK_M
    if start >= q_len:
        return
    b, h = b.to(tl.int64), h.to(tl.int64)
    k += b * k_b + h // group * k_h
    v += b * v_b + h // group * v_h
    queries = tile(q + b * q_b + h * q_h, start, q_s, q_len, BLOCK_M, D, True)
    grad = tile(dout + b * dout_b + h * dout_h, start, dout_s, q_len, BLOCK_M, D, True)
    at = tl.program_id(1).to(tl.int64) * q_blocks * BLOCK + start + tl.arange(0, BLOCK_M)
    levels, deltas = tl.load(level + at), tl.load(delta + at)
    power = scale * 1.4426950408889634
    full_begin, full_end = tl.load(full_at + row), tl.load(full_at + row + 1)
    begin, end = tl.load(partial_at + row), tl.load(partial_at + row + 1)
    total = _dq(
        queries, grad, levels, deltas, k, v, k_s, v_s, k_len, power, full, full_begin, full_end, partial, begin, end,
        numbers, tiles, place, D, BLOCK, BLOCK_M, BLOCK_N, False,
    )  # fmt: skip
    suspect = any_nan(total)
    if suspect:  # in other tiles: offsets that both passes share would keep registers through the first one's loops
        total = _dq(
            queries, grad, levels, deltas, k, v, k_s, v_s, k_len, power, full, full_begin, full_end, partial, begin,
            end, numbers, tiles, place, D, BLOCK, BLOCK_M, 32, True,
        )  # fmt: skip
    dq += b * dq_b + h * dq_h
    store(dq, start, dq_s, q_len, total * scale, True, BLOCK_M, D)
    if suspect:
        poison(
            dq, dq_s, q_len, start, place, k, k_s, k_len, partial, begin, end, numbers, tiles,
            D, BLOCK, BLOCK_M, 32, False,
        )  # fmt: skip
