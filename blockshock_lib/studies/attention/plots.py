"""Figures of the speed of block-sparse attention: time over density with its law, and the share of the dense rate."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from blockshock_lib.report import figures, frames
from blockshock_lib.report.figures import INK, MUTED, milliseconds
from blockshock_lib.studies.attention import law
from blockshock_lib.studies.attention.axes import AXES
from blockshock_lib.studies.attention.law import RIVALS
from blockshock_lib.studies.attention.report import WORKS, even_text, shares

_DASHED = (0, (4, 3))
_MOST = 6  # panels


def time_over_density(frame: pd.DataFrame, work: str = "forward") -> Figure:
    """Time of one setting over the measured density of random blocks, both log, a panel a length: points as measured,
    lines by the law, the best dense kernel as a level, and d* of the kernel that has the largest.
    """
    metric = frames.time_metric(frame, f"{work}_kernel")
    chosen, setting = frames.focus(frame, AXES, metrics=(metric, "block_density"))
    table, laws = law.cells(chosen, metric), law.laws(chosen, work)
    title = f"Time of a {work} over density"
    if laws.empty:
        return figures.empty(title, "no length has two densities of random blocks and a dense time")
    lengths, best = sorted(laws["k_len"].unique())[-_MOST:], law.fastest(laws)
    evens = {k: (m, one) for k, m, one in zip(best["k_len"], best["method"], best["law"], strict=True)}
    no_claim, last = frames.no_claim(table), evens[lengths[-1]]
    if not no_claim and last[1].even.low > 0:
        where = "at every density measured" if last[1].even.low >= 1 else f"up to a density of {even_text(last[1])}"
        title = f"At {lengths[-1]} keys a {work} beats the best dense kernel {where}"
    columns = min(3, len(lengths))
    words = [f"{k} keys: d* = {even_text(even)} of {AXES.label(method)}." for k, (method, even) in evens.items()]
    with figures.drawing(
        *(2.2 + 3.2 * columns, 2.8 * -(-len(lengths) // columns) + 0.5),
        *(title, no_claim, setting, frames.time_name(table, AXES, metric)),
        alt=f"Lines of time over density, a panel a length. {' '.join(words)}",
        note="Points: medians, at the density as measured. Dashed: slope x density + overhead. Level: the best dense "
        "kernel, whatever the density. d*: where the law crosses it, with its 99% interval.",
        rows=-(-len(lengths) // columns),
        columns=columns,
    ) as (fig, grid):
        for ax, length in zip(grid.ravel(), lengths, strict=False):
            _panel(ax, table[table["k_len"].eq(length)], laws[laws["k_len"].eq(length)])
            ax.set_title(f"{length} keys, d* {even_text(evens[length][1])}")
            ax.set_xlabel("blocks visited (share)")
        for ax in grid.ravel()[len(lengths) :]:
            ax.set_axis_off()
        figures.legend(grid[0, -1], {AXES.label(method): AXES.line(method) for method in AXES.ordered(table["method"])})
    return fig


def _panel(ax: Axes, table: pd.DataFrame, laws: pd.DataFrame) -> None:
    along = np.geomspace(table["density"].min(), table["density"].max(), 60)
    for method in AXES.ordered(table["method"]):
        own, look = table[table["method"].eq(method)], AXES.line(method)
        if method in RIVALS:
            ax.plot(own["density"], own["median"], **look | dict(markersize=3))
            continue
        ax.plot(own["density"], own["median"], **look | dict(linestyle="", zorder=3))
        for one in laws.loc[laws["method"].eq(method), "law"]:
            ax.plot(along, one.slope * along + one.overhead, color=look["color"], linewidth=1, linestyle=_DASHED)
    ax.set(xscale="log", yscale="log")
    ticks = [tick for tick in (0.02, 0.05, 0.1, 0.25, 0.5, 1) if along[0] / 1.1 <= tick <= along[-1] * 1.1]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(milliseconds))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    ax.grid(True, axis="y")


def share_of_dense(frame: pd.DataFrame) -> Figure:
    """FLOPs a second over visited blocks as a share of the best dense kernel's, a line a pattern, a panel a work, at
    the length of the setting that has the most patterns, the longest of equals.
    """
    title, metric = "Share of the best dense kernel", frames.time_metric(frame, "forward_kernel")
    kind = metric.rpartition("_")[2]
    works = {work: f"{work}_{kind}" for work in WORKS}
    chosen, setting = frames.focus(frame, AXES, metrics=(*works.values(), "flops"))
    tables = {work: shares(chosen, name) for work, name in works.items()}
    table = tables["forward"]
    if table["method"].nunique() < 2:
        return figures.empty(title, "no case holds valid times of a kernel that takes lists and of the dense one")
    counts = table.groupby("k_len")["pattern"].nunique()
    length = counts[counts.eq(counts.max())].index.max()
    tables = {work: part[part["k_len"].eq(length)] for work, part in tables.items()}
    table = tables["forward"]
    patterns, methods = list(dict.fromkeys(table["pattern"]))[::-1], law.sparse(table)
    best = table[table["method"].isin(methods)].groupby("pattern")["share"].max().reindex(patterns[::-1])
    no_claim = frames.no_claim(table)
    if not no_claim:
        title = f"Kernels that take lists reach {best.min():.0%} to {best.max():.0%} of the best dense kernel's rate"
    with figures.drawing(
        *(8.6, 0.9 + 0.3 * len(patterns), title, no_claim, setting, f"{length} keys, {kind} time"),
        alt=" ".join(f"{name}: {value:.0%} at best." for name, value in best.items()),
        note="Rate: FLOPs of visited blocks a second. The dense kernel computes the least dense attention that holds "
        "the pattern, causal or full. 100%: a block takes as long as one of its own.",
        columns=len(works),
        sharey=True,
    ) as (fig, grid):
        for ax, (work, part) in zip(grid[0], tables.items(), strict=True):
            for method in methods:
                own = part[part["method"].eq(method)].set_index("pattern")["share"].reindex(patterns)
                ax.plot(own, range(len(patterns)), **AXES.line(method) | dict(linestyle=""))
            ax.axvline(1, color=INK, linewidth=1, linestyle=_DASHED)
            ax.set_xlim(left=0)
            ax.set_title(work)
            ax.set_xlabel("share of the dense rate")
            ax.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
            ax.grid(True, axis="x", color=MUTED, alpha=0.2)
        figures.lines(grid[0, 0], patterns)
        figures.legend(grid[0, -1], {AXES.label(method): AXES.line(method) | dict(linestyle="") for method in methods})
    return fig
