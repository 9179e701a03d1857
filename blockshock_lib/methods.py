"""The table of methods. A new method is one file in layers/ and one row here; its tables, plots and checks come by
themselves.

The table imports no torch: parameters are validated, and reports drawn, without it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from blockshock_lib.layers.sharded import ShardedLinear


@dataclass(frozen=True)
class Method:
    """One row.

    Attributes:
        name: how parameters and records call it.
        label: how tables and figures call it.
        short: how a line in a figure is labelled.
        layer: "module:class" of the layer that does it.
        split: what the ranks share: nothing ("none"), input features ("in"), output features ("out"), or the two terms
            of a mask, each term's input features again where there are more than two ranks ("terms").
        periodic_only: whether only periodic masks will do.
        product: None: the layer has no choice of 2:4 backend; "": the one that the parameters choose; else this one.
        update: how a layer with packed values is trained: "packed" or "recompress"; None: it has none.
    """

    name: str
    label: str
    short: str
    layer: str
    split: Literal["none", "in", "out", "terms"]
    periodic_only: bool = False
    product: str | None = None
    update: Literal["packed", "recompress"] | None = None

    @property
    def chooses(self) -> bool:
        """Whether the layer packs its weight by the 2:4 backend that the parameters choose."""
        return self.product == ""

    def load(self) -> type[ShardedLinear]:
        """The layer's class; imports torch."""
        module, name = self.layer.split(":")
        return getattr(importlib.import_module(module), name)

    def options(self, chosen: str, frozen: bool = True, dw: str = "auto") -> dict[str, str | bool]:
        """Keyword arguments for the layer beyond what every study gives it.

        Args:
            chosen: the parameters' 2:4 backend.
            frozen: whether the weights are not trained.
            dw: the parameters' strategy for dW.
        """
        if self.product is None:
            return {"frozen": frozen}
        return {"frozen": frozen, "product": self.product or chosen, "update": self.update, "dw": dw}

    def shards(self, world_size: int) -> tuple[int, int]:
        """Into how many parts the method splits (in_features, out_features)."""
        return {
            "none": (1, 1),
            "in": (world_size, 1),
            "out": (1, world_size),
            "terms": (max(1, world_size // 2), 1),
        }[self.split]


_LAYERS = "blockshock_lib.layers"

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("dense", "A dense", "A", f"{_LAYERS}.dense:DenseLinear", "none"),
        Method("row_parallel", "B1 row-parallel", "B1", f"{_LAYERS}.row_parallel:RowParallelLinear", "in"),
        Method("column_parallel", "B2 column-parallel", "B2", f"{_LAYERS}.column_parallel:ColumnParallelLinear", "out"),
        Method("masked_dense", "C masked dense", "C", f"{_LAYERS}.masked_dense:MaskedDenseLinear", "terms"),
        Method(
            "permuted_dense",
            "D permuted dense",
            "D",
            f"{_LAYERS}.permuted_dense:PermutedDenseLinear",
            "terms",
            periodic_only=True,
        ),
        Method(
            "block_shock",
            "Block-Shock",
            "Block-Shock",
            f"{_LAYERS}.block_shock:BlockShockLinear",
            "terms",
            product="",
            update="packed",
        ),
        Method(
            "block_shock_recompress",
            "Block-Shock recompress (T1)",
            "T1",
            f"{_LAYERS}.block_shock:BlockShockLinear",
            "terms",
            product="",
            update="recompress",
        ),
        Method(
            "block_shock_torch",
            "Block-Shock (stock op)",
            "stock op",
            f"{_LAYERS}.block_shock:BlockShockLinear",
            "terms",
            product="torch",
            update="recompress",
        ),
    )
}
