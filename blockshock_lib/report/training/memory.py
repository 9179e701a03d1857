"""Memory of a training step by its parts, measured against the formula: a table and a figure."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from blockshock_lib.report import cells, figures, labels
from blockshock_lib.report.figures import INK
from blockshock_lib.report.machine_plots import byte_text
from blockshock_lib.report.tables import ABSENT, rounded

# Part -> metric, face, hatch: told apart by lightness and hatch too.
PARTS = {
    "weights": ("weights_bytes_held", "#0072B2", ""),
    "packed copies": ("copies_bytes", "#56B4E9", "////"),
    "gradients": ("gradient_bytes", "#E69F00", ""),
    "optimizer state": ("optimizer_bytes", "#F0D9A8", "...."),
    "activations": ("activation_bytes", "#009E73", "\\\\\\\\"),
}
_PEAK = "peak_bytes"
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def memory_parts(frame: pd.DataFrame) -> pd.DataFrame:
    """Bytes on the fullest GPU (or process), a row a (case, method): a column a metric of PARTS and the peak, and each
    one's `_formula`; NaN where it was not measured.
    """
    metrics = [metric for metric, _, _ in PARTS.values()] + [_PEAK]
    metrics += [f"{metric}_formula" for metric in metrics]
    rows = cells.valid(frame)
    rows = rows[rows["metric"].isin(metrics)]
    wide = rows.pivot_table(index=["case", "method"], columns="metric", values="value", aggfunc="max", observed=True)
    about = rows.drop_duplicates("case")[cells.CASE]
    table = about.merge(wide.reindex(columns=metrics).reset_index(), on="case", how="right")
    order = {name: i for i, name in enumerate([*labels.OPTIMIZERS, *labels.methods_in(table["method"])])}
    table = table.assign(size=cells.size(table), a=table["optimizer"].map(order), b=table["method"].map(order))
    return table.sort_values(["size", "batch", "a", "case", "b"], kind="stable").reset_index(drop=True)


def training_memory_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Memory of a training step by part, a row a (case, method), in the unit that the header names, four digits.

    A part further than 0.05% from its formula carries its deviation; "off (%)" = 100 * (peak / formula - 1).
    """
    table = memory_parts(frame)
    parts = {name: metric for name, (metric, _, _) in PARTS.items() if table[metric].notna().any()}
    if table.empty or not parts:
        return pd.DataFrame()
    scale, unit = _unit(table[[*parts.values(), f"{_PEAK}_formula"]].to_numpy(dtype=float))
    shown = pd.DataFrame({"shape": table["shape"], "B": table["batch"]})
    for name in cells.FOCUS:
        if table[name].nunique() > 1:
            shown[name] = table[name].map(labels.optimizer) if name == "optimizer" else table[name]
    shown["method"] = table["method"].map(labels.label)
    for name, metric in parts.items():
        pairs = zip(table[metric], table[f"{metric}_formula"], strict=True)
        shown[f"{name} ({unit})"] = [_part_text(value, formula, scale) for value, formula in pairs]
    peak, formula = table[_PEAK], table[f"{_PEAK}_formula"]
    shown[f"peak ({unit})"], shown[f"peak by formula ({unit})"] = rounded(peak / scale), rounded(formula / scale)
    shown["off (%)"] = (100 * (peak / formula - 1)).round(1)
    return shown


def _part_text(value: float, formula: float, scale: float) -> str:
    if pd.isna(value):
        return ABSENT
    text = f"{round(value / scale, 5):.4g}"  # a pattern of a few bytes is nothing beside MiB
    if pd.isna(formula) or abs(value - formula) <= 5e-4 * formula or (not formula and text == "0"):
        return text
    return f"{text} ({100 * (value / formula - 1):+.1f}%)" if formula else f"{text} (formula: 0)"


def _unit(values: np.ndarray) -> tuple[int, str]:
    most = np.nanmax(values)
    return next(((size, name) for size, name in _UNITS if most >= size), (1, "B"))


