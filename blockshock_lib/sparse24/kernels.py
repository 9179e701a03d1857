"""The moves of pattern.py as Triton kernels, for 16-bit values on a GPU; pattern.py is their oracle.

Each is bound by memory, so each reads and writes every byte once, in runs of at least 128 bytes:
- two kept weights of a row of a tile are neighbours: one 32-bit word of the values;
- the four weights that a group has in a dense matrix are one 64-bit word;
- a program handles a block of 4x4 tiles, all four rows of each, and picks 16-bit pieces by shifts. For
  `transpose_values` it turns the block in shared memory, so that rows of W^T are written in whole runs too.
Values are handled as integers: nothing is rounded, and a NaN keeps its bits.

Offsets are 64-bit: 32 bits would end at N = K = 92000. Where one tile repeats it is a constant of the kernel and no
tiles are read. A kernel is compiled at its first call: call it once before a CUDA graph is captured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockshock_lib.sparse24.pattern import Pattern, tables


class Block(NamedTuple):
    """Tiles along N and along K that one program handles (powers of two), and its warps."""

    rows: int
    cols: int
    warps: int


BLOCKS = {
    "transpose_values": Block(64, 32, 16),
    "gather": Block(4, 128, 4),
    "scatter": Block(4, 128, 8),
    "masked": Block(4, 128, 8),
}
"""With more than four tiles a thread Triton moves values through shared memory once more; what writes a dense
matrix keeps to two."""


def transpose_values(pattern: Pattern, values: Tensor, out: Tensor) -> None:
    """values [N, K/2] of W -> out [K, N/2], those of W^T; both 16-bit, out contiguous."""
    _launch("transpose_values", _transpose_values, pattern, "moves", _words(values, torch.int32), out.view(torch.int32))


def gather(pattern: Pattern, dense: Tensor, out: Tensor) -> None:
    """dense [N, K] -> out [N, K/2], its kept entries; both 16-bit, out contiguous."""
    _launch("gather", _gather, pattern, "words", _words(dense, torch.int64), out.view(torch.int32))


def scatter(pattern: Pattern, values: Tensor, out: Tensor) -> None:
    """values [N, K/2] -> out [N, K], +0.0 in the holes; both 16-bit, out contiguous."""
    _launch("scatter", _scatter, pattern, "words", _words(values, torch.int32), out.view(torch.int64))


def masked(pattern: Pattern, dense: Tensor, out: Tensor) -> None:
    """dense [N, K] -> out [N, K], +0.0 in the holes; both 16-bit, out contiguous, and may be `dense` itself."""
    _launch("masked", _masked, pattern, "words", _words(dense, torch.int64), out.view(torch.int64))


def _words(source: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits as wider integers; copied where the rows do not lie end to end or begin off a word's boundary."""
    source = source.contiguous()
    return (source.clone() if source.storage_offset() % 4 else source).view(dtype)


def _launch(name: str, kernel, pattern: Pattern, column: str, source: Tensor, out: Tensor) -> None:
    rows, cols = pattern.tiles.shape
    block = BLOCKS[name]
    code = pattern.tile
    if code is not None and pattern.transposable:
        code = int(getattr(tables(torch.device("cpu")), column)[code])
    kernel[(triton.cdiv(cols, block.cols), triton.cdiv(rows, block.rows))](
        source,
        out,
        pattern.tiles,
        getattr(tables(out.device), column),
        rows,
        cols,
        CODE=code,
        NUMBERED=pattern.transposable,
        ROWS=block.rows,
        COLS=block.cols,
        num_warps=block.warps,
    )


@triton.jit
def _codes(tiles, table, r, c, rows, cols, CODE: tl.constexpr, NUMBERED: tl.constexpr):
    """The table's entry (or the word of metadata) of each tile of a block, int32."""
    if CODE is not None:
        return tl.full((r.shape[0], c.shape[0]), CODE, tl.int32)
    # Loaded turned and turned back: Triton lays out a look-up along the first dimension, and would otherwise carry all
    # that is computed from it through shared memory, with a barrier each.
    at = r.to(tl.int64)[None, :] * cols + c[:, None]
    code = tl.load(tiles + at, mask=(r < rows)[None, :] & (c < cols)[:, None], other=0).to(tl.int32)
    if NUMBERED:
        code = tl.load(table + code).to(tl.int32)
    return tl.trans(code)


