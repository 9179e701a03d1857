"""The moves of pattern.py and the passes of compress.py as Triton kernels, for 16-bit values on a GPU; those two files
are their oracles.

Each is bound by memory, so each reads and writes every byte once, in runs of at least 128 bytes. Two kept weights of a
row of a tile are one 32-bit word of the values, a group of a dense matrix one of 64 bits, as are the metadata of the
eight groups of two rows (see compress.py), whose sixteen tiles are looked up again, mostly from the L1 cache. A program
handles a block of 4x4 tiles, masked beyond the weight's end, and turns it in shared memory where rows of W^T are
written. Values are integers: nothing is rounded, and a NaN keeps its bits. Offsets are 64-bit: 32 bits would end at N =
K = 92000. Where one tile repeats it is a constant of the kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr


@triton.jit
def _word_of(tiles, table, at, inside, WORD: constexpr, NUMBERED: constexpr):
    # The table's entry (or the word of metadata) of each of these tiles, int32.
    if WORD is not None:
        return tl.full(at.shape, WORD, tl.int32)
    word = tl.load(tiles + at, mask=inside, other=0).to(tl.int32)
    if NUMBERED:
        word = tl.load(table + word).to(tl.int32)
    return word


@triton.jit
def _codes(tiles, table, r, c, rows, cols, CODE: constexpr, NUMBERED: constexpr):
    # The same of a block. Loaded turned and turned back: Triton lays out a look-up along the first dimension, and would
    # otherwise carry all that is computed from it through shared memory, with a barrier each.
    at, inside = r.to(tl.int64)[None, :] * cols + c[:, None], (r < rows)[None, :] & (c < cols)[:, None]
    return tl.trans(_word_of(tiles, table, at, inside, CODE, NUMBERED))


@triton.jit
def _row_of_values(values, at, inside):
    return tl.load(values + at, mask=inside, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _kept(four, words, ROW: constexpr):
    """The 32 bits of the two kept weights of a group of four, int64, by the nibble of that row of its tile."""
    four = four.to(tl.uint64, bitcast=True)
    first, second = (words >> (4 * ROW) & 3) * 16, (words >> (4 * ROW + 2) & 3) * 16
    return (four >> first.to(tl.uint64)) & 0xFFFF | ((four >> second.to(tl.uint64)) & 0xFFFF) << 16


@triton.jit
def _piece(low, high, moves, SLOT: constexpr):
    # 16 of the tile's 128 bits: value number SLOT of the transposed tile.
    place = moves >> (4 * SLOT)
    half = tl.where((place & 4) == 0, low, high)
    return (half >> ((place & 3) * 16).to(tl.uint64)) & 0xFFFF


@triton.jit
def _store_turned(out, low, high, moves, r, c, rows, cols):
    # The tiles' 128 bits, turned: int32 [4 cols, rows].
    for i in tl.static_range(4):
        pair = _piece(low, high, moves, 2 * i) | _piece(low, high, moves, 2 * i + 1) << 16
        pair = pair.to(tl.uint32).to(tl.int32, bitcast=True)
        target = (4 * c + i).to(tl.int64)[:, None] * rows + r[None, :]
        tl.store(out + target, tl.trans(pair), mask=(c < cols)[:, None] & (r < rows)[None, :])


@triton.jit
def _move(
    source,
    out,
    tiles,
    table,
    rows,
    cols,
    MOVE: constexpr,
    CODE: constexpr,
    NUMBERED: constexpr,
    ROWS: constexpr,
    COLS: constexpr,
):
    """gather: int64 -> int32; scatter: int32 -> int64; masked: int64 -> int64; all [4 rows, cols]; transpose_values:
    int32 [4 rows, cols] -> int32 [4 cols, rows].
    """
    r, c = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    words = _codes(tiles, table, r, c, rows, cols, CODE, NUMBERED)
    if MOVE == "transpose_values":
        at = (4 * r).to(tl.int64)[:, None] * cols + c[None, :]
        low = _row_of_values(source, at, inside) | _row_of_values(source, at + cols, inside) << 32
        at += 2 * cols
        high = _row_of_values(source, at, inside) | _row_of_values(source, at + cols, inside) << 32
        _store_turned(out, low, high, words, r, c, rows, cols)
    else:
        kept = tl.full((r.shape[0], c.shape[0]), 0xFFFF, tl.uint64)
        for i in tl.static_range(4):
            at = (4 * r + i).to(tl.int64)[:, None] * cols + c[None, :]
            first, second = (words >> (4 * i) & 3) * 16, (words >> (4 * i + 2) & 3) * 16
            if MOVE == "gather":
                pair = _kept(tl.load(source + at, mask=inside, other=0), words, i)
                tl.store(out + at, pair.to(tl.uint32).to(tl.int32, bitcast=True), mask=inside)
            else:
                if MOVE == "scatter":
                    pair = _row_of_values(source, at, inside)
                    four = (pair & 0xFFFF) << first.to(tl.uint64) | (pair >> 16) << second.to(tl.uint64)
                else:
                    four = tl.load(source + at, mask=inside, other=0).to(tl.uint64, bitcast=True)
                    four = four & (kept << first.to(tl.uint64) | kept << second.to(tl.uint64))
                tl.store(out + at, four.to(tl.int64, bitcast=True), mask=inside)


@triton.jit
def _larger(scores, dense, masked, tiles, rows, cols, ROWS: constexpr, COLS: constexpr):
    """scores, dense, masked: int64 [4 rows, cols]; tiles: int16 [rows, cols]."""
    r, c = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    word, kept = tl.full((ROWS, COLS), 0, tl.int32), tl.full((ROWS, COLS), 0xFFFF, tl.uint64)
    for i in tl.static_range(4):
        at = (4 * r + i).to(tl.int64)[:, None] * cols + c[None, :]
        four = tl.load(scores + at, mask=inside, other=0)
        # Without their signs 16-bit floats are ordered as integers are; of two equal ones the first wins.
        w, x, y, z = four & 0x7FFF, four >> 16 & 0x7FFF, four >> 32 & 0x7FFF, four >> 48 & 0x7FFF
        wx, wy, wz = (w >= x).to(tl.int32), (w >= y).to(tl.int32), (w >= z).to(tl.int32)
        xy, xz, yz = (x >= y).to(tl.int32), (x >= z).to(tl.int32), (y >= z).to(tl.int32)
        one, two, three = 1 - wx + xy + xz > 1, 2 - wy - xy + yz > 1, 3 - wz - xz - yz > 1
        first = tl.where(wx + wy + wz > 1, 0, tl.where(one, 1, 2))
        second = tl.where(three, 3, tl.where(two, 2, 1))
        word |= (first | second << 2) << (4 * i)
        four = tl.load(dense + at, mask=inside, other=0).to(tl.uint64, bitcast=True)
        four = four & (kept << (16 * first).to(tl.uint64) | kept << (16 * second).to(tl.uint64))
        tl.store(masked + at, four.to(tl.int64, bitcast=True), mask=inside)
    tl.store(tiles + r.to(tl.int64)[:, None] * cols + c[None, :], word.to(tl.int16), mask=inside)


@triton.jit
def _metadata(out, tiles, table, rows, cols, WORD: constexpr, NUMBERED: constexpr, ROWS: constexpr, COLS: constexpr):
    """out: int64 [16 rows cols / 64]."""
    number = tl.arange(0, ROWS * COLS // 4)
    pair = number % 32  # of rows: 8 tile + r, as compress.py calls them
    kb = tl.program_id(0) * (COLS // 8) + number // 32 % (COLS // 8)
    rb = tl.program_id(1) * (ROWS // 16) + number // (4 * COLS)
    inside = (16 * rb < rows) & (8 * kb < cols)
    shift = pair % 4 * 4  # to the row's nibble in the word of its tile
    at = (16 * rb + pair // 8 * 4 + pair // 4 % 2).to(tl.int64) * cols + (8 * kb).to(tl.int64)
    groups = tl.full(at.shape, 0, tl.int64)
    for g in tl.static_range(8):
        upper = _word_of(tiles, table, at + g, inside, WORD, NUMBERED) >> shift & 15
        lower = _word_of(tiles, table, at + g + 2 * cols, inside, WORD, NUMBERED) >> shift & 15
        groups |= (upper | lower << 4).to(tl.int64) << (8 * (2 * (g % 4) + g // 4))
    tl.store(out + (rb.to(tl.int64) * (cols // 8) + kb) * 32 + pair, groups, mask=inside)


@triton.jit
def _compress(
    dense,  # int64 [4 rows, cols]
    values,  # int32 [4 rows, cols]
    values_t,  # int32 [4 cols, rows]
    tiles,
    words,
    moves,
    rows,
    cols,
    WORD: constexpr,
    MOVES: constexpr,
    ROWS: constexpr,
    COLS: constexpr,
):
    top, left = tl.program_id(1) * ROWS, tl.program_id(0) * COLS
    r, c = top + tl.arange(0, ROWS), left + tl.arange(0, COLS)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    word = _codes(tiles, words, r, c, rows, cols, WORD, True)
    move = _codes(tiles, moves, r, c, rows, cols, MOVES, True)
    low, high = tl.full((ROWS, COLS), 0, tl.uint64), tl.full((ROWS, COLS), 0, tl.uint64)
    for i in tl.static_range(4):
        at = (4 * r + i).to(tl.int64)[:, None] * cols + c[None, :]
        pair = _kept(tl.load(dense + at, mask=inside, other=0), word, i)
        tl.store(values + at, pair.to(tl.uint32).to(tl.int32, bitcast=True), mask=inside)
        if i < 2:
            low |= pair << (32 * i)
        else:
            high |= pair << (32 * (i - 2))
    _store_turned(values_t, low, high, move, r, c, rows, cols)


MOVES = {
    "transpose_values": ("moves", torch.int32, torch.int32, 64, 32, 16),
    "gather": ("words", torch.int64, torch.int32, 4, 128, 4),
    "scatter": ("words", torch.int32, torch.int64, 4, 128, 8),
    "masked": ("words", torch.int64, torch.int64, 4, 128, 8),
}
"""Move -> the column of the tables; the words it reads and writes; tiles along N and K a program, powers of two; warps.
With more than four tiles a thread Triton moves values through shared memory once more; what writes a dense matrix keeps
to two."""


def move(name: str, pattern, source: Tensor, out: Tensor) -> None:
    """One of MOVES, as the `Pattern`'s method of that name makes it: of 16-bit values, out contiguous."""
    column, reads, writes, *block, warps = MOVES[name]
    rows, cols = pattern.tiles.shape
    tensors = as_words(source, reads), out.view(writes), pattern.tiles, getattr(pattern.tables, column)
    fixed = dict(CODE=pattern.constant(column), NUMBERED=pattern.transposable, ROWS=block[0], COLS=block[1])
    grid = triton.cdiv(cols, block[1]), triton.cdiv(rows, block[0])
    _move[grid](*tensors, rows, cols, MOVE=name, **fixed, num_warps=warps)


