"""Every way to make one rank's product, against the floor under it."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from blockshock_lib.report import cells, labels


class Way(NamedTuple):
    """How a way of the product is named and drawn."""

    label: str
    colour: str
    marker: str


def _as(method: str, label: str) -> Way:
    look = labels.style(method)
    return Way(label, look.colour, look.marker)


WAYS = {
    "dense": _as("row_parallel", "dense half (B1)"),
    "torch": _as("block_shock_torch", "2:4, stock op"),
    "cslt": Way("2:4, cuSPARSELt planned", "#E69F00", "^"),
    "small": _as("block_shock", "2:4, small-batch kernel"),
    "reference": _as("block_shock", "2:4, unpacked (no 2:4 hardware)"),
    "": _as("block_shock", "2:4 product"),
}
"""By the detail of a row; "" is a product whose way older records do not name."""
OURS = "block_shock"
_ALONE = {"row_parallel": "dense", "block_shock_torch": "torch"}


def over_floor(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a (case, way), smallest case first: CASE columns, `size`, `method`, `way`, `median`, `p10`, `p90` and
    `floor` in ms, and `over` = median / floor.

    The floor is the larger of the method's FLOP over the measured GEMM rate and its bytes over the measured copy
    bandwidth.
    """
    frame = cells.complete(frame)
    rows = frame[frame["metric"].isin(["check", "compute_kernel", "product_by_kernel", "floor_compute"])]
    found = [_times(rows[rows["method"].eq(method)], "compute_kernel", way) for method, way in _ALONE.items()]
    ours = rows[rows["method"].eq(OURS)]
    each = [_times(ours, "product_by_kernel", way) for way in WAYS]
    told = pd.concat(each)["case"] if any(len(one) for one in each) else ours.iloc[:0]["case"]
    rest = ours[~ours["case"].isin(told)]
    found += each + [_times(rest, "compute_kernel", way) for way in WAYS]
    table = pd.concat([one for one in found if len(one)] or found[:1])
    floors = cells.summary(rows, "floor_compute")[["case", "method", "median"]].rename(columns={"median": "floor"})
    table = table.merge(floors, on=["case", "method"], how="inner")
    table["over"] = table["median"].astype(float) / table["floor"].astype(float)
    order = {way: place for place, way in enumerate(WAYS)}
    table = table.sort_values(["size", "batch", "way"], key=lambda c: c.map(order) if c.name == "way" else c)
    return table.reset_index(drop=True)


def _times(rows: pd.DataFrame, metric: str, way: str) -> pd.DataFrame:
    """The summary of `metric` in the rows whose detail is `way`; a method that has one way may leave it out."""
    alone = rows["method"].isin(_ALONE)
    mine = rows["metric"].ne(metric) | rows["detail"].eq(way) | alone
    return cells.summary(rows[mine], metric).assign(way=way)