@triton.jit
def _row_of_values(values, at, inside):
    return tl.load(values + at, mask=inside, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _kept(four, words, ROW: tl.constexpr):
    """The 32 bits of the two kept weights of a group of four, int64, by the nibble of that row of its tile."""
    four = four.to(tl.uint64, bitcast=True)
    first = (words >> (4 * ROW) & 3) * 16
    second = (words >> (4 * ROW + 2) & 3) * 16
    return (four >> first.to(tl.uint64)) & 0xFFFF | ((four >> second.to(tl.uint64)) & 0xFFFF) << 16


@triton.jit
def _piece(low, high, moves, SLOT: tl.constexpr):
    """16 of the tile's 128 bits: value number SLOT of the transposed tile."""
    place = moves >> (4 * SLOT)
    half = tl.where((place & 4) == 0, low, high)
    return (half >> ((place & 3) * 16).to(tl.uint64)) & 0xFFFF


@triton.jit
def _transpose_values(
    values,  # int32 [4 rows, cols]
    out,  # int32 [4 cols, rows]
    tiles,
    table,
    rows,
    cols,
    CODE: tl.constexpr,
    NUMBERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    moves = _codes(tiles, table, r, c, rows, cols, CODE, NUMBERED)
    source = (4 * r).to(tl.int64)[:, None] * cols + c[None, :]
    low = _row_of_values(values, source, inside) | _row_of_values(values, source + cols, inside) << 32
    source += 2 * cols
    high = _row_of_values(values, source, inside) | _row_of_values(values, source + cols, inside) << 32
    for i in tl.static_range(4):
        pair = _piece(low, high, moves, 2 * i) | _piece(low, high, moves, 2 * i + 1) << 16
        pair = pair.to(tl.uint32).to(tl.int32, bitcast=True)
        target = (4 * c + i).to(tl.int64)[:, None] * rows + r[None, :]
        tl.store(out + target, tl.trans(pair), mask=(c < cols)[:, None] & (r < rows)[None, :])


@triton.jit
def _gather(
    dense,  # int64 [4 rows, cols]
    out,  # int32 [4 rows, cols]
    tiles,
    table,
    rows,
    cols,
    CODE: tl.constexpr,
    NUMBERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    words = _codes(tiles, table, r, c, rows, cols, CODE, NUMBERED)
    for i in tl.static_range(4):
        at = (4 * r + i).to(tl.int64)[:, None] * cols + c[None, :]
        pair = _kept(tl.load(dense + at, mask=inside, other=0), words, i)
        tl.store(out + at, pair.to(tl.uint32).to(tl.int32, bitcast=True), mask=inside)


@triton.jit
def _scatter(
    values,  # int32 [4 rows, cols]
    out,  # int64 [4 rows, cols]
    tiles,
    table,
    rows,
    cols,
    CODE: tl.constexpr,
    NUMBERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    words = _codes(tiles, table, r, c, rows, cols, CODE, NUMBERED)
    for i in tl.static_range(4):
        at = (4 * r + i).to(tl.int64)[:, None] * cols + c[None, :]
        pair = _row_of_values(values, at, inside)
        first = (words >> (4 * i) & 3) * 16
        second = (words >> (4 * i + 2) & 3) * 16
        four = (pair & 0xFFFF) << first.to(tl.uint64) | (pair >> 16) << second.to(tl.uint64)
        tl.store(out + at, four.to(tl.int64, bitcast=True), mask=inside)


@triton.jit
def _masked(
    dense,  # int64 [4 rows, cols]
    out,  # int64 [4 rows, cols]
    tiles,
    table,
    rows,
    cols,
    CODE: tl.constexpr,
    NUMBERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    words = _codes(tiles, table, r, c, rows, cols, CODE, NUMBERED)
    kept = tl.full((r.shape[0], c.shape[0]), 0xFFFF, tl.uint64)
    for i in tl.static_range(4):
        at = (4 * r + i).to(tl.int64)[:, None] * cols + c[None, :]
        four = tl.load(dense + at, mask=inside, other=0).to(tl.uint64, bitcast=True)
        first = (words >> (4 * i) & 3) * 16
        second = (words >> (4 * i + 2) & 3) * 16
        four = four & (kept << first.to(tl.uint64) | kept << second.to(tl.uint64))
        tl.store(out + at, four.to(tl.int64, bitcast=True), mask=inside)
