"""The rows of a comparison as text: for a page, a terminal and a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from blockshock_lib.report import cells, labels, tables, verdicts


def readable(rows: pd.DataFrame) -> pd.DataFrame:
    """`rows` of changes.compare as text, in their order, with those columns of a case that differ among them.

    "b / a" holds the interval where there is one; "groups" how many fresh groups of processes either run had.
    """
    table = rows[["outcome", "what"]].copy()
    table["method"] = rows["method"].map(labels.label)
    table["shape"], table["B"] = rows["shape"], rows["batch"]
    for name in ("phase", *cells.FOCUS):
        if rows[name].nunique() > 1:
            table[name] = rows[name]
    for name in "ab":
        table[f"run {name}"] = [_amount(value, unit) for value, unit in zip(rows[name], rows["unit"], strict=True)]
    table["b / a"] = [_ratio(row) for row in rows.to_dict("records")]
    counts = zip(rows["groups_a"], rows["groups_b"], strict=True)
    table["groups"] = [f"{a} and {b}" if a else tables.ABSENT for a, b in counts]
    table["note"] = rows["note"]
    return table


def told(row: Mapping[str, Any]) -> str:
    """One row in words: "kernel time of B1 row-parallel at 4096x4096, B=16: 1.10x [1.07, 1.13]"."""
    value = row["note"] if pd.isna(row["ratio"]) else _ratio(row)
    return f"{row['what']} of {labels.label(row['method'])} at {row['shape']}, B={row['batch']}: {value}"


def page(table: pd.DataFrame) -> str:
    """HTML of a readable table; what a record says stays text."""
    return table.to_html(index=False, escape=True, border=0)


def _ratio(row: Mapping[str, Any]) -> str:
    if pd.isna(row["ratio"]):
        return tables.ABSENT
    return f"{row['ratio']:.4f}x" if row["unit"] == "B" else verdicts.interval_text(row)


def _amount(value: float, unit: str) -> str:
    return tables.ABSENT if pd.isna(value) else f"{value:,.0f} B" if unit == "B" else f"{value:.4g} {unit}"