def larger(scores: Tensor, dense: Tensor, masked: Tensor, pattern) -> None:
    """As `pattern.larger`: of 16-bit values, into masked [N, K], contiguous, and the pattern's tiles."""
    rows, cols = pattern.tiles.shape
    tensors = as_words(scores, torch.int64), as_words(dense, torch.int64), masked.view(torch.int64), pattern.tiles
    _larger[(triton.cdiv(cols, 128), triton.cdiv(rows, 4))](*tensors, rows, cols, ROWS=4, COLS=128, num_warps=8)


def compress(pattern, dense: Tensor, values: Tensor, values_t: Tensor) -> None:
    """dense [N, K] -> values [N, K/2] and values_t [K, N/2]."""
    rows, cols = pattern.tiles.shape
    targets, tables = (values.view(torch.int32), values_t.view(torch.int32)), pattern.tables
    fixed = dict(WORD=pattern.constant("words"), MOVES=pattern.constant("moves"), ROWS=64, COLS=32, num_warps=16)
    operands = as_words(dense, torch.int64), *targets, pattern.tiles, tables.words, tables.moves, rows, cols
    _compress[(triton.cdiv(cols, 32), triton.cdiv(rows, 64))](*operands, **fixed)


def metadata(pattern, out: Tensor) -> None:
    """The metadata of a pattern [N, K] -> out, uint8 [N K/8]."""
    rows, cols = pattern.tiles.shape
    fixed = dict(WORD=pattern.constant("words"), NUMBERED=pattern.transposable, ROWS=32, COLS=32, num_warps=4)
    grid = triton.cdiv(cols, 32), triton.cdiv(rows, 32)
    _metadata[grid](out.view(torch.int64), pattern.tiles, pattern.tables.words, rows, cols, **fixed)


def as_words(source: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits as wider integers; copied where the rows do not lie end to end or begin off a word's boundary."""
    source = source.contiguous()
    return (source.clone() if source.storage_offset() % 4 else source).view(dtype)
