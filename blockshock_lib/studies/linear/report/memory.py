"""Memory of a training step by its parts, measured against the formula: a table and a figure."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from blockshock_lib.report import figures, frames, machine_plots
from blockshock_lib.report.figures import INK, byte_text
from blockshock_lib.report.tables import ABSENT, rounded
from blockshock_lib.studies.linear.axes import AXES, optimizer_name
from blockshock_lib.studies.linear.methods.method import FORMULAS
from blockshock_lib.studies.linear.report import bars, build
from blockshock_lib.studies.linear.report.build import B1, OURS, A

_LOOKS = {
    "weights": ("#0072B2", ""),
    "packed copies": ("#56B4E9", "////"),
    "gradients": ("#E69F00", ""),
    "optimizer state": ("#F0D9A8", "...."),
    "activations": ("#009E73", "\\\\\\\\"),
}
PARTS = dict(zip(_LOOKS, FORMULAS, strict=True))  # part -> metric; both in the order of a step's bytes
_PEAK = ["peak", "peak by formula"]


def memory_parts(frame: pd.DataFrame) -> pd.DataFrame:
    """Bytes on the fullest rank or NaN, a row a (case, method): each of PARTS, the "peak", and each " by formula"."""
    metrics = {metric: name for name, metric in (PARTS | {"peak": "peak_bytes"}).items()}
    metrics |= {f"{metric}_formula": f"{name} by formula" for metric, name in metrics.items()}
    rows = frames.valid(frames.complete(frame, AXES))
    rows = rows[rows["metric"].isin(list(metrics))]
    wide = rows.pivot_table(index=build.KEYS, columns="metric", values="value", aggfunc="max", observed=True)
    wide = wide.reindex(columns=list(metrics)).rename(columns=metrics).reset_index()
    table = rows.drop_duplicates("case")[AXES.case_columns].merge(wide, on="case", how="right")
    return build.in_order(table.assign(size=AXES.size(table)), "size", "batch", "optimizer", "case", "method")


def training_memory_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a (case, method), in the unit that the header names, four digits; a part more than 0.05% off its formula
    carries its deviation; "off (%)" = 100 * (peak / formula - 1).
    """
    table = memory_parts(frame)
    parts = [name for name in PARTS if table[name].notna().any()]
    if not parts:
        return pd.DataFrame()
    (scale, unit), columns = _unit(table[[*parts, "peak by formula"]]), {}
    for name in parts:
        pairs = zip(table[name], table[f"{name} by formula"], strict=True)
        columns[f"{name} ({unit})"] = [_part_text(value, formula, scale) for value, formula in pairs]
    columns |= {f"{name} ({unit})": rounded(table[name] / scale) for name in _PEAK}
    columns["off (%)"] = (100 * (table["peak"] / table["peak by formula"] - 1)).round(1)
    return build.shown(table, columns)


def _part_text(value: float, formula: float, scale: float) -> str:
    if pd.isna(value):
        return ABSENT
    text = f"{round(value / scale, 5):.4g}"  # a pattern of a few bytes is nothing beside MiB
    if pd.isna(formula) or abs(value - formula) <= 5e-4 * formula or (not formula and text == "0"):
        return text
    return f"{text} ({100 * (value / formula - 1):+.1f}%)" if formula else f"{text} (formula: 0)"


def _unit(values: pd.DataFrame) -> tuple[int, str]:
    most = np.nanmax(values.to_numpy(dtype=float))
    units = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next((one for one in units if most >= one[0]), (1, "B"))