def training_memory(frame: pd.DataFrame) -> Figure:
    """What a training step holds by part, a bar a method, a panel an optimizer; the largest case of each. The formula's
    peak is a black tick, the measured one a ring.
    """
    chosen, setting = cells.focus(frame, panels=("optimizer",)) if len(frame) else (frame, "")
    table = memory_parts(chosen)
    parts = {name: look for name, look in PARTS.items() if table[look[0]].notna().any()}
    if table.empty or not parts:
        return figures.empty("Memory of a training step", "no valid memory of a step in these records")
    work = table["size"] * table["batch"].astype(float)
    table = table[np.isclose(work, work.groupby(table["optimizer"]).transform("max"))]
    table = table.drop_duplicates(["optimizer", "method"])
    scale, unit = _unit(table[[_PEAK, f"{_PEAK}_formula"]].to_numpy(dtype=float))
    sums = table[[metric for metric, _, _ in parts.values()]].sum(axis=1)
    most = np.nanmax([sums, table[_PEAK].astype(float), table[f"{_PEAK}_formula"].astype(float)])
    panels = labels.ordered(table["optimizer"], labels.OPTIMIZERS)
    methods = labels.methods_in(table["method"])[::-1]
    with figures.theme():
        fig = figures.canvas(
            1.9 + 3.6 * len(panels),
            0.95 + 0.34 * len(methods),
            _title(table),
            figures.subtitle(cells.no_claim(table), setting, "fullest rank, each method alone"),
            _alt(table, parts),
        )
        axes = fig.subplots(1, len(panels), squeeze=False, sharey=True, sharex=True)[0]
        for ax, optimizer in zip(axes, panels, strict=True):
            rows = table[table["optimizer"].eq(optimizer)].set_index("method").reindex(methods)
            first = rows.dropna(subset=["case"]).iloc[0]
            ax.set_title(
                ", ".join(filter(None, [labels.optimizer(optimizer), first["shape"], f"B={first['batch']:g}"]))
            )
            start = np.zeros(len(methods))
            for metric, face, hatch in parts.values():
                width = rows[metric].astype(float).fillna(0).to_numpy() / scale
                look = dict(color=face, hatch=hatch, edgecolor="white", linewidth=0.4, height=0.68)
                ax.barh(range(len(methods)), width, left=start, **look)
                start = start + width
            tick, ring = (rows[name].astype(float) / scale for name in (f"{_PEAK}_formula", _PEAK))
            ax.plot(tick, range(len(methods)), color=INK, marker="|", markersize=13, markeredgewidth=2, linestyle="")
            ax.plot(ring, range(len(methods)), color=INK, marker="o", markersize=5, markerfacecolor="white", ls="")
            ax.set_yticks(range(len(methods)), [labels.label(method) for method in methods])
            ax.set_xlabel(f"{unit} on the fullest rank")
            ax.set_xlim(0, 1.05 * most / scale)
            ax.tick_params(axis="y", length=0)
            ax.spines["left"].set_visible(False)
            ax.grid(True, axis="x")
        keys: list = [Patch(facecolor=f, hatch=h, edgecolor="white", label=name) for name, (_, f, h) in parts.items()]
        marks = dict(color=INK, linestyle="")
        keys.append(Line2D([], [], marker="|", markersize=11, markeredgewidth=2, label="peak by formula", **marks))
        if table[_PEAK].notna().any():
            keys.append(
                Line2D([], [], marker="o", markersize=5, markerfacecolor="white", label="peak measured", **marks)
            )
        fig.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=8.5)
    return fig


def _title(table: pd.DataFrame) -> str:
    off = (table[_PEAK] / table[f"{_PEAK}_formula"] - 1).abs().max()
    if pd.isna(off):
        return "What a training step holds, by the formula and from its tensors"
    return f"The measured peak of a training step is within {100 * off:.1f}% of the formula"


def _alt(table: pd.DataFrame, parts: dict) -> str:
    said = []
    for row in table.to_dict("records"):
        words = [f"{name} {byte_text(row[look[0]])}" for name, look in parts.items() if row[look[0]] > 0]
        words.append(f"peak by formula {byte_text(row[f'{_PEAK}_formula'])}")
        who = " with ".join(filter(None, [labels.label(row["method"]), labels.optimizer(row["optimizer"])]))
        said.append(f"{who}: {', '.join(words)}.")
    return f"Stacked bars of bytes. {' '.join(said)}"
