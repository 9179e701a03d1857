"""What the Triton kernels of attention share: to find a row, load a tile, unpack its bits, keep a NaN out.

A second pass, where the first one gave a NaN, has other tiles: offsets that both share would keep registers through the
first one's loops.
"""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def first_row(lists, at, n, PARTS: constexpr):
    """(Row of the lists, its block, part of the block) of this program. at: of its plane; n: blocks a plane."""
    first = tl.load(lists.plane + at) * n
    block = tl.load(lists.order + first + tl.program_id(0) // PARTS)
    return first + block, block, tl.program_id(0) % PARTS


@triton.jit
def head(x, by, b, h):
    """Where head h of batch element b begins; a tensor may have 2^31 elements or more."""
    return x + b.to(tl.int64) * by[0] + h.to(tl.int64) * by[1]


@triton.jit
def tile(rows, start, step, length, ROWS: constexpr, D: constexpr, BOUND: constexpr):
    """[ROWS, DIM], DIM the power of two from D on, from row `start` of `rows`, [length, D]; BOUND: zero beyond it."""
    DIM: constexpr = triton.next_power_of_2(D)
    r, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    here = rows + start.to(tl.int64) * step + (r[:, None] * step + d[None, :])  # a head may have 2^31 elements or more
    if BOUND and DIM != D:
        return tl.load(here, mask=(start + r < length)[:, None] & (d < D)[None, :], other=0)
    elif BOUND:
        return tl.load(here, mask=(start + r < length)[:, None], other=0)
    elif DIM != D:
        return tl.load(here, mask=(d < D)[None, :], other=0)
    else:
        return tl.load(here)


@triton.jit
def store(rows, start, step, length, values, ROWS: constexpr, D: constexpr):
    """The inverse of `tile`."""
    DIM: constexpr = triton.next_power_of_2(D)
    r, d = tl.arange(0, ROWS), tl.arange(0, DIM)
    here = rows + start.to(tl.int64) * step + (r[:, None] * step + d[None, :])
    tl.store(here, values.to(rows.dtype.element_ty), mask=(start + r < length)[:, None] & (d < D)[None, :])


@triton.jit
def seen_in(tiles, number, row, col, BLOCK: constexpr, ROWS: constexpr, COLS: constexpr, TURNED: constexpr):
    """Bool [ROWS, COLS], turned [COLS, ROWS]: the part of a tile of bits from its (row, col) on."""
    # A word holds 32 columns: the words of a column of words are one short load, with no large tensor to lay out anew.
    tl.static_assert(COLS % 32 == 0)
    words = tiles + (number.to(tl.int64) * BLOCK + row + tl.arange(0, ROWS)) * (BLOCK // 32) + col // 32
    c = tl.arange(0, COLS)
    if TURNED:
        bits = tl.zeros((COLS, ROWS), tl.int32)
        for j in tl.static_range(COLS // 32):
            bits = tl.where((c // 32 == j)[:, None], tl.load(words + j)[None, :], bits)
        return (bits >> (c % 32)[:, None] & 1) != 0
    else:
        bits = tl.zeros((ROWS, COLS), tl.int32)
        for j in tl.static_range(COLS // 32):
            bits = tl.where((c // 32 == j)[None, :], tl.load(words + j)[:, None], bits)
        return (bits >> (c % 32)[None, :] & 1) != 0


@triton.jit
def weighed(total, weights, values, seen, GUARD: constexpr):
    """total + weights @ values. A masked pair has weight 0, and 0 times NaN is NaN.

    GUARD: a row that is not finite counts as NaN where it is seen, and as 0 elsewhere.
    """
    if GUARD:
        good = tl.abs(values.to(tl.float32)) < float("inf")
        bad = tl.min(good.to(tl.int32), 1) == 0
        weights = tl.where(seen & bad[None, :], float("nan"), weights).to(weights.dtype)
        values = tl.where(good, values, 0.0).to(values.dtype)
    return tl.dot(weights, values, total, input_precision="ieee")


@triton.jit
def any_nan(x):
    return tl.max(tl.max((x != x).to(tl.int32), 1), 0) > 0
