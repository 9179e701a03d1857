"""Figures of the gallery: speed over dense against sparsity, the fastest by batch and sparsity, time over floor, tokens
a second.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from blockshock_lib.report import figures, frames, plots
from blockshock_lib.report.figures import INK, MUTED, PAPER
from blockshock_lib.studies.gallery import report
from blockshock_lib.studies.gallery.axes import AXES, TOKENS

_DASHED = (0, (4, 3))
_MOST = 6  # panels


def speed_over_dense(frame: pd.DataFrame) -> Figure:
    """Speed of each kernel over the best dense product against sparsity, both log, a panel a weight and batch; a cross
    where a line passes 1.
    """
    title, chosen, setting = "Speed over the best dense product", *frames.focus(frame, AXES)
    table = report.speeds(chosen)
    if table.empty:
        return figures.empty(title, "no case holds valid times of a pattern and of the best dense product")
    panels = table.groupby(["weight", "batch"], sort=False)["case"].nunique()
    places = sorted(panels.sort_values(ascending=False, kind="stable").index[:_MOST])
    no_claim = frames.no_claim(table)
    if not no_claim:
        wins = report.fastest(table)["outcome"].eq(report.FASTER)
        title = f"Some pattern beats the best dense product in {wins.sum()} of {len(wins)} places"
    more = f" ({len(panels) - _MOST} weights and batches not drawn)" if len(panels) > _MOST else ""
    columns = min(3, len(places))
    top = report.fastest(table, "weight", "batch").to_dict("records")
    top = [row for row in top if (row["weight"], row["batch"]) in places]
    ends = [f"{AXES.case(row)}: {row['ratio']:.2f}x by {AXES.short(row['method'])}." for row in top]
    with figures.drawing(
        *(2.4 + 3.0 * columns, 2.8 * -(-len(places) // columns) + 0.5),
        *(title, no_claim, setting + more, frames.time_name(table, AXES, table["metric"].iloc[0])),
        alt=f"Lines of speed over sparsity, a panel a weight and batch. The fastest: {' '.join(ends)}",
        note="Above the line at 1x a pattern is faster than the dense product of the whole weight. Of several sides of "
        "blocks the fastest is drawn. Cross: where a line passes 1x.",
        rows=-(-len(places) // columns),
        columns=columns,
        sharey=True,
    ) as (fig, grid):
        methods = AXES.ordered(table["method"])
        for ax, place in zip(grid.ravel(), places, strict=False):
            _panel(ax, table[table["weight"].eq(place[0]) & table["batch"].eq(place[1])], methods)
            ax.set_title(f"{place[0]}, B={place[1]}")
        for ax in grid.ravel()[len(places) :]:
            ax.set_axis_off()
        figures.legend(grid[0, -1], {AXES.label(method): AXES.line(method) for method in methods})
    return fig


def _panel(ax: Axes, table: pd.DataFrame, methods: list[str]) -> None:
    ticks = sorted(set(1 - table["sparsity"]))
    ax.set(xscale="log", yscale="log", xlim=(1.1 * ticks[-1], ticks[0] / 1.1))
    ax.axhline(1, color=INK, linewidth=1, linestyle=_DASHED)
    for method in methods:
        own = table[table["method"].eq(method)]
        if own.empty:
            continue
        own = report.fastest(own, "sparsity")
        kept = 1 - own["sparsity"]
        errors = np.maximum([own["ratio"] - own["low"], own["high"] - own["ratio"]], 0)
        errors = np.where(np.isfinite(errors) & (errors < own["ratio"].to_numpy()), errors, 0)
        ax.errorbar(kept, own["ratio"], yerr=errors, elinewidth=0.8, **AXES.line(method))
        if not np.isnan(at := report.crossing(own)):
            ax.plot([1 - at], [1], marker="x", color=AXES.look(method).colour, markersize=8, linestyle="")
    ax.set_xticks(ticks, [f"{1 - tick:.4g}" for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    _times(ax.yaxis)
    ax.set_xlabel("sparsity (share left out)")
    ax.grid(True, axis="y")


def _times(axis: Axis) -> None:
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axis.set_minor_locator(NullLocator())


def fastest(frame: pd.DataFrame) -> Figure:
    """The fastest pattern, by batch and sparsity, of the weight with the most cases; "dense" where none beats it."""
    title, chosen, setting = "The fastest pattern by batch and sparsity", *frames.focus(frame, AXES)
    table = report.speeds(chosen)
    if table.empty:
        return figures.empty(title, "no case holds valid times of a pattern and of the best dense product")
    weight = table.groupby("weight", sort=True)["case"].nunique().idxmax()
    best = report.fastest(table[table["weight"].eq(weight)], "sparsity", "batch")
    rows = best.sort_values("batch", kind="stable").to_dict("records")

    def text(row: dict) -> tuple:
        face = AXES.look(row["method"]).colour if row["outcome"] == report.FASTER else MUTED
        return AXES.short(row["method"]), f"{row['ratio']:.2f}x", (face, 0.35)

    return plots.cells(
        *(best, AXES, text, title, frames.no_claim(table), setting),
        *(f"weight {weight}", frames.time_name(table, AXES, table["metric"].iloc[0])),
        alt=" ".join(f"B={row['batch']}, {row['sparsity']:g}: {text(row)[0]} {text(row)[1]}." for row in rows),
        note="Speed over the best dense product. Grey: none is surely faster. Patterns of equal "
        "sparsity do not lose equally much.",
    )


def time_over_floor(frame: pd.DataFrame) -> Figure:
    """Times of a forward over its floor, log, a line a method, a point a case."""
    title, metric = "Time over the floor", frames.time_metric(frame, "forward_kernel")
    chosen, setting = frames.focus(frame, AXES, metrics=(metric, "floor_forward"))
    table = frames.medians(chosen, AXES, ms=metric, floor="floor_forward").dropna(subset=["ms", "floor"])
    if table.empty:
        return figures.empty(title, "no case holds valid times and the ceilings of its machine")
    table["over"] = table["ms"] / table["floor"]
    methods = AXES.ordered(table["method"])[::-1]
    middle = table.groupby("method")["over"].median()
    with figures.drawing(
        *(7.5, 0.8 + 0.3 * len(methods), title, frames.no_claim(table), setting, frames.time_name(table, AXES, metric)),
        alt=" ".join(f"{AXES.label(name)}: {middle[name]:.1f} times at the median." for name in methods[::-1]),
        note="Floor: the kept weights' arithmetic at the rate of a large dense product, or each operand moved once at "
        "the rate of a large copy, whichever takes longer; both measured in the same run.",
    ) as (fig, grid):
        ax = grid[0, 0]
        for y, method in enumerate(methods):
            own = table.loc[table["method"].eq(method), "over"]
            ax.plot(own, [y] * len(own), **AXES.line(method) | dict(linestyle=""))
        ax.axvline(1, color=INK, linewidth=1, linestyle=_DASHED)
        ax.set_xscale("log")
        ax.set_xlabel("time / floor")
        _times(ax.xaxis)
        figures.lines(ax, [AXES.label(method) for method in methods])
    return fig


def tokens(frame: pd.DataFrame) -> Figure:
    """Tokens a second of each model in a CUDA graph, a bar, and as called, a mark; a panel a context and batch."""
    title, chosen, setting = "Tokens a second", *frames.focus(frame, TOKENS)
    table = frames.medians(chosen, TOKENS, graph="token_kernel", call="token_call").dropna(subset=["graph"])
    if table.empty:
        return figures.empty(title, "no case holds valid times")
    if not (no_claim := frames.no_claim(table)):
        title = report.decoded(chosen).partition(" (")[0]
    rates = 1e3 * table[["graph", "call"]].rdiv(table["batch"].astype(float), axis=0)
    cells = [*table.assign(graph=rates["graph"], called=rates["call"]).groupby(["context", "batch"])][:_MOST]
    said = [
        f"{TOKENS.label(row.method)} {row.graph:.0f}{f' (called {row.called:.0f})' * (row.called > 0)} at B={batch}."
        for (_, batch), own in cells
        for row in own.itertuples()
    ]
    methods = TOKENS.ordered(table["method"])[::-1]
    with figures.drawing(
        *(3.0 + 2.6 * len(cells), 0.8 + 0.3 * len(methods), title, no_claim, setting),
        alt=" ".join(said),
        note="Bar and number: in a CUDA graph, on a CPU plain calls; white mark: as called. A greedy token a sequence.",
        columns=len(cells),
        sharey=True,
    ) as (fig, grid):
        for ax, ((context, batch), own) in zip(grid[0], cells, strict=True):
            for row in own.itertuples():
                y = methods.index(row.method)
                ax.barh(y, row.graph, color=TOKENS.look(row.method).colour, height=0.7)
                ax.plot(row.called, y, marker="o", color=PAPER, markeredgecolor=INK, markersize=5)
                ax.text(np.nanmax([row.graph, row.called]), y, f"  {row.graph:.0f}", va="center")
            ax.set(title=f"B={batch}, after {context} tokens", xlabel="tokens/s", xlim=(0, 1.15 * rates.max(axis=None)))
        figures.lines(grid[0, 0], [TOKENS.label(method) for method in methods])
    return fig
