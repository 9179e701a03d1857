"""Figures of attention over ranks, a panel a pattern: speed-up, where a step goes, balance against bytes."""

from collections.abc import Callable, Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from blockshock_lib.report import figures, frames
from blockshock_lib.report.figures import INK, milliseconds
from blockshock_lib.studies.attention.axes import AXES
from blockshock_lib.studies.attention.report import against
from blockshock_lib.studies.attention.scaling_hypotheses import ONE, over_one
from blockshock_lib.studies.attention.scaling_report import PARTS, answer, parts

_COLOURS = dict(zip(PARTS, ("#3B6FA0", "#8FB4D9", "#882255", "#BBBBBB", "#E6A23C"), strict=True))
_DOT = dict(linestyle="", markersize=8, markeredgewidth=0.3)
_METRICS = ("step_call", "step_kernel", "own_call", "moved_call", "merged_call", "balance", "sent_bytes")


def _longest(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    chosen, setting = frames.focus(frame, AXES, metrics=_METRICS)
    table = parts(chosen).dropna(subset=["balance", "sent"])
    table = table[table["k_len"].eq(table["k_len"].max())]
    return table, f"{setting}, {table['k_len'].max()} keys"


def _dots(table: pd.DataFrame) -> dict[str, dict]:
    return {AXES.label(name): AXES.line(name) | _DOT for name in AXES.ordered(table["method"])}


def _drawn(
    table: pd.DataFrame, panel: Callable[[Axes, pd.DataFrame], None], looks: Mapping[str, dict], *words: str, **how: str
) -> Figure:
    patterns, height = list(dict.fromkeys(table["pattern"])), 0.9 + 0.27 * table["method"].nunique()
    size = 3.6 + 2.9 * len(patterns), max(2.7, height)
    how |= {"columns": len(patterns), "sharey": True}
    with figures.drawing(*size, *words, frames.no_claim(table), **how) as (fig, grid):
        for ax, pattern in zip(grid[0], patterns, strict=True):
            panel(ax, table[table["pattern"].eq(pattern)])
            ax.set_title(pattern)
        figures.legend(grid[0, -1], looks)
    return fig


def speed_up(frame: pd.DataFrame, over: str = "") -> Figure:
    """Speed of a step over a method of one rank, by default with the same kernel, against length, a line a strategy."""
    title = f"Speed-up of a step over: {AXES.label(over or 'alone')}"
    chosen, setting = frames.focus(frame, AXES, metrics=_METRICS)
    table = against(chosen, over, ONE) if over else over_one(chosen)
    if table.empty:
        return figures.empty(title, "no case holds valid times of a strategy and of one rank")
    top, most = table.loc[table["ratio"].idxmax()], 1.1 * table[["ratio", "world_size"]].max().max()
    said = f"{top['ratio']:.2f}x by {AXES.short(top['method'])} at {top['k_len']} keys, {top['pattern']}"

    def panel(ax: Axes, part: pd.DataFrame) -> None:
        for method, own in part.sort_values("k_len").groupby("method", sort=False):
            known = own["high"].lt(100 * own["low"])  # else there is no interval
            reach = [(own["ratio"] - own[end]).abs().where(known) for end in ("low", "high")]
            ax.errorbar(own["k_len"], own["ratio"], reach, **AXES.line(method))
        ax.axhline(float(part["world_size"].iloc[0]), color=INK, linewidth=1, linestyle=(0, (4, 3)))
        ax.set(xscale="log", xlabel="keys", ylabel="speed-up of a step", ylim=(0, most))
        lengths = sorted(part["k_len"].unique())
        ax.set_xticks(lengths, [f"{length / 1024:g}K" for length in lengths])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.grid(True, axis="y")

    title = title if over or frames.no_claim(table) else answer(chosen, rival=False)
    return _drawn(
        *(table, panel, _dots(table), title, setting),
        alt=f"Lines of speed-up over length, a panel a pattern. The most is {said}.",
        note="Bars: 99% intervals, cut at the edge. Level: as many times as ranks. Kernel time where captured.",
    )


def waterfall(frame: pd.DataFrame) -> Figure:
    """Where a step over ranks goes, a bar a strategy, at the longest sequence."""
    title, (table, setting) = "Where a step over ranks goes", _longest(frame)
    if table.empty:
        return figures.empty(title, "no case holds the parts of a step over ranks")
    methods, fastest = AXES.ordered(table["method"])[::-1], table.loc[table["step"].idxmin()]
    told = ", ".join(f"{name} {milliseconds(fastest[name])}" for name in PARTS)

    def panel(ax: Axes, part: pd.DataFrame) -> None:
        rows, end = part.set_index("method").reindex(methods), 0.0
        for name, colour in _COLOURS.items():
            width = rows[name].astype(float).clip(lower=0).fillna(0).to_numpy()
            ax.barh(range(len(rows)), width, left=end, color=colour, height=0.7, edgecolor="white", linewidth=0.4)
            end = end + width
        ax.plot(rows["step"].astype(float), range(len(rows)), color=INK, marker="|", markersize=12, linestyle="")
        figures.lines(ax, [AXES.label(method) for method in methods])
        ax.xaxis.set_major_formatter(FuncFormatter(milliseconds))
        ax.set_xlim(left=0)

    looks = {name: dict(color=colour, marker="s", linestyle="") for name, colour in _COLOURS.items()}
    return _drawn(
        *(table, panel, looks, title, setting, "call time"),
        alt=f"Stacked bars. The fastest, {AXES.label(fastest['method'])} of {fastest['pattern']}: {told}.",
        note="From one rank's step over the number of ranks to the step, the slowest rank's. All parts are measured; "
        "what is below 0 is left out.",
    )


def balance(frame: pd.DataFrame) -> Figure:
    """The mean rank's own work over the slowest's against the bytes that a rank sends, a point a strategy and
    placement, at the longest sequence.
    """
    title, (table, setting) = "Balance against bytes", _longest(frame)
    if table.empty:
        return figures.empty(title, "no case holds the balance of ranks and the bytes that they send")
    rows = table.itertuples()
    words = [f"{AXES.short(row.method)}, {row.pattern}: {row.balance:.0%}, {row.sent / 2**20:.3g} MiB." for row in rows]

    def panel(ax: Axes, part: pd.DataFrame) -> None:
        for row in part.itertuples():
            ax.plot(row.sent / 2**20, row.balance, **AXES.line(row.method) | _DOT)
        ax.set(xlabel="sent by a rank (MiB)", ylabel="mean / slowest rank", xlim=(0, None))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
        ax.grid(True)

    return _drawn(
        *(table, panel, _dots(table), title, setting),
        alt=f"Points, a panel a pattern. {' '.join(words)}",
        note="Up and to the left is better: ranks wait less for each other, and less travels. Work by measured time.",
    )
