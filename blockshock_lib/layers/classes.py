"""The classes of a periodic mask: rows and columns of every four whose kept entries are one dense matrix each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockshock_lib.kernels.patterns.dense import Products, preferred
from blockshock_lib.kernels.sparse24 import masks
from blockshock_lib.kernels.sparse24.mask import Mask


def classes_of(mask: Mask, term: int) -> list[tuple[slice, slice]]:
    """(rows, columns) of every four: rows that share a pattern with the columns that they keep, each class a dense
    matrix of the term. Of the checkerboard's term 0 both are 0:2, then 2:4. UnsupportedError: mask not periodic.
    """
    classes: dict[tuple[int, ...], list[int]] = {}
    for row, kept in enumerate((masks.tile(mask) ^ (term == 1)).tolist()):
        classes.setdefault(tuple(column for column, keep in enumerate(kept) if keep), []).append(row)
    # Two places, or all four: at one distance from each other.
    run = lambda places: slice(places[0], places[-1] + 1, places[1] - places[0])  # noqa: E731
    return [(run(rows), run(columns)) for columns, rows in classes.items()]


def _take(x: Tensor, places: slice) -> Tensor:
    """The given places of every four columns of x [B, K]: a view [B, K/4, places]."""
    # Two neighbours of 16 bits are viewed as one 32-bit number, which copies faster: 0.68 against 0.93 ms for all
    # copies of a forward at N = 40960, B = 4096 on an H200.
    pair = places.step == 1 and places.start % 2 == 0 and places.stop - places.start == 2
    if pair and x.element_size() == 2 and x.stride(0) % 2 == 0 and x.storage_offset() % 2 == 0:
        return x.view(torch.int32).unflatten(1, (-1, 2))[..., places.start // 2 : places.start // 2 + 1]
    return x.unflatten(1, (-1, 4))[..., places]


def gather(x: Tensor, classes: Sequence[slice]) -> Tensor:
    """x [B, K] -> contiguous [C, B, K places/4], every class's columns, in one pass; x itself where it is all four."""
    if classes[0] == slice(0, 4, 1):
        return x[None]
    x = x if x.stride(1) == 1 else x.contiguous()
    return torch.stack([_take(x, places) for places in classes]).flatten(2).view(x.dtype)


def products(gemm: Products, a: Tensor, b: Tensor, form: str = "classes") -> Tensor:
    """Each class's product, of [C, m, k] and [C, k, n]: [C, m, n]; one by one as searched, or at once, as `form`."""
    if form != "classes":
        with preferred(form.partition(", ")[2]):
            return torch.bmm(a, b)
    made = a.new_empty(len(a), a.shape[1], b.shape[2])
    for one, other, out in zip(a, b, made, strict=True):
        gemm(one, other.t(), out)
    return made


def scatter(parts: Tensor, classes: Sequence[slice], out: Tensor) -> Tensor:
    """Each of `parts` [C, B, K places/4] into its class's columns of `out` [B, K], in one pass where they fill it."""
    places = [_take(out, one) for one in classes]
    given = [part.view(place.dtype).view(place.shape) for part, place in zip(parts, places, strict=True)]
    order = sorted(range(len(classes)), key=lambda one: classes[one].start)
    if [place for one in order for place in range(4)[classes[one]]] == [0, 1, 2, 3]:
        whole = out.view(places[0].dtype).view(out.shape[0], -1, len(order), places[0].shape[2])
        torch.stack([given[one] for one in order], dim=2, out=whole)
    else:
        for place, part in zip(places, given, strict=True):
            place.copy_(part)
    return out


def packed_wgrad(gemm: Products, dy: Tensor, x: Tensor, classes: list[tuple[slice, slice]]) -> Tensor:
    """dy [B, N], x [B, K] -> the kept half of dW = dy^T x, [N, K/2] row-major, by products of half the size.

    Rows of a class are dy[:, rows]^T x[:, columns], straight into their rows of the result. Rows of one residue modulo
    4 lie at one distance from each other, as a GEMM can write them; so a class of some rows is one product a residue,
    and dy is first laid out by residue: one pass over dy instead of one over the result.
    """
    out = x.new_empty(dy.shape[1], x.shape[1] // 2)
    if len(classes) == 1:
        return gemm(*packed_wgrad_factors(dy, x, classes), out)
    by_residue = dy.unflatten(1, (-1, 4)).movedim(2, 0).contiguous()
    for rows, columns in classes:
        kept = gather(x, [columns])[0]
        for r in range(4)[rows]:
            gemm(by_residue[r].t(), kept.t(), out[r::4])
        del kept  # or it would still be held while the next class's is made
    return out


def packed_wgrad_factors(dy: Tensor, x: Tensor, classes: list[tuple[slice, slice]]) -> tuple[Tensor, Tensor]:
    """The factors of the first of its products; the others' are of the same shapes."""
    return (dy if len(classes) == 1 else dy[:, ::4].contiguous()).t(), gather(x, [classes[0][1]])[0].t()
