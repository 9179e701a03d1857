"""The compressor as Triton kernels, for 16-bit values on a GPU; compress.py is their oracle.

What kernels.py says of its moves holds here: bound by memory, integers, 64-bit offsets, and a block of 4x4 tiles a
program. N and K are multiples of 64, so a block of 16x16 tiles has whole blocks of metadata in both orientations; a
block of tiles may end beyond the weight, and then the rest is masked.

Metadata are written as words of 64 bits, the eight groups of two rows (see metadata.py). They come from the tiles: a
word's sixteen are looked up again, from the L1 cache for the most part, which is simpler than to move bits between
threads. A magnitude's come from the weights themselves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockshock_lib.sparse24.kernels import Block, _codes, _kept, _piece, _words
from blockshock_lib.sparse24.pattern import Pattern, tables

BLOCKS = {"compress": Block(64, 32, 16), "metadata": Block(32, 32, 4), "magnitude": Block(16, 32, 8)}
"""Tiles along N and along K of a program; of a magnitude's, 16 along N are fixed: a block of metadata has 64 rows."""


def compress(
    pattern: Pattern,
    dense: Tensor,
    values: Tensor,
    values_t: Tensor,
    metadata: Tensor | None = None,
    metadata_t: Tensor | None = None,
) -> None:
    """dense [N, K] -> values [N, K/2] and values_t [K, N/2]; both metadata, uint8 [N K/8], too where they are given."""
    block, table = BLOCKS["compress"], tables(dense.device)
    rows, cols = pattern.tiles.shape
    _compress[(triton.cdiv(cols, block.cols), triton.cdiv(rows, block.rows))](
        _words(dense, torch.int64),
        values.view(torch.int32),
        values_t.view(torch.int32),
        None if metadata is None else metadata.view(torch.int64),
        None if metadata_t is None else metadata_t.view(torch.int64),
        pattern.tiles,
        table.words,
        table.columns,
        table.moves,
        rows,
        cols,
        WORD=_constant(pattern, "words"),
        COLUMN=_constant(pattern, "columns"),
        MOVES=_constant(pattern, "moves"),
        METADATA=metadata is not None,
        ROWS=block.rows,
        COLS=block.cols,
        num_warps=block.warps,
    )


def metadata(pattern: Pattern, out: Tensor) -> None:
    """The metadata of a pattern [N, K] -> out, uint8 [N K/8]."""
    block, table = BLOCKS["metadata"], tables(out.device)
    rows, cols = pattern.tiles.shape
    _metadata[(triton.cdiv(cols, block.cols), triton.cdiv(rows, block.rows))](
        out.view(torch.int64),
        pattern.tiles,
        table.words,
        rows,
        cols,
        WORD=_constant(pattern, "words"),
        NUMBERED=pattern.transposable,
        ROWS=block.rows,
        COLS=block.cols,
        num_warps=block.warps,
    )


def magnitude(dense: Tensor, values: Tensor, metadata: Tensor, bad: Tensor, not_finite: int) -> None:
    """dense [N, K] -> values [N, K/2] and metadata, uint8 [N K/8]; `bad`, int32 [1], becomes 1 where the bits of a |w|
    reach `not_finite`."""
    block = BLOCKS["magnitude"]
    rows, cols = dense.shape[0] // 64, dense.shape[1] // 4
    _magnitude[(triton.cdiv(cols, block.cols), rows)](
        _words(dense, torch.int64),
        values.view(torch.int32),
        metadata.view(torch.int64),
        bad,
        cols,
        NOT_FINITE=not_finite,
        COLS=block.cols,
        num_warps=block.warps,
    )


def _constant(pattern: Pattern, column: str) -> int | None:
    """What the table says of the one tile that a pattern repeats; None of another pattern."""
    if pattern.tile is None or not pattern.transposable:
        return pattern.tile
    return int(getattr(tables(torch.device("cpu")), column)[pattern.tile])


@triton.jit
def _word_of(tiles, table, at, inside, WORD: tl.constexpr, NUMBERED: tl.constexpr):
    """The word of metadata of the tile at that place, int32."""
    if WORD is not None:
        return tl.full(at.shape, WORD, tl.int32)
    word = tl.load(tiles + at, mask=inside, other=0).to(tl.int32)
    if NUMBERED:
        word = tl.load(table + word).to(tl.int32)
    return word


