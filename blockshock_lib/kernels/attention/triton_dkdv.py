"""dK and dV of block-sparse attention as a Triton kernel: a program holds some keys of a head and visits their blocks.

The scores are transposed here: [keys, queries]. See triton_dq.py. The pass that leaves out what is not finite is a
launch of its own, whose programs end at once where no NaN was found: the two accumulators leave no register for what
both passes use.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from blockshock_lib.kernels.attention.triton_tiles import any_nan, first_row, poison, seen_in, store, tile, weighed


@triton.jit
def _visit_queries(
    dk,  # fp32 [BLOCK_N, DIM]
    dv,
    k,
    v,
    q,
    dout,
    q_s,
    dout_s,
    level,
    delta,
    q_len,
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
    RAGGED: constexpr,
    PARTIAL: constexpr,
    GUARD: constexpr,
):
    PARTS: constexpr = BLOCK // BLOCK_M
    m = tl.arange(0, BLOCK_M)
    block = tl.load(listed + begin, mask=begin < end, other=0)
    for i in tl.range(begin * PARTS, end * PARTS, num_stages=1 if GUARD else None):
        start = block * BLOCK + i % PARTS * BLOCK_M
        queries = tile(q, start, q_s, q_len, BLOCK_M, D, RAGGED)
        grad = tile(dout, start, dout_s, q_len, BLOCK_M, D, RAGGED)
        levels, deltas = tl.load(level + start + m), tl.load(delta + start + m)
        scores = tl.dot(k, tl.trans(queries), input_precision="ieee")
        p = tl.exp2(scores * power - levels[None, :])
        if PARTIAL:
            number = tl.load(numbers + i // PARTS)
            seen = seen_in(tiles, number, i % PARTS * BLOCK_M, place, BLOCK, BLOCK_M, BLOCK_N, True)
            p = tl.where(seen, p, 0.0)
        dv = weighed(dv, p.to(grad.dtype), grad, GUARD)
        dp = tl.dot(v, tl.trans(grad), input_precision="ieee")
        ds = p * (dp - deltas[None, :])
        if PARTIAL:
            ds = tl.where(seen, ds, 0.0)  # 0 times a NaN of a masked pair
        dk = weighed(dk, ds.to(queries.dtype), queries, GUARD)
        block = tl.load(listed + (i + 1) // PARTS, mask=i + 1 < end * PARTS, other=0)
    return dk, dv


@triton.jit
def _dkdv(
    k,
    v,
    q,
    dout,
    q_h,
    q_s,
    dout_h,
    dout_s,
    level,
    delta,
    q_len,
    power,
    full_at,
    full,
    partial_at,
    partial,
    numbers,
    tiles,
    plane,
    plane_h,
    k_blocks,
    group,
    block,
    place,
    D: constexpr,
    BLOCK: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    RAGGED: constexpr,
    GUARD: constexpr,
):
    padded = (q_len + BLOCK - 1) // BLOCK * BLOCK
    dk, dv = tl.zeros((BLOCK_N, k.shape[1]), tl.float32), tl.zeros((BLOCK_N, k.shape[1]), tl.float32)
    for _ in tl.range(group, num_stages=1):
        row = tl.load(plane) * k_blocks + block
        begin, end = tl.load(full_at + row), tl.load(full_at + row + 1)
        dk, dv = _visit_queries(
            dk, dv, k, v, q, dout, q_s, dout_s, level, delta, q_len, power, full, begin, end, numbers, tiles, place,
            D, BLOCK, BLOCK_M, BLOCK_N, RAGGED, False, False,
        )  # fmt: skip
        begin, end = tl.load(partial_at + row), tl.load(partial_at + row + 1)
        dk, dv = _visit_queries(
            dk, dv, k, v, q, dout, q_s, dout_s, level, delta, q_len, power, partial, begin, end, numbers, tiles, place,
            D, BLOCK, BLOCK_M, BLOCK_N, RAGGED, True, GUARD,
        )  # fmt: skip
        q, dout, level, delta, plane = q + q_h, dout + dout_h, level + padded, delta + padded, plane + plane_h
    return dk, dv


@triton.jit(do_not_specialize=["q_len", "k_len", "k_blocks", "heads", "group", "plane_b", "plane_h"])
def by_columns(
    dout,
    q,
    k,
    v,
    level,
    delta,
    dk,
    dv,
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
    dk_b,
    dk_h,
    dk_s,
    dv_b,
    dv_h,
    dv_s,
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
    k_blocks,
    heads,  # of queries
    group,
    scale,
    bad,  # int32, of each program: 1 if its result holds a NaN
    D: constexpr,
    BLOCK: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    RAGGED: constexpr,  # q_len is no multiple of BLOCK
    GUARD: constexpr,
):
    """Grid: k_blocks * BLOCK / BLOCK_N places of the order, B H_kv heads.

    The query heads of one follow in turn, each by its own plane, and the keys in the order of the first one's.
    """
    k_heads = heads // group
    b, k_head = tl.program_id(1) // k_heads, tl.program_id(1) % k_heads
    h = k_head * group
    _, block, part = first_row(plane, plane_b, plane_h, b, h, order, k_blocks, tl.program_id(0), BLOCK // BLOCK_N)
    start, place = block * BLOCK + part * BLOCK_N, part * BLOCK_N
    bad += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    if start >= k_len:
        return
    if (tl.load(bad) if GUARD else 1) == 0:
        return
    b, h, k_head = b.to(tl.int64), h.to(tl.int64), k_head.to(tl.int64)
    keys = tile(k + b * k_b + k_head * k_h, start, k_s, k_len, BLOCK_N, D, True)
    values = tile(v + b * v_b + k_head * v_h, start, v_s, k_len, BLOCK_N, D, True)
    q += b * q_b + h * q_h
    dout += b * dout_b + h * dout_h
    padded = (q_len + BLOCK - 1) // BLOCK * BLOCK
    level += (b * heads + h) * padded
    delta += (b * heads + h) * padded
    plane += b * plane_b + h * plane_h
    power = scale * 1.4426950408889634
    total_k, total_v = _dkdv(
        keys, values, q, dout, q_h, q_s, dout_h, dout_s, level, delta, q_len, power, full_at, full, partial_at, partial,
        numbers, tiles, plane, plane_h, k_blocks, group, block, place, D, BLOCK, BLOCK_M, BLOCK_N, RAGGED, GUARD,
    )  # fmt: skip
    dk += b * dk_b + k_head * dk_h
    dv += b * dv_b + k_head * dv_h
    store(dk, start, dk_s, k_len, total_k * scale, True, BLOCK_N, D)
    store(dv, start, dv_s, k_len, total_v, True, BLOCK_N, D)
    if GUARD:
        for _ in tl.range(group, num_stages=1):
            row = tl.load(plane) * k_blocks + block
            begin, end = tl.load(partial_at + row), tl.load(partial_at + row + 1)
            poison(
                dk, dk_s, k_len, start, place, q, q_s, q_len, partial, begin, end, numbers, tiles,
                D, BLOCK, BLOCK_N, BLOCK_M, True,
            )  # fmt: skip
            poison(
                dv, dv_s, k_len, start, place, dout, dout_s, q_len, partial, begin, end, numbers, tiles,
                D, BLOCK, BLOCK_N, BLOCK_M, True,
            )  # fmt: skip
            q, dout, plane = q + q_h, dout + dout_h, plane + plane_h
    else:
        tl.store(bad, (any_nan(total_k) | any_nan(total_v)).to(tl.int32))
