"""Block-sparse attention forward as a Triton kernel: a program holds some queries of a head and visits their blocks.

Full blocks come first, without mask code, then partial ones. The number of the next block is read one step ahead, so
that the copies of its keys and values begin while this one is computed. Where the result holds a NaN, the program
starts again and tests what it weighs (`weighed`). To test once at the end costs next to nothing; a test of each tile of
values would bring it into registers, where the tensor cores read shared memory.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from blockshock_lib.kernels.attention.triton_tiles import any_nan, first_row, head, seen_in, store, tile, weighed


@triton.jit
def _share(at, row):
    """Where this program's part of a row begins and ends, if several programs share the row."""
    begin, end, part, parts = tl.load(at + row), tl.load(at + row + 1), tl.program_id(2), tl.num_programs(2)
    return begin + (end - begin) * part // parts, begin + (end - begin) * (part + 1) // parts


@triton.jit
def _attend(
    q, k, v, k_s, v_s, k_len, power, lists, row, place,
    D: constexpr, BLOCK: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr, GUARD: constexpr,
):  # fmt: skip
    """row: of the lists; place: of the queries in their block."""
    PARTS: constexpr = BLOCK // BLOCK_N
    acc = tl.zeros((BLOCK_M, q.shape[1]), tl.float32)  # sum of p v
    # The largest score so far, in powers of two, and the sum of p.
    top, total = tl.full((BLOCK_M,), -float("inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for PARTIAL in tl.static_range(2):
        begin, end = _share(lists.at[PARTIAL], row)
        block = tl.load(lists.blocks[PARTIAL] + begin, mask=begin < end, other=0)
        for i in tl.range(begin * PARTS, end * PARTS, num_stages=1 if GUARD and PARTIAL else None):
            start = block * BLOCK + i % PARTS * BLOCK_N
            keys = tile(k, start, k_s, k_len, BLOCK_N, D, PARTIAL)
            scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
            if PARTIAL:
                number = tl.load(lists.tile + i // PARTS)
                seen = seen_in(lists.tiles, number, place, i % PARTS * BLOCK_N, BLOCK, BLOCK_M, BLOCK_N, False)
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
            acc = weighed(acc * fade[:, None], p.to(values.dtype), values, seen if PARTIAL else True, GUARD and PARTIAL)
            top = higher
            block = tl.load(lists.blocks[PARTIAL] + (i + 1) // PARTS, mask=i + 1 < end * PARTS, other=0)
    return acc, top, total


@triton.jit(do_not_specialize=["q_len", "k_len", "q_blocks", "heads", "group", "plane_b", "plane_h"])
def forward(
    q, k, v, out, lse, q_by, k_by, v_by, out_by, lists, plane_b, plane_h,
    q_len, k_len, q_blocks, heads, group, power, bad,
    D: constexpr, BLOCK: constexpr, BLOCK_M: constexpr, BLOCK_N: constexpr,
):  # fmt: skip
    """Grid: q_blocks * BLOCK / BLOCK_M places of the order, B H heads, splits.

    out [splits, B, H, q_len, D]; lse fp32 [splits, B, H, q_len], in base e; of each tensor the strides of (split,)
    batch, head, position; group: query heads of a head of keys; power: scale / ln 2; bad: None, or int32
    [B, H, q_blocks * BLOCK / 64]: where it is 0, there is nothing to do.
    """
    b, h, split = tl.program_id(1) // heads, tl.program_id(1) % heads, tl.program_id(2)
    row, block, part = first_row(lists, b * plane_b + h * plane_h, q_blocks, BLOCK // BLOCK_M)
    start, place = block * BLOCK + part * BLOCK_M, part * BLOCK_M
    if start >= q_len:
        return
    if bad is not None:  # noqa: SIM102  # that one is decided as the kernel is compiled
        if tl.load(bad + tl.program_id(1).to(tl.int64) * (q_blocks * (BLOCK // 64)) + start // 64) == 0:
            return
    queries = tile(head(q, q_by, b, h), start, q_by[2], q_len, BLOCK_M, D, True)
    k, v = head(k, k_by, b, h // group), head(v, v_by, b, h // group)
    given = queries, k, v, k_by[2], v_by[2], k_len, power, lists, row, place
    acc, top, total = _attend(*given, D, BLOCK, BLOCK_M, BLOCK_N, False)
    if any_nan(acc):
        acc, top, total = _attend(*given, D, BLOCK, BLOCK_M, 32, True)
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]  # a row that sees nothing: output 0, lse -inf
    out = head(out, out_by[1:], b, h) + split.to(tl.int64) * out_by[0]
    store(out, start, out_by[3], q_len, acc, BLOCK_M, D)
    rows = start + tl.arange(0, BLOCK_M)
    lse += (split.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * q_len
    tl.store(lse + rows, (top + tl.log2(total)) * 0.6931471805599453, mask=rows < q_len)