def training_memory(frame: pd.DataFrame) -> Figure:
    """What a training step holds by part, a bar a method, a panel an optimizer; the largest case of each."""
    chosen, setting = frames.focus(frame, AXES, panels=("optimizer",))
    table = memory_parts(chosen)
    looks = {name: look for name, look in _LOOKS.items() if table[name].notna().any()}
    if not looks:
        return figures.empty("Memory of a training step", "no valid memory of a step in these records")
    table = build.largest(table).drop_duplicates(["optimizer", "method"])
    scale, unit = _unit(table[_PEAK])
    most = np.nanmax([table[list(looks)].sum(axis=1), *(table[name].astype(float) for name in _PEAK)])
    panels, methods = AXES.sort("optimizer", table["optimizer"]), AXES.ordered(table["method"])[::-1]
    off, told = (table["peak"] / table["peak by formula"] - 1).abs().max(), []
    for row in table.to_dict("records"):
        parts = [f"{name} {byte_text(row[name])}" for name in (*looks, "peak by formula") if row[name] > 0]
        told.append(f"{build.who(row)}: {', '.join(parts)}.")
    title = "What a training step holds, by the formula and from its tensors"
    if pd.notna(off):
        title = f"The measured peak of a training step is within {100 * off:.1f}% of the formula"
    black = dict(color=INK, linestyle="")
    tick = black | dict(marker="|", markeredgewidth=2)
    ring = black | dict(marker="o", markersize=5, markerfacecolor="white")
    with figures.drawing(
        *(1.9 + 3.6 * len(panels), 0.95 + 0.34 * len(methods), title),
        *(frames.no_claim(table), setting, "fullest rank, each method alone"),
        alt=f"Stacked bars of bytes. {' '.join(told)}",
        columns=len(panels),
        sharey=True,
        sharex=True,
    ) as (fig, grid):
        for ax, optimizer in zip(grid[0], panels, strict=True):
            rows = table[table["optimizer"].eq(optimizer)].set_index("method").reindex(methods)
            first = rows.dropna(subset=["case"]).iloc[0]
            ax.set_title(build.listed(optimizer_name(optimizer), first["shape"], f"B={first['batch']:g}"))
            rows = rows[[*looks, *_PEAK]].astype(float) / scale
            bars.stack(ax, rows, looks, 0.68)
            ax.plot(rows["peak by formula"], range(len(rows)), markersize=13, **tick)
            ax.plot(rows["peak"], range(len(rows)), **ring)
            figures.lines(ax, [AXES.label(method) for method in methods])
            ax.grid(True, axis="x")
            ax.set_xlabel(f"{unit} on the fullest rank")
            ax.set_xlim(0, 1.05 * most / scale)
        keys = [*bars.swatches(looks), Line2D([], [], markersize=11, label="peak by formula", **tick)]
        keys += [Line2D([], [], label="peak measured", **ring)] if table["peak"].notna().any() else []
        fig.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=8.5)
    return fig


def memory_bars(frame: pd.DataFrame) -> Figure:
    """Bytes of weights and peak on the fullest GPU, a bar a method, the formula as a black tick; the largest case."""

    def title(wide: pd.DataFrame, case: pd.Series) -> tuple[str, Mapping[str, str]]:
        work = {"phase2": "pass", "phase3": "step"}.get(case["phase"], "forward")
        names = {"peak_bytes": f"Peak of {AXES.times[work].words}"}
        if work != "forward":  # what dX reads too is in the peak
            names["weight_bytes"] = "Weights of the forward"
        held = wide["weight_bytes"].reindex([OURS, A, B1])
        if not (held[OURS] > 0 and held[A] > 0):
            return "", names
        # In 2:4, dX is multiplied from a second packed copy as large as the first.
        rows = frame[frame["case"].eq(case["case"]) & frame["method"].eq(OURS)]
        twice = (rows["metric"].eq("dx_kernel") & rows["detail"].eq("2:4")).any()
        ours, whole = held[OURS] * (2 if twice else 1), held[A]
        words = f"Block-Shock holds {byte_text(ours)} of weights, {ours / whole:.4g} of dense's {byte_text(whole)}"
        words += f"; B1 holds {byte_text(held[B1])}" if held[B1] > 0 else ""
        return f"With the copy for dX, {words}" if twice else words, names

    return machine_plots.memory_bars(frame, AXES, {"weight_bytes": "Weights", "peak_bytes": ""}, title)
