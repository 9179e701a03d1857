"""What all tables of the study are made of: medians by case and method, ratios in words, rows in their order."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.tables import ABSENT, rounded
from blockshock_lib.studies.linear.axes import AXES, optimizer_name
from blockshock_lib.studies.linear.phases import LINES

A, B1, C, OURS = "dense", "row_parallel", "masked_dense", "block_shock"
T1, STOCK, D = "block_shock_recompress", "block_shock_torch", "permuted_dense"
KEYS = ["case", "method"]
OTHERS = (A, C, T1, D, "column_parallel", "folded_dense")  # of which the table of calls does not speak
PIECES = {
    "forward product": "compute",
    "forward collective": "reduce",
    "dX": "dx",
    "dX collective": "reduce_dx",
    "dW": "dw",
    "optimizer step": "optimizer",
    "re-mask": "remask",
    "compress": "compress",
    "refresh": "refresh",
}
"""Piece of a training step -> stem of its metrics, <stem>_kernel and floor_<stem>."""


def with_lines(frame: pd.DataFrame) -> pd.DataFrame:
    """`frame`, with each reference line that it holds as if it were a method. Not for what ranks methods."""
    rows = frames.complete(frame, AXES)
    b1, parts = rows[rows["method"].eq(B1)], [rows]
    for line, label in LINES.items():
        names = {f"forward_{line}_{kind}": f"forward_{kind}" for kind in ("kernel", "call")}
        names |= {f"{line}_error_rms": "error_rms"}
        if (own := b1["metric"].isin(list(names))).any():
            own |= b1["metric"].eq("check")
            parts.append(b1[own].assign(method=label, metric=b1.loc[own, "metric"].replace(names)))
    return pd.concat(parts, ignore_index=True) if parts[1:] else frame


def stacked(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Those that have rows, one below the other; the first of them where none has."""
    return pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)


def in_order(table: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Sorted by these columns; methods and optimizers as tables order them."""
    places = {"optimizer": {name: i for i, name in enumerate(AXES.words["optimizer"])}}
    places["method"] = AXES.place_of(table["method"]) if "method" in table else {}
    return table.sort_values(
        list(by), key=lambda c: c.map(places[c.name]).fillna(-1) if c.name in places else c, ignore_index=True
    )


def largest(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the largest case of each optimizer."""
    work = AXES.work(table).astype(float)
    return table[np.isclose(work, work.groupby(table["optimizer"]).transform("max"))]


def interval(row: Mapping, name: str = "") -> str:
    """The ratio `name` of a row, with `<name>_low` and `<name>_high`, in words; "" for ratio, low and high."""
    named = {"ratio": row[name], "low": row[f"{name}_low"], "high": row[f"{name}_high"]} if name else row
    return verdicts.interval_text(named)


def text(values: Iterable[float], form: str = "{:.3g}") -> list[str]:
    return [ABSENT if pd.isna(value) else form.format(value) for value in values]


def micro(ms: pd.Series) -> pd.Series:
    """ms as µs of three digits."""
    return rounded(1e3 * ms.astype(float), 3)


def listed(*words: str, by: str = ", ") -> str:
    return by.join(filter(None, words))


def about(table: pd.DataFrame) -> pd.DataFrame:
    """Shape and B, and the settings in which rows of `table` differ."""
    named = table.assign(B=table["batch"], optimizer=table["optimizer"].map(optimizer_name))
    return named[["shape", "B", *(name for name in AXES.all_settings if table[name].nunique() > 1)]]


def shown(table: pd.DataFrame, columns: Mapping[str, Iterable], method: bool = True) -> pd.DataFrame:
    """Rows in the order of size, B, optimizer and method: `about`, the method unless it is the same, `columns`."""
    table = in_order(table.assign(**columns), "size", "batch", "optimizer", "case", "method")
    found = about(table).assign(**{"method": table["method"].map(AXES.label)} if method else {})
    found = found.join(table[list(columns)])
    return found.fillna(dict.fromkeys((name for name in columns if table[name].dtype == object), ABSENT))


def nothing(frame: pd.DataFrame, what: str, why: str) -> pd.DataFrame:
    """One field that says that `what` was not measured: on a CPU `why`, elsewhere that the records hold none."""
    rows = frames.complete(frame, AXES)
    reason = why if len(rows) and rows["device"].eq("cpu").all() else "these records hold no valid row of it"
    return pd.DataFrame({what: [f"not measured: {reason}"]})
