"""Time against the size, one method's speed over another's on (y, size), and the checks that each method passed."""

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes as Subplot
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from blockshock_lib.report import answer, figures, frames, verdicts
from blockshock_lib.report.axes import Axes
from blockshock_lib.report.figures import FAINT, INK, milliseconds
from blockshock_lib.report.verdicts import FASTER, NO_CLAIM, SLOWER, UNDECIDED

# Orange to blue is told apart with any common colour blindness; both ends are equally far from white.
_SLOW_FAST = LinearSegmentedColormap.from_list("slow_fast", ["#D55E00", "#F3B98E", "#FFFFFF", "#8FBCE0", "#0072B2"])
_GREY = LinearSegmentedColormap.from_list("grey", ["#F0F0F0"] * 2)


def time_vs_n(frame: pd.DataFrame, axes: Axes, metric: str = "") -> Figure:
    """Median time (log) of one setting against the size (log2), p10 to p90 as a band: a panel a value of `axes.y` (and
    of `axes.panels`), a line a method. `metric` "": kernel time of the narrowest work.
    """
    metric = frames.time_metric(frame, metric or f"{axes.stem}_kernel")
    chosen, setting = frames.focus(frame, axes, axes.panels, [metric])
    table, size = frames.summary(chosen, axes, metric), axes.header("size")
    if table.empty:
        return figures.empty(f"Time against {size}", f"no valid {metric.replace('_', ' ')} in these records")
    name, stem = frames.time_name(table, axes, metric), metric.rpartition("_")[0]
    work = axes.times[stem].words if stem in axes.times else stem.replace("_", " ")
    table["panel"], panels = frames.panels(table, axes)
    places = [(panel, y) for panel in panels for y in sorted(table[axes.y].unique())]
    methods, sizes = axes.ordered(table["method"]), sorted(table["size"].unique())
    columns = 2 if len(places) == 4 else min(3, len(places))
    height = -(-len(places) // columns)
    cell = frames.largest(table, axes)
    times = ", ".join(f"{axes.label(m)} {milliseconds(cell.loc[m, 'median'])}" for m in methods if m in cell.index)
    with figures.drawing(
        max(5.1, 3.4 * columns),
        2.75 * height + 0.5,
        f"Time of {work} against {size}",
        *(frames.no_claim(table), setting, "line: median, band: p10 to p90, slowest rank; scales differ"),
        alt=f"Lines of {name} against {size}, one panel a {axes.header(axes.y)}. "
        f"At {frames.where(cell.iloc[0], axes)}: {times}.",
        rows=height,
        columns=columns,
    ) as (fig, grid):
        grid = grid.ravel()
        for place, (ax, (panel, y)) in enumerate(zip(grid, places, strict=False)):
            _time_panel(ax, table[table["panel"].eq(panel) & table[axes.y].eq(y)], axes, methods, sizes)
            ax.set_title(", ".join(filter(None, [panel, f"{axes.header(axes.y)} = {y}"])))
            if place + columns >= len(places):
                ax.set_xlabel(axes.size_name(table))
            if place % columns == 0:
                ax.set_ylabel(name)
        for ax in grid[len(places) :]:
            ax.set_axis_off()
        handles = [grid[0].plot([], [], **_line(method, axes), label=axes.label(method))[0] for method in methods]
        fig.legend(handles=handles, loc="outside lower center", ncols=columns + 1, fontsize=9, handlelength=2.6)
    return fig


def _line(method: str, axes: Axes) -> dict:
    # The two that the question is about lie broad below; the thin ones on top stay visible where they coincide.
    look, lead = axes.look(method), method in (axes.over, axes.under)
    how = dict(linewidth=2.6, markersize=7.5, zorder=3) if lead else dict(linewidth=1.1, markersize=4.5, zorder=4)
    return how | dict(color=look.colour, marker=look.marker, markeredgecolor="white", markeredgewidth=0.6)


def _time_panel(ax: Subplot, panel: pd.DataFrame, axes: Axes, methods: list, sizes: list) -> None:
    for method in methods:
        line = panel[panel["method"].eq(method)].sort_values("size")
        if len(line):
            look = _line(method, axes)
            ax.fill_between(line["size"], line["p10"], line["p90"], color=look["color"], alpha=0.22, linewidth=0)
            ax.plot(line["size"], line["median"], **look)
    ax.grid(True, axis="y")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
    ax.set_xlim(sizes[0] / 1.12, sizes[-1] * 1.12)
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(milliseconds))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())


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
