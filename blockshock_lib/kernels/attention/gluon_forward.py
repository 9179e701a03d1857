"""Block-sparse attention forward in Gluon, for Hopper: one warp copies tiles by TMA, warpgroups of 64 queries compute.

The order of a warpgroup is that of FlashAttention-3 (Shah et al. 2024, section 3.2): while the tensor cores sum the
values of a tile, the exponentials of the next one are taken. Keys and values each go through a ring of slots: a tuple
of its tiles, of the barriers that say "copied", and of those that say "read".
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import constexpr
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS: constexpr = constexpr(64)  # queries of a warpgroup


@gluon.jit
def _copy(k, v, keys, values, lists, row, b, h, BLOCK: constexpr, BLOCK_N: constexpr, STAGES: constexpr):
    """The copying warp: the keys and values of each visited tile, as slots become free."""
    PARTS: constexpr = BLOCK // BLOCK_N
    n = 0
    for PARTIAL in gl.static_range(2):
        begin, end = gl.load(lists.at[PARTIAL] + row), gl.load(lists.at[PARTIAL] + row + 1)
        for i in range(begin * PARTS, end * PARTS):
            start = gl.load(lists.blocks[PARTIAL] + i // PARTS) * BLOCK + i % PARTS * BLOCK_N
            _fill(k, keys, n, b, h, start, STAGES)
            _fill(v, values, n, b, h, start, STAGES)
            n += 1


@gluon.jit
def _fill(x, ring, n, b, h, start, STAGES: constexpr):
    slot, turn = n % STAGES, n // STAGES & 1
    mbarrier.wait(ring[2].index(slot), turn ^ 1)
    mbarrier.expect(ring[1].index(slot), x.block_type.nbytes)
    tma.async_copy_global_to_shared(x, [b, h, start, 0], ring[1].index(slot), ring[0].index(slot))


@gluon.jit
def _tile(ring, n, BLOCK_N: constexpr, D: constexpr, STAGES: constexpr):
    """[BLOCK_N, D]: the n-th tile of a ring, once it is there."""
    mbarrier.wait(ring[1].index(n % STAGES), n // STAGES & 1)
    return ring[0].index(n % STAGES).reshape([BLOCK_N, D])


@gluon.jit
def _seen(lists, i, place, BLOCK: constexpr, BLOCK_N: constexpr, S: constexpr):
    """Bool [ROWS, BLOCK_N]: the bits of the i-th partial tile, from this query on."""
    PARTS: constexpr = BLOCK // BLOCK_N
    number, col = gl.load(lists.tile + i // PARTS), i % PARTS * BLOCK_N
    r, c = gl.arange(0, ROWS, gl.SliceLayout(1, S)), gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    words = lists.tiles + (number.to(gl.int64) * BLOCK + place + r) * (BLOCK // 32) + col // 32
    bits = gl.full((ROWS, BLOCK_N), 0, gl.int32, S)
    for j in gl.static_range(BLOCK_N // 32):
        bits = gl.where((c // 32 == j)[None, :], gl.load(words + j)[:, None], bits)
    return (bits >> (c % 32)[None, :] & 1) != 0


@gluon.jit
def _softmax(
    scores, top, total, power, lists, i, place, BLOCK: constexpr, BLOCK_N: constexpr, S: constexpr, PARTIAL: constexpr
):
    """(weights, the largest score so far in powers of two, the sum of weights, what former sums fade by)."""
    if PARTIAL:
        scores = gl.where(_seen(lists, i, place, BLOCK, BLOCK_N, S), scores * power, -float("inf"))
        higher = gl.maximum(top, gl.max(scores, 1))
        level = gl.where(higher == -float("inf"), 0.0, higher)
        p = gl.exp2(scores - level[:, None])
    else:
        higher = gl.maximum(top, gl.max(scores, 1) * power)
        level = higher
        p = gl.exp2(scores * power - level[:, None])
    fade = gl.exp2(top - level)
    return p, higher, total * fade + gl.sum(p, 1), fade


@gluon.jit
def _attend(
    GROUP: constexpr, queries, q_ready, keys, values, lists, row, place, power, to,
    D: constexpr, BLOCK: constexpr, BLOCK_N: constexpr, STAGES: constexpr,
):  # fmt: skip
    """A warpgroup: 64 queries over all visited tiles. to: where results go (out, its step, lse, bad, start, q_len)."""
    S: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])  # of scores [ROWS, BLOCK_N]
    SUM: constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # of sums [ROWS, D]
    P: constexpr = gl.DotOperandLayout(0, SUM, 2)
    PARTS: constexpr = BLOCK // BLOCK_N
    q, place = queries.index(GROUP).reshape([ROWS, D]), place + GROUP * ROWS
    none = gl.full((ROWS, BLOCK_N), 0.0, gl.float32, S)
    acc = gl.full((ROWS, D), 0.0, gl.float32, SUM)
    top = gl.full((ROWS,), -float("inf"), gl.float32, gl.SliceLayout(1, S))
    total = gl.full((ROWS,), 0.0, gl.float32, gl.SliceLayout(1, S))
    mbarrier.wait(q_ready, 0)
    n = 0
    for PARTIAL in gl.static_range(2):
        begin, end = gl.load(lists.at[PARTIAL] + row) * PARTS, gl.load(lists.at[PARTIAL] + row + 1) * PARTS
        if begin < end:
            tile = _tile(keys, n, BLOCK_N, D, STAGES).permute((1, 0))
            scores = warpgroup_mma(q, tile, none, use_acc=False)
            mbarrier.arrive(keys[2].index(n % STAGES), count=1)
            weights, top, total, fade = _softmax(
                scores, top, total, power, lists, begin, place, BLOCK, BLOCK_N, S, PARTIAL
            )
            acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, SUM))[:, None]
            p = gl.convert_layout(weights.to(queries.dtype), P)
            for i in range(begin + 1, end):
                tile = _tile(keys, n + 1, BLOCK_N, D, STAGES).permute((1, 0))
                ahead = warpgroup_mma(q, tile, none, use_acc=False, is_async=True)
                summed = warpgroup_mma(p, _tile(values, n, BLOCK_N, D, STAGES), acc, is_async=True)
                scores = warpgroup_mma_wait(1, [ahead])
                mbarrier.arrive(keys[2].index((n + 1) % STAGES), count=1)
                weights, top, total, fade = _softmax(
                    scores, top, total, power, lists, i, place, BLOCK, BLOCK_N, S, PARTIAL
                )
                coming = gl.convert_layout(weights.to(queries.dtype), P)
                _tile(values, n, BLOCK_N, D, STAGES)  # it is there: ptxas moves no wait for products above this
                acc, p, coming = warpgroup_mma_wait(0, [summed, p, coming])
                mbarrier.arrive(values[2].index(n % STAGES), count=1)
                acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, SUM))[:, None]
                p = coming
                n += 1
            acc = warpgroup_mma(p, _tile(values, n, BLOCK_N, D, STAGES), acc)
            mbarrier.arrive(values[2].index(n % STAGES), count=1)
            n += 1
    out, step, lse, bad, start, q_len = to
    share = gl.where(total == 0, 1.0, total)  # a row that sees nothing: output 0, lse -inf
    acc = acc / gl.convert_layout(share, gl.SliceLayout(1, SUM))[:, None]
    gl.store(bad + GROUP, gl.max(gl.max((acc != acc).to(gl.int32), 1), 0))
    rows = start + place + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    gl.store(lse + rows, (top + gl.log2(total)) * 0.6931471805599453, mask=rows < q_len)
    WIDE: constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])  # stores of 16 bytes
    rows = start + place + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    here = out + (rows.to(gl.int64) * step)[:, None] + gl.arange(0, D, gl.SliceLayout(0, WIDE))[None, :]
    gl.store(here, gl.convert_layout(acc.to(queries.dtype), WIDE), mask=(rows < q_len)[:, None])


@gluon.jit
def _ring(x, STAGES: constexpr, BLOCK_N: constexpr, D: constexpr, READERS: constexpr):
    tiles = gl.allocate_shared_memory(x.dtype, [STAGES, 1, 1, BLOCK_N, D], x.layout)
    copied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(copied.index(i), count=1)
        mbarrier.init(read.index(i), count=READERS)
    return tiles, copied, read


@gluon.jit(do_not_specialize=["q_len", "q_blocks", "heads", "group", "plane_b", "plane_h"])
def forward(
    q, k, v, out, lse, bad, out_by, lists, plane_b, plane_h, q_len, q_blocks, heads, group, power,
    D: constexpr, BLOCK: constexpr, BLOCK_N: constexpr, STAGES: constexpr, GROUPS: constexpr,
):  # fmt: skip
    """Grid: q_blocks * BLOCK / (ROWS * GROUPS) places of the order, B H heads.

    q, k, v: TMA descriptors of [B, H, S, D]; lse fp32 [B, H, q_len], in base e; bad: int32 [B, H, q_blocks * BLOCK /
    ROWS], 1 where the result of these queries holds a NaN; out_by: strides of batch, head, position; group: query heads
    of a head of keys; power: scale / ln 2; GROUPS: warpgroups that compute, 1 or 2.
    """
    SHARES: constexpr = BLOCK // (ROWS * GROUPS)
    head, b, h = gl.program_id(1), gl.program_id(1) // heads, gl.program_id(1) % heads
    first = gl.load(lists.plane + b * plane_b + h * plane_h) * q_blocks
    block = gl.load(lists.order + first + gl.program_id(0) // SHARES)
    row, start, place = first + block, block * BLOCK, gl.program_id(0) % SHARES * (ROWS * GROUPS)
    keys, values = _ring(k, STAGES, BLOCK_N, D, GROUPS), _ring(v, STAGES, BLOCK_N, D, GROUPS)
    queries = gl.allocate_shared_memory(q.dtype, [GROUPS, 1, 1, ROWS, D], q.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    fence_async_shared()  # the copies see the barriers
    mbarrier.expect(q_ready, GROUPS * q.block_type.nbytes)
    for i in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(q, [b, h, start + place + i * ROWS, 0], q_ready, queries.index(i))
    out += b.to(gl.int64) * out_by[0] + h.to(gl.int64) * out_by[1]
    bad += (head.to(gl.int64) * q_blocks + block) * (BLOCK // ROWS) + place // ROWS
    to = (out, out_by[2], lse + head.to(gl.int64) * q_len, bad, start, q_len)
    # The registers of a warp that copies go to those that compute. A tuple that has a name makes tensors of constants.
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_attend, (0, queries, q_ready, keys, values, lists, row, place, power, to, D, BLOCK, BLOCK_N, STAGES)),
                (_copy, (k, v, keys, values, lists, row, b, h // group, BLOCK, BLOCK_N, STAGES)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (0, queries, q_ready, keys, values, lists, row, place, power, to, D, BLOCK, BLOCK_N, STAGES)),
                (_attend, (1, queries, q_ready, keys, values, lists, row, place, power, to, D, BLOCK, BLOCK_N, STAGES)),
                (_copy, (k, v, keys, values, lists, row, b, h // group, BLOCK, BLOCK_N, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
