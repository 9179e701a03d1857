"""A method's row in the table, and what it must at least do and hold: the numbers behind every floor and memory
formula, of one rank, the bias left out. No torch here. Symbols: B batch, N out_features, K in_features, e bytes an
element, w ranks. A method of two terms gives each rank a term of k = 2 K / w input columns.
"""

import pkgutil
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from blockshock_lib.kernels.sparse24.mask import Mask

MOMENTS = {"": 0, "sgd": 0, "adamw": 2}
"""Tensors of the weight's size that an optimizer keeps; "" trains nothing."""


class Cost(NamedTuple):
    """What one rank must at least do for one piece of work. FLOPs count a multiply and an add as 2. `sent`: bus bytes,
    as NCCL's tests count them. `peak`: weights plus the largest sum of live outputs and temporaries; the input, the
    same for all methods, is left out.
    """

    flops: float
    read: float
    written: float
    sent: float
    weights: float
    peak: float


class Shape(NamedTuple):
    """What a cost depends on; itemsize in bytes. `update`, as in `Method`, and `dw`, a strategy, are Block-Shock's."""

    batch: int
    in_features: int
    out_features: int
    itemsize: int
    world_size: int
    mask: Mask
    update: str = "packed"
    dw: str = "auto"

    @property
    def y(self) -> float:
        return self.batch * self.out_features * self.itemsize  # bytes, as of dy

    @property
    def x(self) -> float:
        return self.batch * self.in_features * self.itemsize  # bytes, as of dX

    @property
    def term_columns(self) -> float:
        return self.in_features / max(1, self.world_size // 2)  # k

    @property
    def pattern(self) -> float:
        """Bytes of a term's mask; of one that repeats a tile, that tile alone, which is not counted."""
        entries = self.out_features * self.term_columns
        return 0.0 if self.mask.periodic else entries / (16 if self.mask.transposable else 8)

    def gathered(self, n: float) -> float:
        """Bus bytes of an all-gather to n bytes; an all-reduce of as many moves twice that."""
        return n * (self.world_size - 1) / self.world_size


class TrainingBytes(NamedTuple):
    """Bytes that the fullest rank holds in a training step."""

    weights: float  # the parameter's own storage, for packed values their metadata included
    copies: float  # packed ones beside it, and the pattern of the mask
    gradients: float  # of the weight, in its layout
    optimizer: float  # its state
    activations: float  # y, dy and dX
    scratch: float  # the largest temporary of any one piece, for the pieces follow each other

    @property
    def peak(self) -> float:
        """All of it at once, but for x, the input that every method is given."""
        return sum(self)


_HELD = ("weights_bytes_held", "copies_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
FORMULAS = dict(zip(_HELD, TrainingBytes._fields, strict=False))
"""Metric of what a step holds -> the part of `TrainingBytes` that foretells it."""


@dataclass(frozen=True)
class Method:
    """One row. Its costs, of the forward and of dX with their collectives and of dW by a strategy, are those of ranks
    that multiply their input columns densely and all-reduce what they made; a subclass says where it differs.
    """

    name: str  # in parameters and records
    label: str  # in tables and figures
    short: str  # of a line in a figure
    colour: str
    marker: str
    layer: str  # "module:class" that does it
    # What the ranks share: input features, output features, or the two terms of a mask, each term's input features
    # again where there are more than two ranks.
    split: Literal["none", "in", "out", "terms"]
    periodic_only: bool = False  # it gathers what a periodic mask keeps, as a dense product
    folded: bool = False  # x is given and y left in an order that the neighbours keep
    product: str | None = None  # 2:4 backend; None: the layer has no choice; "": the one that the parameters choose
    update: Literal["packed", "recompress"] | None = None  # how a layer with packed values is trained

    def load(self) -> Any:
        """The layer's class, a `layers.ShardedLinear`; imports torch."""
        return pkgutil.resolve_name(self.layer)

    def options(self, chosen: str, frozen: bool = True, dw: str = "auto") -> dict[str, str | bool]:
        """Keyword arguments for the layer: `chosen` is the parameters' 2:4 backend, `dw` their strategy for dW."""
        if self.product is None:
            return {"frozen": frozen}
        return {"frozen": frozen, "product": self.product or chosen, "update": self.update, "dw": dw}

    def shards(self, world_size: int) -> tuple[int, int]:
        """Into how many parts the method splits (in_features, out_features)."""
        terms = max(1, world_size // 2)
        return {"none": (1, 1), "in": (world_size, 1), "out": (1, world_size), "terms": (terms, 1)}[self.split]

    def columns(self, shape: Shape) -> float:
        """Input columns that one rank multiplies."""
        return shape.in_features / self.shards(shape.world_size)[0]

    def cost(self, shape: Shape) -> Cost:
        return summed(self._ranks(shape), self.columns(shape))

    def cost_dgrad(self, shape: Shape) -> Cost:
        return summed_dgrad(self._ranks(shape), self.columns(shape))

    def _ranks(self, shape: Shape) -> Shape:
        return shape._replace(world_size=1) if self.split == "none" else shape

    def cost_wgrad(self, shape: Shape, by: str = "full") -> Cost:
        return dense_wgrad(shape, shape.out_features, self.columns(shape))

    def wgrad_choice(self, shape: Shape) -> str:
        """The strategy for dW that a layer of this shape takes by itself."""
        return "full"

    def cost_post_step(self, shape: Shape) -> dict[str, Cost]:
        """Of what must follow an optimizer's step; the keys of the layer's `post_step`."""
        return {}

    def entries(self, shape: Shape) -> float:
        """Entries of the parameter `weight`, those kept at zero included."""
        return self.cost(shape).weights / shape.itemsize

    def held_bytes(self, shape: Shape, optimizer: str) -> tuple[float, float]:
        """(weights, copies) of `TrainingBytes`."""
        return self.cost(shape).weights, 0.0

    def scratch_bytes(self, shape: Shape, optimizer: str) -> float:
        """Of the largest temporary of any one piece; in the forward there is neither dX nor a gradient yet."""
        trained = self.entries(shape) * shape.itemsize if optimizer else 0.0
        forward, dx, dw = self.cost(shape), self.cost_dgrad(shape), self.cost_wgrad(shape, self.wgrad_choice(shape))
        scratch = [forward.peak - forward.weights - shape.y - shape.x - trained, dx.peak - dx.weights - shape.x, 0.0]
        return max(scratch + [dw.peak - trained] * bool(optimizer))

    def training_bytes(self, shape: Shape, optimizer: str) -> TrainingBytes:
        """In a step with `optimizer`: "sgd", "adamw", or "" for a forward and dX of frozen weights."""
        trained = self.entries(shape) * shape.itemsize if optimizer else 0.0
        activations, scratch = 2 * shape.y + shape.x, self.scratch_bytes(shape, optimizer)
        held = self.held_bytes(shape, optimizer)
        return TrainingBytes(*held, trained, MOMENTS[optimizer] * trained, activations, scratch)


def summed(
    shape: Shape, columns: float, entries: float | None = None, weights: float | None = None, extra: float = 0
) -> Cost:
    """Cost of a forward whose ranks each make a [B, N] partial of `columns` input columns, and all-reduce it.
    `entries`: weights that are multiplied; `weights`: their bytes; `extra`: those of temporaries beside the partial.
    """
    entries = shape.out_features * columns if entries is None else entries
    weights = entries * shape.itemsize if weights is None else weights
    read, peak = weights + shape.batch * columns * shape.itemsize, weights + shape.y + extra
    return Cost(2.0 * shape.batch * entries, read, shape.y, 2 * shape.gathered(shape.y), weights, peak)


def summed_dgrad(shape: Shape, columns: float, *how: float, extra: float = 0) -> Cost:
    """Cost of a dX whose ranks each make [B, `columns`] from their weights and dy, and all-reduce the whole [B, K]. A
    rank that makes some columns only writes them into zeros, which costs both once more. Arguments as in `summed`.
    """
    flops, *_, weights, _ = summed(shape, columns, *how)
    made = shape.batch * columns * shape.itemsize
    part = 0 if columns == shape.in_features else made
    read, written = weights + shape.y + part, 2 * made + shape.x if part else made
    return Cost(flops, read, written, 2 * shape.gathered(shape.x), weights, weights + shape.x + part + extra)


def dense_wgrad(shape: Shape, rows: float, columns: float) -> Cost:
    """Cost of dW = dy^T x as one dense product of `rows` of N and `columns` of K, with no communication."""
    read, written = shape.batch * (rows + columns) * shape.itemsize, rows * columns * shape.itemsize
    return Cost(2.0 * shape.batch * rows * columns, read, written, 0.0, 0.0, written)
