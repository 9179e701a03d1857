"""A number in each field: one method's speed over another's on (y, size), and the checks that each method passed."""

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes as Subplot
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from blockshock_lib.report import answer, figures, frames, verdicts
from blockshock_lib.report.axes import Axes
from blockshock_lib.report.figures import FAINT, INK
from blockshock_lib.report.verdicts import FASTER, NO_CLAIM, SLOWER, UNDECIDED

# Orange to blue is told apart with any common colour blindness; both ends are equally far from white.
_SLOW_FAST = LinearSegmentedColormap.from_list("slow_fast", ["#D55E00", "#F3B98E", "#FFFFFF", "#8FBCE0", "#0072B2"])
_GREY = LinearSegmentedColormap.from_list("grey", ["#F0F0F0"] * 2)


def ratio_heatmap(frame: pd.DataFrame, axes: Axes, over: str = "", under: str = "", metric: str = "") -> Figure:
    """Speed of `under` over `over` (those of the axes) on (size, y), a panel for each of `axes.panels`; kernel time of
    the narrowest work. Only cells whose interval excludes 1 get colour: blue faster, orange slower.
    """
    over, under = over or axes.over, under or axes.under
    metric = frames.time_metric(frame, metric or f"{axes.stem}_kernel")
    chosen, setting = frames.focus(frame, axes, axes.panels, [metric])
    table = verdicts.ratio(chosen, axes, over, under, metric)
    names = axes.label(under), axes.label(over)
    if table.empty:
        return figures.empty(f"{names[0]} against {names[1]}", "no case holds valid times of both")
    rows = table.to_dict("records")
    table["column"], (table["panel"], panels) = axes.x_text(table), frames.panels(table, axes)
    columns, ys = list(dict.fromkeys(table["column"])), sorted(table[axes.y].unique(), reverse=True)
    spoken = table["outcome"].ne(NO_CLAIM).any()
    with figures.drawing(
        max(5.6, 1.4 + 1.45 * len(columns) * len(panels)),
        0.9 + 0.62 * len(ys),
        f"Is {names[0]} faster? {answer.counted(table, names[1])}",
        *(frames.no_claim(table), setting, frames.time_name(table, axes, metric)),
        alt=" ".join(f"{frames.where(row, axes)}: {verdicts.interval_text(row)}." for row in rows),
        note=f"Number: t({names[1]}) / t({names[0]}), above 1 where {names[0]} is faster; below it the 99% interval"
        + (". Hatched: the interval holds 1." if spoken else ". Grey: no claim."),
        columns=len(panels),
    ) as (fig, grid):
        for ax, panel in zip(grid[0], panels, strict=True):
            _heat_panel(ax, table[table["panel"].eq(panel)], axes, columns, ys, spoken)
            ax.set_title(panel)
            ax.set_xlabel(axes.x_name(table))
        grid[0, 0].set_ylabel(axes.y_name())
    return fig


def _heat_panel(ax: Subplot, table: pd.DataFrame, axes: Axes, columns: list[str], ys: list, spoken: bool) -> None:
    claimed = table.assign(ratio=table["ratio"].where(table["outcome"].isin([FASTER, SLOWER]), 1.0))
    colours = claimed.pivot(index=axes.y, columns="column", values="ratio").reindex(index=ys, columns=columns)
    scale = dict(cmap=_SLOW_FAST if spoken else _GREY, vmin=-1.5, vmax=1.5, cbar=False)
    sns.heatmap(np.log2(colours.astype(float)), ax=ax, linewidths=2, linecolor="white", **scale)
    for row in table.to_dict("records"):
        x, y = columns.index(row["column"]), ys.index(row[axes.y])
        # Blue is the darker end: ink on it is hard to read.
        ink = "white" if row["outcome"] == FASTER and np.log2(row["ratio"]) > 0.9 else INK
        look = dict(color=ink, ha="center", va="center")
        if row["outcome"] == UNDECIDED:
            hatched = dict(facecolor="white", edgecolor=FAINT, hatch="////", lw=0)
            ax.add_patch(Rectangle((x + 0.02, y + 0.03), 0.96, 0.94, **hatched))
            look["path_effects"] = [withStroke(linewidth=3, foreground="white")]
        ratio, _, interval = verdicts.interval_text(row).partition(" ")
        ax.text(x + 0.5, y + 0.36, ratio.replace("x", "×"), fontsize=11, fontweight="bold", **look)
        ax.text(x + 0.5, y + 0.71, interval, fontsize=8, **look)
    ax.set(xlabel="", ylabel="")
    ax.set_yticklabels(ys, rotation=0)
    ax.tick_params(length=0)


_FILL = {"passed": "#CFE8F5", "unsupported": "#EEEEEE", "wrong": "#D55E00"}  # blue, grey, orange: told apart by all


def check_matrix(frame: pd.DataFrame, axes: Axes) -> Figure:
    """Passed of asked checks, a row a method, a column a value of the first of `axes.rows`."""
    rows, column = frames.checks(frame), axes.rows[0]
    if rows.empty:
        return figures.empty("Checks", "nothing was checked")
    methods, values = axes.ordered(rows["method"]), axes.sort(column, rows[column])
    count = rows.groupby(["method", column, "outcome"]).size().unstack(fill_value=0)
    count = count.reindex(columns=list(frames.OUTCOMES), fill_value=0)
    count["wrong"], count["asked"] = count[["timeout", "oom", "failed"]].sum(axis=1), count.sum(axis=1)
    wrong, passed, asked = (int(count[name].sum()) for name in ("wrong", "passed", "asked"))
    title = f"{wrong} of {asked} checks did not pass" if wrong else f"{passed} of {asked} checks passed, none failed"
    cells = [f"{axes.label(m)}, {value}: {n.passed}/{n.asked}." for (m, value), n in count.iterrows()]
    alt = f"Passed of asked: {' '.join(cells)}"
    with figures.drawing(2.0 + 0.78 * max(3, len(values)), 0.7 + 0.3 * len(methods), title, alt=alt) as (fig, grid):
        ax = grid[0, 0]
        for (method, value), field in count.iterrows():
            x, y = values.index(value), methods.index(method)
            kind = "wrong" if field["wrong"] else "passed" if field["passed"] else "unsupported"
            ax.add_patch(Rectangle((x + 0.02, y + 0.04), 0.96, 0.92, facecolor=_FILL[kind], lw=0))
            text = f"{field['passed']}/{field['asked']}"
            ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8.5, color=INK)
        ax.set(xlim=(0, len(values)), ylim=(len(methods), 0))
        ax.set_xticks(np.arange(len(values)) + 0.5, [str(value).replace("_", "\n") for value in values], fontsize=7.5)
        ax.set_yticks(np.arange(len(methods)) + 0.5, [axes.label(method) for method in methods])
        ax.tick_params(length=0)
        ax.spines[:].set(visible=True, color=FAINT)
    return fig
