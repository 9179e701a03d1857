"""Figures of attention over ranks: speed-up over length, where a step goes, and balance against bytes."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator

from blockshock_lib.report import figures, frames
from blockshock_lib.report.figures import INK, milliseconds
from blockshock_lib.studies.attention.axes import AXES
from blockshock_lib.studies.attention.methods import METHODS
from blockshock_lib.studies.attention.plots import _legend, _look
from blockshock_lib.studies.attention.scaling_hypotheses import speed
from blockshock_lib.studies.attention.scaling_report import PARTS, answer, parts

_COLOURS = dict(zip(PARTS, ("#3B6FA0", "#8FB4D9", "#882255", "#BBBBBB", "#E6A23C"), strict=True))
_METRICS = ("step_call", "step_kernel", "own_call", "moved_call", "merged_call", "balance", "sent_bytes")


def _setting(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    return frames.focus(frame, AXES, metrics=_METRICS)


def speed_up(frame: pd.DataFrame, over: str = "alone") -> Figure:
    """Speed of a step over one rank with the same kernel against length, a panel a pattern, a line a strategy."""
    title, (chosen, setting) = "What several ranks add to a step", _setting(frame)
    found = [speed(chosen, over, name).assign(method=name) for name, of in METHODS.items() if of.strategy]
    found = [one for one in found if len(one)]
    if not found:
        return figures.empty(title, "no case holds valid times of a strategy and of the same kernel on one rank")
    table = pd.concat(found, ignore_index=True)
    patterns, methods = list(dict.fromkeys(table["pattern"])), AXES.ordered(table["method"])
    no_claim, top = frames.no_claim(table), table.loc[table["ratio"].idxmax()]
    said = f"{top['ratio']:.2f}x by {AXES.short(top['method'])} at {top['k_len']} keys, {top['pattern']}"
    with figures.drawing(
        *(3.6 + 3.0 * len(patterns), 2.9, title if no_claim else answer(chosen), no_claim, setting),
        alt=f"Lines of speed-up over length, a panel a pattern. The most is {said}.",
        note="Bars: 99% intervals. Level: as many times as there are ranks. Kernel time where it could be captured.",
        columns=len(patterns),
        sharey=True,
    ) as (fig, grid):
        for ax, pattern in zip(grid[0], patterns, strict=True):
            part = table[table["pattern"].eq(pattern)].sort_values("k_len")
            for method in AXES.ordered(part["method"]):
                own = part[part["method"].eq(method)]
                known = own["high"].lt(100 * own["low"])  # else there is no interval
                reach = [(own["ratio"] - own[end]).abs().where(known) for end in ("low", "high")]
                ax.errorbar(own["k_len"], own["ratio"], reach, **_look(method))
            ax.axhline(float(part["world_size"].iloc[0]), color=INK, linewidth=1, linestyle=(0, (4, 3)))
            ax.set(title=pattern, xscale="log", xlabel="keys", ylim=(0, None))
            lengths = sorted(part["k_len"].unique())
            ax.set_xticks(lengths, [f"{length / 1024:g}K" for length in lengths])
            ax.xaxis.set_minor_locator(NullLocator())
            ax.grid(True, axis="y")
        grid[0, 0].set_ylabel("speed-up of a step")
        _legend(grid[0, -1], [ax.plot([], [], label=AXES.label(name), **_look(name))[0] for name in methods])
    return fig


def waterfall(frame: pd.DataFrame) -> Figure:
    """Where a step over ranks goes, a bar a strategy, at the longest sequence, a panel a pattern."""
    title, (chosen, setting) = "Where a step over ranks goes", _setting(frame)
    table = parts(chosen)
    if table.empty:
        return figures.empty(title, "no case holds the parts of a step over ranks")
    table = table[table["k_len"].eq(table["k_len"].max())]
    patterns, methods = list(dict.fromkeys(table["pattern"])), AXES.ordered(table["method"])[::-1]
    fastest = table.loc[table["step"].idxmin()]
    told = ", ".join(f"{name} {milliseconds(fastest[name])}" for name in PARTS)
    with figures.drawing(
        *(3.6 + 2.6 * len(patterns), 0.9 + 0.27 * len(methods), title, frames.no_claim(table), setting),
        f"{table['k_len'].iloc[0]} keys, call time",
        alt=f"Stacked bars. The fastest, {AXES.label(fastest['method'])} of {fastest['pattern']}: {told}.",
        note="From one rank's step over the number of ranks to the step, the slowest rank's. All parts are measured; "
        "what is below 0 is left out.",
        columns=len(patterns),
        sharey=True,
    ) as (fig, grid):
        for ax, pattern in zip(grid[0], patterns, strict=True):
            rows = table[table["pattern"].eq(pattern)].set_index("method").reindex(methods)
            end = np.zeros(len(rows))
            for name, colour in _COLOURS.items():
                width = rows[name].astype(float).clip(lower=0).fillna(0).to_numpy()
                ax.barh(range(len(rows)), width, left=end, color=colour, height=0.7, edgecolor="white", linewidth=0.4)
                end = end + width
            ax.plot(rows["step"].astype(float), range(len(rows)), color=INK, marker="|", markersize=12, linestyle="")
            ax.set_title(pattern)
            ax.xaxis.set_major_formatter(FuncFormatter(milliseconds))
            ax.set_xlim(left=0)
        figures.lines(grid[0, 0], [AXES.label(method) for method in methods])
        patches = [Patch(facecolor=colour, label=name) for name, colour in _COLOURS.items()]
        _legend(grid[0, -1], patches)
    return fig


def balance(frame: pd.DataFrame) -> Figure:
    """The mean rank's own work over the slowest's against the bytes that a rank sends, a point a strategy and
    placement, at the longest sequence, a panel a pattern.
    """
    title, (chosen, setting) = "Balance against bytes", _setting(frame)
    table = parts(chosen).dropna(subset=["balance", "sent"])
    if table.empty:
        return figures.empty(title, "no case holds the balance of ranks and the bytes that they send")
    table = table[table["k_len"].eq(table["k_len"].max())]
    patterns, methods = list(dict.fromkeys(table["pattern"])), AXES.ordered(table["method"])
    rows = table.itertuples()
    words = [f"{AXES.short(row.method)}, {row.pattern}: {row.balance:.0%}, {row.sent / 2**20:.3g} MiB." for row in rows]
    with figures.drawing(
        *(3.6 + 2.9 * len(patterns), 2.9, title, frames.no_claim(table), setting, f"{table['k_len'].iloc[0]} keys"),
        alt=f"Points, a panel a pattern. {' '.join(words)}",
        note="Up and to the left is better: ranks wait less for each other, and less travels. Work by measured time.",
        columns=len(patterns),
        sharey=True,
    ) as (fig, grid):
        for ax, pattern in zip(grid[0], patterns, strict=True):
            for row in table[table["pattern"].eq(pattern)].itertuples():
                ax.plot(row.sent / 2**20, row.balance, **_look(row.method) | dict(linestyle="", markersize=8))
            ax.set(title=pattern, xlabel="sent by a rank (MiB)", xlim=(0, None))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
            ax.grid(True)
        grid[0, 0].set_ylabel("mean / slowest rank")
        dots = {name: _look(name) | dict(linestyle="") for name in methods}
        _legend(grid[0, -1], [ax.plot([], [], label=AXES.label(name), **dot)[0] for name, dot in dots.items()])
    return fig
