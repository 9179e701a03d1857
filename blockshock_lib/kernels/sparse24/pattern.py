"""A fixed 2:4 mask in the form that training reads: which weights are kept, and where they go in the transposed copy.

Training with a fixed mask never compresses. It moves values: out of a dense gradient (`gather`), back into a dense
weight (`scatter`), and from the packed values of W to those of W^T (`transpose_values`), a permutation inside each 4x4
tile and a transposition of the grid of tiles. What is kept dense loses what the mask drops (`masked`).

The torch version here runs anywhere and is the oracle of the Triton kernels (kernels.py) of 16-bit values on a GPU.
Both can be captured in a CUDA graph once they have run. Values are moved bit for bit, a NaN's too, without a gradient.
"""

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from blockshock_lib.errors import UnsupportedError
from blockshock_lib.kernels.sparse24.masks import TILES, check_groups, larger_two, parts
from blockshock_lib.kernels.sparse24.packing import check_place, nibbles

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # as floats of so many bytes are ordered by size
_NO_TILE = 255


class Tables(NamedTuple):
    """What a tile's number in `masks.TILES` stands for, on one device."""

    words: Tensor  # int16 [90], the metadata of the tile's four rows, four bits each, row 0 lowest (see packing.py)
    columns: Tensor  # int16 [90], the same of its four columns: the word of the transposed tile
    moves: Tensor  # int32 [90], four bits for each of the transposed tile's eight values: its place among the tile's
    numbers: Tensor  # uint8 [65536], word -> number of its tile, 255 where the tile is not 2:4 along its columns


@lru_cache
def _tables(device: torch.device) -> Tables:
    # Made once a device: a CUDA graph could not copy them from the host.
    words = words_of(TILES.reshape(-1, 4)).view(-1)
    columns = words_of(TILES.transpose(1, 2).reshape(-1, 4)).view(-1)
    numbers = torch.full((1 << 16,), _NO_TILE, dtype=torch.uint8)
    numbers[words.long() & 0xFFFF] = torch.arange(len(TILES), dtype=torch.uint8)
    moves = torch.zeros(len(TILES), dtype=torch.int32)
    for number, keep in enumerate(TILES):
        at = torch.zeros(4, 4, dtype=torch.long)
        at[keep] = torch.arange(8)
        for slot, place in enumerate(at.t()[keep.t()].tolist()):
            moves[number] |= place << 4 * slot
    return Tables(words.to(device), columns.to(device), moves.to(device), numbers.to(device))