@triton.jit
def _write_metadata(
    out,  # int64 [16 rows cols / 64]
    tiles,
    table,
    top,  # the first tile of the block along the rows and columns of what is packed
    left,
    rows,
    cols,
    row_step,  # from a tile to the next along these rows and columns
    col_step,
    WORD: tl.constexpr,
    NUMBERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    number = tl.arange(0, ROWS * COLS // 4)
    pair = number % 32  # of rows: 8 tile + r, as metadata.py calls them
    kb = left // 8 + number // 32 % (COLS // 8)
    rb = top // 16 + number // (4 * COLS)
    inside = (16 * rb < rows) & (8 * kb < cols)
    shift = pair % 4 * 4  # to the row's nibble in the word of its tile
    at = (16 * rb + pair // 8 * 4 + pair // 4 % 2).to(tl.int64) * row_step + (8 * kb).to(tl.int64) * col_step
    groups = tl.full(at.shape, 0, tl.int64)
    for g in tl.static_range(8):
        upper = _word_of(tiles, table, at + g * col_step, inside, WORD, NUMBERED) >> shift & 15
        lower = _word_of(tiles, table, at + g * col_step + 2 * row_step, inside, WORD, NUMBERED) >> shift & 15
        groups |= (upper | lower << 4).to(tl.int64) << (8 * (2 * (g % 4) + g // 4))
    tl.store(out + (rb.to(tl.int64) * (cols // 8) + kb) * 32 + pair, groups, mask=inside)


@triton.jit
def _metadata(
    out,
    tiles,
    table,
    rows,
    cols,
    WORD: tl.constexpr,
    NUMBERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    top, left = tl.program_id(1) * ROWS, tl.program_id(0) * COLS
    _write_metadata(out, tiles, table, top, left, rows, cols, cols, 1, WORD, NUMBERED, ROWS, COLS)


@triton.jit
def _compress(
    dense,  # int64 [4 rows, cols]
    values,  # int32 [4 rows, cols]
    values_t,  # int32 [4 cols, rows]
    metadata,  # int64 [rows cols / 4]
    metadata_t,
    tiles,
    words,
    columns,
    moves,
    rows,
    cols,
    WORD: tl.constexpr,
    COLUMN: tl.constexpr,
    MOVES: tl.constexpr,
    METADATA: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    top, left = tl.program_id(1) * ROWS, tl.program_id(0) * COLS
    r = top + tl.arange(0, ROWS)
    c = left + tl.arange(0, COLS)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    word = _codes(tiles, words, r, c, rows, cols, WORD, True)
    move = _codes(tiles, moves, r, c, rows, cols, MOVES, True)
    low = tl.full((ROWS, COLS), 0, tl.uint64)
    high = tl.full((ROWS, COLS), 0, tl.uint64)
    for i in tl.static_range(4):
        at = (4 * r + i).to(tl.int64)[:, None] * cols + c[None, :]
        pair = _kept(tl.load(dense + at, mask=inside, other=0), word, i)
        tl.store(values + at, pair.to(tl.uint32).to(tl.int32, bitcast=True), mask=inside)
        if i < 2:
            low |= pair << (32 * i)
        else:
            high |= pair << (32 * (i - 2))
    for i in tl.static_range(4):
        pair = _piece(low, high, move, 2 * i) | _piece(low, high, move, 2 * i + 1) << 16
        pair = pair.to(tl.uint32).to(tl.int32, bitcast=True)
        target = (4 * c + i).to(tl.int64)[:, None] * rows + r[None, :]
        tl.store(values_t + target, tl.trans(pair), mask=(c < cols)[:, None] & (r < rows)[None, :])
    if METADATA:
        _write_metadata(metadata, tiles, words, top, left, rows, cols, cols, 1, WORD, True, ROWS, COLS)
        _write_metadata(metadata_t, tiles, columns, left, top, cols, rows, 1, cols, COLUMN, True, COLS, ROWS)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _magnitude(
    dense,  # int64 [64 blocks, cols]
    values,  # int32 [64 blocks, cols]
    metadata,  # int64 [8 blocks cols / 2]
    bad,
    cols,
    NOT_FINITE: tl.constexpr,
    COLS: tl.constexpr,
):
    rb, left = tl.program_id(1), tl.program_id(0) * COLS
    pair = tl.arange(0, 32)
    group = left + tl.arange(0, COLS)
    inside = (pair < 32)[:, None] & (group < cols)[None, :]
    both = tl.full((32, COLS), 0, tl.int32)
    wrong = tl.full((32, COLS), 0, tl.int32)
    for half in tl.static_range(2):
        row = 64 * rb + 16 * (pair // 8) + 8 * half + pair % 8
        at = row.to(tl.int64)[:, None] * cols + group[None, :]
        four = tl.load(dense + at, mask=inside, other=0)
        # |w| above, and the place counted backwards below, so that no two are equal and the lower index wins a tie.
        w0 = ((four & 0x7FFF) << 2 | 3).to(tl.int32)
        w1 = ((four >> 16 & 0x7FFF) << 2 | 2).to(tl.int32)
        w2 = ((four >> 32 & 0x7FFF) << 2 | 1).to(tl.int32)
        w3 = ((four >> 48 & 0x7FFF) << 2).to(tl.int32)
        top01, top23 = tl.maximum(w0, w1), tl.maximum(w2, w3)
        first = tl.maximum(top01, top23)
        second = tl.maximum(tl.minimum(top01, top23), tl.maximum(tl.minimum(w0, w1), tl.minimum(w2, w3)))
        wrong |= (first >= NOT_FINITE * 4).to(tl.int32)
        first, second = 3 - (first & 3), 3 - (second & 3)
        nibble = tl.minimum(first, second) | tl.maximum(first, second) << 2
        kept = _kept(four, nibble, 0)
        tl.store(values + at, kept.to(tl.uint32).to(tl.int32, bitcast=True), mask=inside)
        both |= nibble << 4 * half
    any_wrong = tl.reduce(tl.reduce(wrong, 1, _either), 0, _either)
    tl.atomic_or(bad, any_wrong, mask=any_wrong != 0, sem="relaxed")
    place = 8 * (2 * (group % 4) + group // 4 % 2)
    groups = tl.reshape(both.to(tl.int64) << place.to(tl.int64)[None, :], (32, COLS // 8, 8))
    groups = tl.reduce(groups, 2, _either)
    kb = left // 8 + tl.arange(0, COLS // 8)
    target = (rb.to(tl.int64) * (cols // 8) + kb)[None, :] * 32 + pair[:, None]
    tl.store(metadata + target, groups, mask=(pair < 32)[:, None] & (8 * kb < cols)[None, :])
