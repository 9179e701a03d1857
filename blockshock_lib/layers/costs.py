"""What a method must at least do and hold: the numbers behind every floor and every memory formula.

Symbols: B batch, N out_features, K in_features, e bytes an element, w ranks. A method of two terms gives each rank a
term of k = 2 K / w input columns. All numbers are those of one rank; the bias, N entries, is left out.
"""

from __future__ import annotations

from typing import NamedTuple

from blockshock_lib.params import Mask


class Cost(NamedTuple):
    """What one rank must at least do for one piece of work. FLOPs count a multiply and an add as 2.

    `sent` is bus bytes: an all-reduce of n bytes over w ranks moves 2 n (w-1)/w, an all-gather to n bytes n (w-1)/w
    (the convention of NCCL's tests). `peak` is weights plus the largest sum of live outputs and temporaries; the input
    is left out, for it is the same for all methods.
    """

    flops: float
    read: float
    written: float
    sent: float
    weights: float
    peak: float


class Shape(NamedTuple):
    """What a cost depends on: B, in_features, out_features, bytes an element, world size, the mask, how Block-Shock
    keeps its weights ("packed" or "recompress"), its strategy for dW ("auto" or a name), and whether it multiplies and
    compresses by the stock ops.
    """

    batch: int
    in_features: int
    out_features: int
    itemsize: int
    world_size: int
    mask: Mask
    update: str = "packed"
    dw: str = "auto"
    stock: bool = False

    @property
    def y(self) -> float:
        """Bytes of y or dy, [B, N]."""
        return self.batch * self.out_features * self.itemsize

    @property
    def x(self) -> float:
        """Bytes of x or dX, [B, K]."""
        return self.batch * self.in_features * self.itemsize

    @property
    def term_columns(self) -> float:
        """k: the input columns that one rank of a method of two terms multiplies."""
        return self.in_features / (self.world_size // 2)

    def all_reduced(self, n: float) -> float:
        """Bus bytes of an all-reduce of n bytes."""
        return 2 * n * (self.world_size - 1) / self.world_size

    def all_gathered(self, n: float) -> float:
        """Bus bytes of an all-gather to n bytes."""
        return n * (self.world_size - 1) / self.world_size


class Holding(NamedTuple):
    """Bytes that the fullest rank holds in a training step.

    Attributes:
        weights: the parameter's own storage, for packed values their metadata included.
        copies: packed copies beside it.
        gradients: of the weight, in its layout.
        optimizer: its state: none for SGD, two moments for AdamW.
        activations: y, dy and dX, and what backward keeps beyond x itself (nothing, in every method here).
        scratch: the largest temporary of any one piece of the step. The pieces follow each other, so only one counts.
    """

    weights: float
    copies: float
    gradients: float
    optimizer: float
    activations: float
    scratch: float

    @property
    def peak(self) -> float:
        """All of it at once. x, the input that every method is given, is left out."""
        return sum(self)


MOMENTS = {"": 0, "sgd": 0, "adamw": 2}
"""Tensors of the weight's size that an optimizer keeps; "" trains nothing."""


def summed(shape: Shape, flops: float, weights: float, columns: float, extra: float = 0) -> Cost:
    """Cost of a forward whose ranks each make a [B, N] partial of `columns` input columns, and all-reduce it.

    `extra` is bytes of temporaries that live beside the partial.
    """
    read = weights + shape.batch * columns * shape.itemsize
    return Cost(flops, read, shape.y, shape.all_reduced(shape.y), weights, weights + shape.y + extra)


def summed_dx(shape: Shape, flops: float, weights: float, columns: float, extra: float = 0) -> Cost:
    """Cost of a dX whose ranks each make [B, `columns`] from `weights` bytes and dy, and all-reduce the whole [B, K].

    A rank that makes some columns only writes them into zeros of [B, K], which costs both once more.
    """
    made = shape.batch * columns * shape.itemsize
    placed = 0.0 if columns == shape.in_features else made + shape.x
    read = weights + shape.y + (made if placed else 0)
    peak = weights + shape.x + (made if placed else 0) + extra
    return Cost(flops, read, made + placed, shape.all_reduced(shape.x), weights, peak)


def dense_dw(shape: Shape, rows: float, columns: float) -> Cost:
    """Cost of dW = dy^T x as one dense product of `rows` of N and `columns` of K, with no communication."""
    item = shape.itemsize
    read, written = shape.batch * (rows + columns) * item, rows * columns * item
    return Cost(2.0 * shape.batch * rows * columns, read, written, 0.0, 0.0, written)