def words_of(keep: Tensor) -> Tensor:
    """The metadata of each tile of a bool mask [4 n, 4 m]: int16 [n, m]."""
    row0, row1, row2, row3 = nibbles(keep).view(-1, 4, keep.shape[1] // 4).unbind(1)
    return torch.stack((row0 | row1 << 4, row2 | row3 << 4), -1).view(torch.int16).squeeze(-1)


@dataclass(frozen=True, eq=False)
class Pattern:
    """Where a 2:4 mask [N, K] keeps weights.

    The moves write into `out` where it is given, and raise ValueError where an operand or `out` does not fit by shape,
    dtype or device, or `out` is not contiguous.

    `tiles` has [N/4, K/4] entries, one a 4x4 tile: uint8, its number in `masks.TILES`, where the mask is 2:4 along both
    dimensions; else int16, its word of metadata (see `Tables`). Where one tile repeats, it is one entry, expanded.
    """

    tiles: Tensor
    tile: int | None  # that one entry

    @classmethod
    def of(cls, keep: Tensor) -> "Pattern":
        """The pattern of a mask, bool [N, K], True where a weight is kept. ValueError where it is no bool matrix that
        keeps two of every four along K; UnsupportedError where a dimension is not a positive multiple of 4.
        """
        if keep.dtype != torch.bool or keep.dim() != 2:
            raise ValueError(f"a bool mask [N, K] is needed, not {keep.dtype} {tuple(keep.shape)}")
        rows, columns = keep.shape
        if rows < 4 or columns < 4 or rows % 4 or columns % 4:
            raise UnsupportedError(f"a 2:4 pattern needs both dimensions to be multiples of 4, not {rows}x{columns}")
        check_groups(keep)
        numbers = _tables(keep.device).numbers
        words = torch.empty(rows // 4, columns // 4, dtype=torch.int16, device=keep.device)
        tiles = torch.empty_like(words, dtype=torch.uint8)
        for part in _parts(words):
            words[part] = words_of(keep[4 * part.start : 4 * part.stop])
            tiles[part] = numbers[words[part].long() & 0xFFFF]
        return _of_tiles(words if bool((tiles == _NO_TILE).any()) else tiles)

    @property
    def shape(self) -> tuple[int, int]:
        return 4 * self.tiles.shape[0], 4 * self.tiles.shape[1]

    @property
    def nbytes(self) -> int:
        return self.tiles.element_size() * (1 if self.tile is not None else self.tiles.numel())

    @property
    def transposable(self) -> bool:
        return self.tiles.dtype == torch.uint8

    @property
    def tables(self) -> Tables:
        return _tables(self.tiles.device)

    def constant(self, column: str) -> int | None:
        """What that column of the tables says of the one tile that repeats; None of another pattern."""
        if self.tile is None or not self.transposable:
            return self.tile
        return int(getattr(_tables(torch.device("cpu")), column)[self.tile])

    def mask(self) -> Tensor:
        rows, columns = self.shape
        return self.scatter(torch.ones(1, 1, dtype=torch.bool, device=self.tiles.device).expand(rows, columns // 2))

    def t(self) -> "Pattern":
        """The pattern of the transposed mask [K, N]. UnsupportedError where that is not 2:4."""
        self.require_transposable()
        tiles = self.tiles.new_empty(self.tiles.shape[::-1])
        for part in _parts(self.tiles):
            words = self.tables.columns[self.tiles[part].t().long()].long() & 0xFFFF
            tiles[:, part] = self.tables.numbers[words]
        return Pattern(tiles, None) if self.tile is None else _of_tiles(tiles)

    def rows(self, rows: slice) -> "Pattern":
        """The pattern of some rows; a view of this one. ValueError unless the slice is of whole tiles."""
        start, stop, step = rows.indices(self.shape[0])
        if step != 1 or start % 4 or stop % 4 or start >= stop:
            raise ValueError(f"rows {start}:{stop}:{step} of a pattern of {self.shape[0]} rows are not whole 4x4 tiles")
        return Pattern(self.tiles[start // 4 : stop // 4], self.tile)

    def gather(self, dense: Tensor, out: Tensor | None = None) -> Tensor:
        """The kept entries of dense [N, K]: values [N, K/2], equal to `dense[mask]`."""
        rows, columns = self.shape
        dense = self.fitting(dense, (rows, columns))
        values = result(out, dense, (rows, columns // 2))
        if not self._by_kernel("gather", dense, values):
            for part in _parts(self.tiles):
                groups = _by_rows(dense, part, 4)
                _by_rows(values, part, 2).copy_(groups.gather(3, self._places(part)))
        return written(out, values)

    def scatter(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """Dense [N, K] of values [N, K/2], +0.0 where nothing is kept: `gather` undone."""
        rows, columns = self.shape
        values = self.fitting(values, (rows, columns // 2))
        dense = result(out, values, (rows, columns))
        if not self._by_kernel("scatter", values, dense):
            dense.zero_()
            for part in _parts(self.tiles):
                _by_rows(dense, part, 4).scatter_(3, self._places(part), _by_rows(values, part, 2))
        return written(out, dense)

    def masked(self, dense: Tensor, out: Tensor | None = None) -> Tensor:
        """Dense [N, K] with +0.0 where nothing is kept, a NaN there too. `out` may be `dense`."""
        dense = self.fitting(dense, self.shape)
        masked = result(out, dense, self.shape)
        if not self._by_kernel("masked", dense, masked):
            masked.copy_(self.scatter(self.gather(dense)))
        return written(out, masked)

    def transpose_values(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """Packed values [K, N/2] of W^T from those of W, [N, K/2]. UnsupportedError: the mask is not 2:4 along N."""
        self.require_transposable()
        rows, columns = self.shape
        values = self.fitting(values, (rows, columns // 2))
        turned = result(out, values, (columns, rows // 2))
        if not self._by_kernel("transpose_values", values, turned):
            for part in _parts(self.tiles):
                eight = _by_rows(values, part, 2).transpose(1, 2).reshape(-1, columns // 4, 8)
                # Where in its tile each value of the transposed tile lies, int64 [tile rows, K/4, 8].
                moves = self.tables.moves[self.tiles[part].long()].long()[..., None]
                moves = moves >> torch.arange(0, 32, 4, device=moves.device) & 7
                moved = eight.gather(2, moves).view(-1, columns // 4, 4, 2)
                _bits(turned).view(columns // 4, 4, rows // 4, 2)[:, :, part] = moved.permute(1, 2, 0, 3)
        return written(out, turned)

    def require_transposable(self) -> None:
        if not self.transposable:
            raise UnsupportedError("the mask is not 2:4 along the output dimension: W^T cannot be packed")

    def fitting(self, given: Tensor, shape: tuple[int, int]) -> Tensor:
        """`given`, detached. ValueError where it has not this shape or lives elsewhere than the pattern."""
        if given.shape != shape or given.device != self.tiles.device:
            wanted = f"a pattern of {self.shape[0]}x{self.shape[1]} on {self.tiles.device} needs {list(shape)}"
            raise ValueError(f"{wanted}, not {list(given.shape)} on {given.device}")
        return given.detach()

    def _by_kernel(self, name: str, source: Tensor, out: Tensor) -> bool:
        # Whether a Triton kernel makes this move: then it is made.
        if kernels := triton_for(source):
            kernels.move(name, self, source, out)
        return kernels is not None

    def _places(self, part: slice) -> Tensor:
        # Where in its group each kept weight lies, int64 [tile rows, 4, K/4, 2].
        words = self.tiles[part]
        if self.transposable:
            words = self.tables.words[words.long()]
        shifts = torch.arange(0, 16, 2, device=words.device).view(4, 1, 2)
        return words.long()[:, None, :, None] >> shifts & 3


def larger(scores: Tensor, dense: Tensor) -> tuple[Pattern, Tensor]:
    """The pattern of the two of every four along K whose scores [N, K] are larger in size, NaN above all, a tie by the
    lower index, and dense [N, K], of the scores' dtype, with +0.0 elsewhere. The host waits for no device. ValueError
    where one is not as the other, or a dimension no multiple of 4.
    """
    rows, columns = dense.shape
    found = Pattern(torch.empty(rows // 4, columns // 4, dtype=torch.int16, device=dense.device), None)
    scores, dense = (found.fitting(one, found.shape) for one in (scores, dense))
    if scores.dtype != dense.dtype:
        raise ValueError(f"scores of {dense.dtype} are needed, not {scores.dtype}")
    if kernels := triton_for(dense):
        kernels.larger(scores, dense, masked := result(None, dense, found.shape), found)
        return found, masked
    word = _INTEGERS[scores.element_size()]
    for part in _parts(found.tiles):
        sizes = scores[4 * part.start : 4 * part.stop].contiguous().view(word) & torch.iinfo(word).max
        found.tiles[part] = words_of(larger_two(sizes.unflatten(1, (-1, 4))))
    return found, found.masked(dense)


def _of_tiles(tiles: Tensor) -> "Pattern":
    if bool((tiles == tiles[0, 0]).all()):
        return Pattern(tiles[:1, :1].clone().expand_as(tiles), int(tiles[0, 0]))
    return Pattern(tiles, None)


def _parts(tiles: Tensor):
    return parts(tiles.shape[0], 16 * tiles.shape[1], 1)


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
    check_place("out", out, like, shape)
    return out.detach()


def written(out: Tensor | None, made: Tensor) -> Tensor:
    """What to return: `out`, told that it was written, or else what was made."""
    if out is not None:  # autograd's version counter, which says when a packed copy is stale, sees no Triton kernel
        torch.autograd.graph.increment_version(out)
    return made if out is None else out


def triton_for(values: Tensor) -> ModuleType | None:
    """The Triton kernels where they move such values; else None."""
    if not (values.is_cuda and values.dtype in _SIXTEEN_BITS):
        return None
    from blockshock_lib.kernels.sparse24 import kernels  # here, as Triton comes with PyTorch's CUDA builds only

    return kernels
