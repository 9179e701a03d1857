"""A fixed 2:4 mask in the form that training reads: which weights are kept, and where they go in the transposed copy.

Training with a fixed mask never compresses. It moves values: out of a dense gradient (`gather`), back into a dense
weight (`scatter`), and from the packed values of W to those of W^T (`transpose_values`), which is one permutation
inside each 4x4 tile and a transposition of the grid of tiles. A dense matrix that is kept dense loses what the mask
drops (`masked`).

Each of the four is written twice. The torch version here runs anywhere in any dtype and is the oracle. On a CUDA
device 16-bit values go through one Triton kernel each (kernels.py). Neither reads a value back to the host, so both can
be captured in a CUDA graph once they have run. Values are moved bit for bit, a NaN's too; nothing here has a gradient.

Shapes: N = out_features, K = in_features, both multiples of 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.sparse24 import packing
from blockshock_lib.sparse24.masks import TILES, first_bad_group

_CHUNK = 1 << 22  # weights handled at once: the int64 indices of a chunk stay below 32 MB
_NO_TILE = 255
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class Tables(NamedTuple):
    """What a tile's number in `masks.TILES` stands for, on one device.

    words: int16 [90], the metadata of the tile's four rows, four bits each, row 0 lowest (see packing.py).
    columns: int16 [90], the same of its four columns: the word of the transposed tile.
    moves: int32 [90], four bits for each of the eight values of the transposed tile, the first lowest: its place among
        the eight values of the tile.
    numbers: uint8 [65536], word -> number of its tile, 255 where the tile is not 2:4 along its columns.
    """

    words: Tensor
    columns: Tensor
    moves: Tensor
    numbers: Tensor


@dataclass(frozen=True, eq=False)
class Pattern:
    """Where a 2:4 mask keeps weights.

    Attributes:
        tiles: [N/4, K/4], one entry a 4x4 tile: uint8, its number in `masks.TILES`, where the mask is 2:4 along both
            dimensions; else int16, its word of metadata (see `Tables`). One entry, expanded, where one tile repeats.
        tile: that one entry, or None.
    """

    tiles: Tensor
    tile: int | None

    @classmethod
    def of(cls, keep: Tensor) -> Pattern:
        """The pattern of a mask, bool [N, K], True where a weight is kept.

        Raises:
            ValueError: not a bool matrix, or not two of every four kept along K.
            UnsupportedError: a dimension is not a positive multiple of 4.
        """
        if keep.dtype != torch.bool or keep.dim() != 2:
            raise ValueError(f"a bool mask [N, K] is needed, not {keep.dtype} {tuple(keep.shape)}")
        rows, columns = keep.shape
        if rows < 4 or columns < 4 or rows % 4 or columns % 4:
            raise UnsupportedError(f"a 2:4 pattern needs both dimensions to be multiples of 4, not {rows}x{columns}")
        if (bad := first_bad_group(keep)) is not None:
            raise ValueError("the mask is not 2:4: row {}, column {} begins a group that keeps {} of 4".format(*bad))
        table = tables(keep.device)
        words = torch.empty(rows // 4, columns // 4, dtype=torch.int16, device=keep.device)
        tiles = torch.empty_like(words, dtype=torch.uint8)
        for part in _parts(words):
            words[part] = _words(keep[4 * part.start : 4 * part.stop])
            tiles[part] = table.numbers[words[part].long() & 0xFFFF]
        if bool((tiles == _NO_TILE).any()):
            tiles = words
        if bool((tiles == tiles[0, 0]).all()):
            return cls(tiles[:1, :1].clone().expand_as(words), int(tiles[0, 0]))
        return cls(tiles, None)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the mask."""
        return 4 * self.tiles.shape[0], 4 * self.tiles.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of `tiles`: one entry where one tile repeats."""
        return self.tiles.element_size() * (1 if self.tile is not None else self.tiles.numel())

    @property
    def transposable(self) -> bool:
        """Whether the mask keeps two of every four along N too, so that W^T can be packed as well."""
        return self.tiles.dtype == torch.uint8

    def mask(self) -> Tensor:
        """The mask itself, bool [N, K]: True where a weight is kept."""
        rows, columns = self.shape
        return self.scatter(torch.ones(1, 1, dtype=torch.bool, device=self.tiles.device).expand(rows, columns // 2))

    def t(self) -> Pattern:
        """The pattern of the transposed mask [K, N]. UnsupportedError where that is not 2:4."""
        self.require_transposable()
        table = tables(self.tiles.device)
        tiles = torch.empty(self.tiles.shape[::-1], dtype=torch.uint8, device=self.tiles.device)
        for part in _parts(self.tiles):
            tiles[:, part] = table.numbers[table.columns[self.tiles[part].t().long()].long() & 0xFFFF]
        if self.tile is not None:
            return Pattern(tiles[:1, :1].clone().expand_as(tiles), int(tiles[0, 0]))
        return Pattern(tiles, None)

    def complement(self) -> Pattern:
        """The pattern of the weights that this one drops: the other term's."""
        return Pattern.of(self.mask().logical_not_())

    def rows(self, rows: slice) -> Pattern:
        """The pattern of some rows; a view of this one. ValueError unless the slice is of whole tiles."""
        start, stop, step = rows.indices(self.shape[0])
        if step != 1 or start % 4 or stop % 4 or start >= stop:
            raise ValueError(f"rows {start}:{stop}:{step} of a pattern of {self.shape[0]} rows are not whole 4x4 tiles")
        return Pattern(self.tiles[start // 4 : stop // 4], self.tile)

    def gather(self, dense: Tensor, out: Tensor | None = None) -> Tensor:
        """The kept entries of dense [N, K], row by row: values [N, K/2], equal to `dense[mask]`. Into `out` if given.

        Raises:
            ValueError: `dense` or `out` does not fit by shape, dtype or device, or `out` is not contiguous.
        """
        rows, columns = self.shape
        dense = self.fitting(dense, (rows, columns))
        values = result(out, dense, (rows, columns // 2))
        if has_kernel(dense):
            _kernels().gather(self, dense, values)
        else:
            for part in _parts(self.tiles):
                groups = _by_rows(dense, part, 4)
                _by_rows(values, part, 2).copy_(groups.gather(3, self._places(part)))
        return written(out, values)

    def scatter(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """Dense [N, K] of values [N, K/2], with +0.0 where nothing is kept: the inverse of `gather`. Into `out` if
        given.

        Raises:
            ValueError: `values` or `out` does not fit by shape, dtype or device, or `out` is not contiguous.
        """
        rows, columns = self.shape
        values = self.fitting(values, (rows, columns // 2))
        dense = result(out, values, (rows, columns))
        if has_kernel(values):
            _kernels().scatter(self, values, dense)
        else:
            dense.zero_()
            for part in _parts(self.tiles):
                _by_rows(dense, part, 4).scatter_(3, self._places(part), _by_rows(values, part, 2))
        return written(out, dense)

    def masked(self, dense: Tensor, out: Tensor | None = None) -> Tensor:
        """Dense [N, K] with +0.0 where nothing is kept, a NaN there too. Into `out` if given, which may be `dense`.

        Raises:
            ValueError: `dense` or `out` does not fit by shape, dtype or device, or `out` is not contiguous.
        """
        dense = self.fitting(dense, self.shape)
        masked = result(out, dense, self.shape)
        if has_kernel(dense):
            _kernels().masked(self, dense, masked)
        else:
            for part in _parts(self.tiles):
                groups, places = _by_rows(dense, part, 4), self._places(part)
                kept = groups.gather(3, places)
                _by_rows(masked, part, 4).zero_().scatter_(3, places, kept)
        return written(out, masked)

    def transpose_values(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """Packed values [K, N/2] of W^T from those of W, [N, K/2]. Into `out` if given.

        Raises:
            UnsupportedError: the mask is not 2:4 along N.
            ValueError: `values` or `out` does not fit by shape, dtype or device, or `out` is not contiguous.
        """
        self.require_transposable()
        rows, columns = self.shape
        values = self.fitting(values, (rows, columns // 2))
        turned = result(out, values, (columns, rows // 2))
        if has_kernel(values):
            _kernels().transpose_values(self, values, turned)
        else:
            for part in _parts(self.tiles):
                eight = _by_rows(values, part, 2).transpose(1, 2).reshape(-1, columns // 4, 8)
                moved = eight.gather(2, self._moves(part)).view(-1, columns // 4, 4, 2)
                _bits(turned).view(columns // 4, 4, rows // 4, 2)[:, :, part] = moved.permute(1, 2, 0, 3)
        return written(out, turned)

    def require_transposable(self) -> None:
        """UnsupportedError where the mask is not 2:4 along N."""
        if not self.transposable:
            raise UnsupportedError(
                "the mask does not keep two of every four weights along the output dimension: W^T cannot be packed"
            )

    def fitting(self, given: Tensor, shape: tuple[int, int]) -> Tensor:
        """`given`, detached. ValueError where it has not this shape or lives elsewhere than the pattern."""
        if given.shape != shape or given.device != self.tiles.device:
            raise ValueError(
                f"a pattern of {self.shape[0]}x{self.shape[1]} on {self.tiles.device} needs {list(shape)}, "
                f"not {list(given.shape)} on {given.device}"
            )
        return given.detach()

    def _places(self, part: slice) -> Tensor:
        """Where in its group each kept weight lies, int64 [tile rows, 4, K/4, 2]."""
        words = self.tiles[part]
        if self.transposable:
            words = tables(words.device).words[words.long()]
        shifts = torch.arange(0, 16, 2, device=words.device).view(4, 1, 2)
        return words.long()[:, None, :, None] >> shifts & 3

    def _moves(self, part: slice) -> Tensor:
        """Where in its tile each value of the transposed tile lies, int64 [tile rows, K/4, 8]."""
        moves = tables(self.tiles.device).moves[self.tiles[part].long()]
        return moves.long()[..., None] >> torch.arange(0, 32, 4, device=moves.device) & 7


@lru_cache
def tables(device: torch.device) -> Tables:
    """The tables on that device, made once: a CUDA graph could not copy them from the host."""
    words = _words(TILES.reshape(-1, 4)).view(-1)
    columns = _words(TILES.transpose(1, 2).reshape(-1, 4)).view(-1)
    numbers = torch.full((1 << 16,), _NO_TILE, dtype=torch.uint8)
    numbers[words.long() & 0xFFFF] = torch.arange(len(TILES), dtype=torch.uint8)
    places = torch.arange(8).view(4, 2)
    moves = torch.zeros(len(TILES), dtype=torch.int32)
    for number, keep in enumerate(TILES):
        at = torch.zeros(4, 4, dtype=torch.long)
        at[keep] = places.flatten()
        for slot, place in enumerate(at.t()[keep.t()].tolist()):
            moves[number] |= place << 4 * slot
    return Tables(words.to(device), columns.to(device), moves.to(device), numbers.to(device))


def _words(keep: Tensor) -> Tensor:
    """The metadata of each tile of a bool mask [4 n, 4 m]: int16 [n, m]."""
    columns = keep.shape[1] // 4
    row0, row1, row2, row3 = packing.nibbles(keep).view(-1, 4, columns).unbind(1)
    return torch.stack((row0 | row1 << 4, row2 | row3 << 4), -1).view(torch.int16).squeeze(-1)


def _parts(tiles: Tensor) -> Iterator[slice]:
    """Runs of tile rows."""
    rows, step = tiles.shape[0], max(1, _CHUNK // (16 * tiles.shape[1]))
    return (slice(start, min(rows, start + step)) for start in range(0, rows, step))


def _by_rows(matrix: Tensor, part: slice, width: int) -> Tensor:
    """Some tile rows of a matrix as [tile rows, 4, tile columns, width], a view where it is contiguous."""
    return _bits(matrix)[4 * part.start : 4 * part.stop].reshape(part.stop - part.start, 4, -1, width)


def _bits(matrix: Tensor) -> Tensor:
    """16-bit values as integers: a strided copy of bf16 on a CPU goes by way of fp32 and loses a NaN's bits."""
    return matrix.view(torch.int16) if matrix.dtype in _SIXTEEN_BITS else matrix


def result(out: Tensor | None, like: Tensor, shape: tuple[int, int]) -> Tensor:
    """Where to write: `out`, detached, or else a new tensor. ValueError where `out` does not fit."""
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    if out.shape != shape or out.dtype != like.dtype or out.device != like.device or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous {like.dtype} {list(shape)} on {like.device}, "
            f"not {out.dtype} {list(out.shape)} with strides {out.stride()} on {out.device}"
        )
    return out.detach()


def written(out: Tensor | None, made: Tensor) -> Tensor:
    """What to return: `out`, told that it was written, or else what was made."""
    if out is None:
        return made
    # A Triton kernel's write is not seen by autograd's version counter, which says when a packed copy is stale.
    torch.autograd.graph.increment_version(out)
    return out


def has_kernel(tensor: Tensor) -> bool:
    """Whether a Triton kernel moves these values."""
    return tensor.is_cuda and tensor.dtype in _SIXTEEN_BITS


def _kernels():
    # Here, as Triton comes with PyTorch's CUDA builds only.
    from blockshock_lib.sparse24 import kernels

    return kernels
