"""Figures of time against the size."""

import matplotlib.axes
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from blockshock_lib.report import figures, frames
from blockshock_lib.report.axes import Axes
from blockshock_lib.report.figures import milliseconds


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


def _time_panel(ax: matplotlib.axes.Axes, panel: pd.DataFrame, axes: Axes, methods: list, sizes: list) -> None:
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
