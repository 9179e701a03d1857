"""How cases and methods are named in tables and figures; colours: Okabe and Ito (Color Universal Design, 2008)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from blockshock_lib.kernels.sparse24.mask import MASKS
from blockshock_lib.report.axes import Axes, Work
from blockshock_lib.studies.linear.methods import METHODS
from blockshock_lib.studies.linear.params import WORKLOADS

if TYPE_CHECKING:
    import pandas as pd

SQUARE = "N (in = out features)"


class LinearAxes(Axes):
    """Weights are out x in features, most of them square: then N alone names the size."""

    def size(self, frame: pd.DataFrame) -> pd.Series:
        return (frame["in_features"].astype(float) * frame["out_features"].astype(float)) ** 0.5

    def size_name(self, frame: pd.DataFrame) -> str:
        return SQUARE if _square(frame) else "√(in · out features)"

    def x_text(self, frame: pd.DataFrame) -> pd.Series:
        return frame["in_features"].astype(str) if _square(frame) else frame["shape"].astype(str)

    def x_name(self, frame: pd.DataFrame) -> str:
        return SQUARE if _square(frame) else "weight (out x in features)"

    def y_name(self) -> str:
        return "B (rows of the input)"

    def work(self, frame: pd.DataFrame) -> pd.Series:
        return self.size(frame) * frame["batch"].astype(float)

    work_name = "N*B"

    def case(self, row: Mapping) -> str:
        return f"{row['out_features']}x{row['in_features']}, B={row['batch']}"

    def setting(self, row: Mapping) -> str:
        trained = f", {optimizer_name(row['optimizer'])}" if row.get("optimizer") else ""
        return f"{row['mask']} mask, {row['workload']} input{trained}"


def _square(frame: pd.DataFrame) -> bool:
    return bool(frame["in_features"].eq(frame["out_features"]).all())


AXES = LinearAxes(
    columns=("shape", "in_features", "out_features", "n", "batch", "mask", "workload", "optimizer"),
    x="shape",
    y="batch",
    methods=METHODS,
    over="row_parallel",
    under="block_shock",
    whole="dense",
    times={
        "forward": Work("a forward"),
        "pass": Work("a forward and dX", ", forward + dX"),
        "step": Work("a training step", ", step"),
    },
    settings=("mask", "workload", "optimizer"),
    panels=("optimizer",),
    checked=("mask", "workload"),
    bytes={
        "weight_bytes": "weight",
        "weights_bytes_held": "weights held",
        "copies_bytes": "packed copies",
        "gradient_bytes": "gradients",
        "optimizer_bytes": "optimizer state",
        "activation_bytes": "activations",
        "peak_bytes": "peak memory",
    },
    headers={"batch": "B", "size": "N", "detail": "tensor"},
    words={
        "optimizer": {"sgd": "SGD", "adamw": "AdamW"},
        "detail": {"": "y", "dx": "dX", "dw": "dW", "db": "db", "weight": "W after steps"},  # the checked tensor
        **{column: {name: name for name in known} for column, known in (("mask", MASKS), ("workload", WORKLOADS))},
    },
)
optimizer_name = partial(AXES.word, "optimizer")
