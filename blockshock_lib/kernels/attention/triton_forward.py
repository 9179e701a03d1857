"""Block-sparse attention forward as a Triton kernel: a program holds some queries of a head and visits their blocks.

Full blocks come first, without mask code, then partial ones. The number of the next block is read one step ahead, so
that the copies of its keys and values begin while this one is computed. A masked pair has weight 0, and 0 times NaN is
NaN: where the result holds one, the program starts again with what is not finite left out, and writes NaN where it is
seen. To test once at the end costs next to
nothing; a test of each tile of values would bring it into registers, where the tensor cores read shared memory.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from blockshock_lib.kernels.attention.triton_tiles import any_nan, first_row, poison, seen_in, store, tile, weighed


@triton.jit
def _visit(
    acc,  # fp32 [BLOCK_M, DIM], sum of p v
    top,  # fp32 [BLOCK_M], the largest score so far, in powers of two
    total,  # fp32 [BLOCK_M], sum of p
    q,
    k,
    v,
    k_s,
    v_s,
    k_len,
    power,
    listed,  # blocks of keys,
    begin,  # of which these are visited
    end,
    numbers,  # of their tiles
    tiles,
    row,  # of the queries in the tile
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
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if PARTIAL:
            number = tl.load(numbers + i // PARTS)
            seen = seen_in(tiles, number, row, i % PARTS * BLOCK_N, BLOCK, BLOCK_M, BLOCK_N, False)
            scores = tl.where(seen, scores * power, -float("inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            level = tl.where(higher == -float("inf"), 0.0, higher)
            p = tl.exp2(scores - level[:, None])
        else:
            higher = tl.maximum(top, tl.max(scores, 1) * power)
            level = higher
            p = tl.exp2(scores * power - level[:, None])
        fade = tl.exp2(top - level)
        total = total * fade + tl.sum(p, 1)
        values = tile(v, start, v_s, k_len, BLOCK_N, D, PARTIAL)
        acc = weighed(acc * fade[:, None], p.to(values.dtype), values, GUARD)
        top = higher
        block = tl.load(listed + (i + 1) // PARTS, mask=i + 1 < end * PARTS, other=0)
    return acc, top, total


@triton.jit
def _attend(
    q,
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
    row,
    D: constexpr,
    BLOCK: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    GUARD: constexpr,
):
    acc = tl.zeros((BLOCK_M, q.shape[1]), tl.float32)
    top, total = tl.full((BLOCK_M,), -float("inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc, top, total = _visit(
        acc, top, total, q, k, v, k_s, v_s, k_len, power, full, full_begin, full_end, numbers, tiles, row,
        D, BLOCK, BLOCK_M, BLOCK_N, False, False,
    )  # fmt: skip
    return _visit(
        acc, top, total, q, k, v, k_s, v_s, k_len, power, partial, begin, end, numbers, tiles, row,
        D, BLOCK, BLOCK_M, BLOCK_N, True, GUARD,
    )  # fmt: skip


@triton.jit
def _share(at, row, part, parts):
    begin, end = tl.load(at + row), tl.load(at + row + 1)
    return begin + (end - begin) * part // parts, begin + (end - begin) * (part + 1) // parts


@triton.jit(do_not_specialize=["q_len", "k_len", "q_blocks", "heads", "group", "plane_b", "plane_h"])
def forward(
    q,
    k,
    v,
    out,  # [splits, B, H, q_len, D]
    lse,  # fp32 [splits, B, H, q_len], in base e
    q_b,
    q_h,
    q_s,
    k_b,
    k_h,
    k_s,
    v_b,
    v_h,
    v_s,
    out_split,
    out_b,
    out_h,
    out_s,
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
    group,  # query heads of a head of keys
    power,  # scale / ln 2
    D: constexpr,
    BLOCK: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
):
    """Grid: q_blocks * BLOCK / BLOCK_M places of the order, B H heads, splits."""
    b, h, split = tl.program_id(1) // heads, tl.program_id(1) % heads, tl.program_id(2)
    listed, block, part = first_row(plane, plane_b, plane_h, b, h, order, q_blocks, tl.program_id(0), BLOCK // BLOCK_M)
    start = block * BLOCK + part * BLOCK_M
    if start >= q_len:
        return
    b = b.to(tl.int64)
    queries = tile(q + b * q_b + h.to(tl.int64) * q_h, start, q_s, q_len, BLOCK_M, D, True)
    k += b * k_b + (h // group).to(tl.int64) * k_h
    v += b * v_b + (h // group).to(tl.int64) * v_h
    full_begin, full_end = _share(full_at, listed, split, tl.num_programs(2))
    begin, end = _share(partial_at, listed, split, tl.num_programs(2))
    acc, top, total = _attend(
        queries, k, v, k_s, v_s, k_len, power, full, full_begin, full_end, partial, begin, end, numbers, tiles,
        part * BLOCK_M, D, BLOCK, BLOCK_M, BLOCK_N, False,
    )  # fmt: skip
    suspect = any_nan(acc)
    if suspect:  # in other tiles: offsets that both passes share would keep registers through the first one's loops
        acc, top, total = _attend(
            queries, k, v, k_s, v_s, k_len, power, full, full_begin, full_end, partial, begin, end, numbers, tiles,
            part * BLOCK_M, D, BLOCK, BLOCK_M, 32, True,
        )  # fmt: skip
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]  # a row that sees nothing: output 0, lse -inf
    out += split.to(tl.int64) * out_split + b * out_b + h.to(tl.int64) * out_h
    store(out, start, out_s, q_len, acc, True, BLOCK_M, D)
    rows = start + tl.arange(0, BLOCK_M)
    lse += (split.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * q_len
    tl.store(lse + rows, (top + tl.log2(total)) * 0.6931471805599453, mask=rows < q_len)
    if suspect:
        poison(
            out, out_s, q_len, start, part * BLOCK_M, v, v_s, k_len, partial, begin, end, numbers, tiles,
            D, BLOCK, BLOCK_M, 32, False,
        )  # fmt: skip
