"""The figure of "How close to the limit": each way of the product over its floor, against B."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from blockshock_lib.report import cells, figures
from blockshock_lib.report.figures import MUTED
from blockshock_lib.report.limit.products import WAYS, over_floor

TITLE = "How far each product is from its floor"
_TICKS = (1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)


def limit_figure(frame: pd.DataFrame) -> Figure:
    """Time over floor (log) against B (log2), one panel a weight's shape, one line a way of the product.

    Bars are p10 to p90. The dashed line at 1 is the floor, by ceilings that were measured in the same run.
    """
    chosen, setting = cells.focus(frame)
    table = over_floor(chosen)
    if table.empty:
        return figures.empty(TITLE, "no valid time of a product with a floor in these records")
    shapes = list(dict.fromkeys(table["shape"]))
    ways = [way for way in WAYS if table["way"].eq(way).any()]
    columns = min(4, len(shapes))
    height = -(-len(shapes) // columns)
    with figures.theme():
        fig = figures.canvas(
            max(6.0, 0.6 + 2.5 * columns),
            2.6 * height + 0.5,
            _claim(table) or TITLE,
            figures.subtitle(cells.no_claim(table), setting, "medians, slowest rank; bar: p10 to p90"),
            _alt(table, ways),
        )
        axes = fig.subplots(height, columns, squeeze=False, sharey=True).ravel()
        for place, (ax, shape) in enumerate(zip(axes, shapes, strict=False)):
            _panel(ax, table[table["shape"].eq(shape)], ways)
            square = shape.split("x")[0] == shape.split("x")[-1]
            ax.set_title(f"N = {shape.split('x')[0]}" if square else shape)
            ax.set_xlabel("B")
            if place % columns == 0:
                ax.set_ylabel("time / floor (lower is better)")
        for ax in axes[len(shapes) :]:
            ax.set_axis_off()
        top = table["over"].max()
        axes[0].set_ylim(min(0.9, 0.95 * table["over"].min()), 1.25 * top)
        axes[0].yaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if tick <= 1.25 * top]))
        axes[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        handles = [axes[0].plot([], [], **_look(way), label=WAYS[way].label)[0] for way in ways]
        figures.legend_below(fig, handles, 4, fontsize=8.5)
    return fig


def _look(way: str) -> dict:
    _, colour, marker = WAYS[way]
    return dict(color=colour, marker=marker, linewidth=1.6, markersize=7, markeredgecolor="white")


def _panel(ax: Axes, panel: pd.DataFrame, ways: list[str]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.axhline(1, color=MUTED, linewidth=1, linestyle="--", zorder=1)
    for way in ways:
        line = panel[panel["way"].eq(way)].sort_values("batch")
        floor = line["floor"].astype(float)
        ax.vlines(line["batch"].astype(float), line["p10"] / floor, line["p90"] / floor, color=WAYS[way].colour, lw=3)
        ax.plot(line["batch"].astype(float), line["over"], **_look(way))
    batches = sorted(panel["batch"].unique())
    ax.set_xticks(batches, [str(batch) for batch in batches])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_minor_locator(NullLocator())
    ax.grid(True, axis="y")


def _claim(table: pd.DataFrame) -> str:
    """How far the fastest of our ways and the stock op are from their floors over all cells; "" without a claim."""
    ours = table[table["way"].isin(["cslt", "small"])]
    stock = table[table["way"].eq("torch")]
    if cells.no_claim(table) or ours.empty or stock.empty:
        return ""
    best, stock = ours.groupby("case")["over"].min(), stock["over"]
    return (
        f"The faster 2:4 product takes {best.min():.3g} to {best.max():.3g} times its floor, "
        f"the stock op {stock.min():.3g} to {stock.max():.3g} times"
    )


def _alt(table: pd.DataFrame, ways: list[str]) -> str:
    said = []
    for shape, panel in table.groupby("shape", sort=False):
        lines = []
        for way in ways:
            line = panel[panel["way"].eq(way)].sort_values("batch")
            points = ", ".join(f"{row.over:.2f} at B={row.batch}" for row in line.itertuples())
            lines += [f"{WAYS[way].label} {points}"] * bool(points)
        said.append(f"{shape}: {'; '.join(lines)}.")
    return "Lines of time over floor against B, a panel a shape. " + " ".join(said)
