"""Backward of block-sparse attention as Triton kernels: a program holds some queries of a head, for dQ, or some of its
keys, for dK and dV, and visits their blocks.

Scores and dP are computed in both, seven products in all instead of five; in return nothing is added up by atomics, so
that the gradients are the same in each launch, and no dQ in fp32 travels to memory. As in triton_forward.py, a program
of dQ whose result holds a NaN starts again. For dK and dV scores are transposed: [keys, queries], and the second pass
is a launch of its own, whose programs end at once where no NaN was found: the two accumulators leave no register for
what both passes use.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from blockshock_lib.kernels.attention.triton_tiles import any_nan, first_row, head, seen_in, store, tile, weighed


@triton.jit(do_not_specialize=["q_len", "heads"])
def prepare(
    dout, out, lse, dlse, delta, level, dout_by, out_by, q_len, heads, D: constexpr, ROWS: constexpr,
):  # fmt: skip
    """delta = sum of dout * out, less dlse; level = lse / ln 2, or inf, which makes each weight 0, if none is seen. A
    query without a gradient, as a loss leaves the padding, gives none, whatever it saw: delta 0, level inf.

    lse and dlse (or None) fp32 [B, H, q_len]; delta and level fp32 [B, H, q_blocks BLOCK], beyond q_len 0 and inf.
    """
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    start = tl.program_id(0) * ROWS
    grad = tile(head(dout, dout_by, b, h), start, dout_by[2], q_len, ROWS, D, True).to(tl.float32)
    value = tile(head(out, out_by, b, h), start, out_by[2], q_len, ROWS, D, True).to(tl.float32)
    total, live = tl.sum(grad * value, 1), tl.max((grad != 0).to(tl.int32), 1) > 0
    rows = start + tl.arange(0, ROWS)
    at = tl.program_id(1).to(tl.int64) * q_len + rows
    if dlse is not None:
        more = tl.load(dlse + at, mask=rows < q_len, other=0.0)
        total, live = total - more, live | (more != 0)
    log = tl.load(lse + at, mask=rows < q_len, other=-float("inf"))
    padded = tl.program_id(1).to(tl.int64) * tl.num_programs(0) * ROWS + rows
    tl.store(delta + padded, tl.where(live, total, 0.0))
    tl.store(level + padded, tl.where((log == -float("inf")) | ~live, float("inf"), log * 1.4426950408889634))


@triton.jit
def _live(levels, deltas):
    """Whether a query gives a gradient, as `prepare` tells; one that saw an Inf, of level inf, has a delta of NaN."""
    return (levels < float("inf")) | (deltas != 0)


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
    given = queries, grad, levels, deltas, k, v, k_by[2], v_by[2], k_len, power, lists, row, place
    total = _dq(*given, D, BLOCK, BLOCK_M, BLOCK_N, False)
    if any_nan(total):
        total = _dq(*given, D, BLOCK, BLOCK_M, 32, True)
    dq = head(dq, dq_by, b, h)
    total = tl.where(_live(levels, deltas)[:, None], total, 0.0)
    store(dq, start, dq_by[2], q_len, total * scale, BLOCK_M, D)


@triton.jit
def _dkdv(
    k, v, q, dout, q_by, dout_by, level, delta, q_len, power, lists, plane, plane_h, k_blocks, group, block, place,
    D: constexpr, BLOCK: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr,
    RAGGED: constexpr, GUARD: constexpr,
):  # fmt: skip
    PARTS: constexpr = BLOCK // BLOCK_M
    padded, m = (q_len + BLOCK - 1) // BLOCK * BLOCK, tl.arange(0, BLOCK_M)
    dk, dv = tl.zeros((BLOCK_N, k.shape[1]), tl.float32), tl.zeros((BLOCK_N, k.shape[1]), tl.float32)
    for _ in tl.range(group, num_stages=1):
        row = tl.load(plane) * k_blocks + block
        for PARTIAL in tl.static_range(2):
            begin, end = tl.load(lists.at[PARTIAL] + row), tl.load(lists.at[PARTIAL] + row + 1)
            visited = tl.load(lists.blocks[PARTIAL] + begin, mask=begin < end, other=0)
            for i in tl.range(begin * PARTS, end * PARTS, num_stages=1 if GUARD and PARTIAL else None):
                start = visited * BLOCK + i % PARTS * BLOCK_M
                queries = tile(q, start, q_by[2], q_len, BLOCK_M, D, RAGGED)
                grad = tile(dout, start, dout_by[2], q_len, BLOCK_M, D, RAGGED)
                levels, deltas = tl.load(level + start + m), tl.load(delta + start + m)
                scores = tl.dot(k, tl.trans(queries), input_precision="ieee")
                p = tl.exp2(scores * power - levels[None, :])
                if PARTIAL:
                    number = tl.load(lists.tile + i // PARTS)
                    seen = seen_in(lists.tiles, number, i % PARTS * BLOCK_M, place, BLOCK, BLOCK_M, BLOCK_N, True)
                    seen = seen & _live(levels, deltas)[None, :] if GUARD else seen
                    p = tl.where(seen, p, 0.0)
                elif GUARD:
                    seen = _live(levels, deltas)[None, :]
                    p = tl.where(seen, p, 0.0)
                dv = weighed(dv, p.to(grad.dtype), grad, seen if PARTIAL or GUARD else True, GUARD)
                dp = tl.dot(v, tl.trans(grad), input_precision="ieee")
                ds = p * (dp - deltas[None, :])
                if PARTIAL or GUARD:
                    ds = tl.where(seen, ds, 0.0)  # 0 times a NaN of a masked pair
                dk = weighed(dk, ds.to(queries.dtype), queries, seen if PARTIAL or GUARD else True, GUARD)
                visited = tl.load(lists.blocks[PARTIAL] + (i + 1) // PARTS, mask=i + 1 < end * PARTS, other=0)
        q, dout, level, delta, plane = q + q_by[1], dout + dout_by[1], level + padded, delta + padded, plane + plane_h
    return dk, dv


@triton.jit(do_not_specialize=["q_len", "k_len", "k_blocks", "heads", "group", "plane_b", "plane_h"])
def by_columns(
    dout, q, k, v, level, delta, dk, dv, dout_by, q_by, k_by, v_by, dk_by, dv_by, lists, plane_b, plane_h,
    q_len, k_len, k_blocks, heads, group, scale, bad,
    D: constexpr, BLOCK: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, RAGGED: constexpr, GUARD: constexpr,
):  # fmt: skip
    """Grid: k_blocks * BLOCK / BLOCK_N places of the order of a group's first query head, B H_kv heads.

    heads: of queries; bad: int32, of each program: 1 if its result holds a NaN; RAGGED: q_len is no multiple of BLOCK.
    """
    k_heads = heads // group
    b, k_head = tl.program_id(1) // k_heads, tl.program_id(1) % k_heads
    h = k_head * group
    first = b * plane_b + h * plane_h
    _, block, part = first_row(lists, first, k_blocks, BLOCK // BLOCK_N)
    start, place = block * BLOCK + part * BLOCK_N, part * BLOCK_N
    bad += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    if start >= k_len:
        return
    if (tl.load(bad) if GUARD else 1) == 0:
        return
    keys = tile(head(k, k_by, b, k_head), start, k_by[2], k_len, BLOCK_N, D, True)
    values = tile(head(v, v_by, b, k_head), start, v_by[2], k_len, BLOCK_N, D, True)
    q, dout = head(q, q_by, b, h), head(dout, dout_by, b, h)
    padded = (b * heads + h).to(tl.int64) * ((q_len + BLOCK - 1) // BLOCK * BLOCK)
    power = scale * 1.4426950408889634
    total_k, total_v = _dkdv(
        keys, values, q, dout, q_by, dout_by, level + padded, delta + padded, q_len, power,
        lists, lists.plane + first, plane_h, k_blocks, group, block, place, D, BLOCK, BLOCK_M, BLOCK_N, RAGGED, GUARD,
    )  # fmt: skip
    dk, dv = head(dk, dk_by, b, k_head), head(dv, dv_by, b, k_head)
    store(dk, start, dk_by[2], k_len, total_k * scale, BLOCK_N, D)
    store(dv, start, dv_by[2], k_len, total_v, BLOCK_N, D)
    if not GUARD:
        tl.store(bad, (any_nan(total_k) | any_nan(total_v)).to(tl.int32))
