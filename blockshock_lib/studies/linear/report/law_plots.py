"""Figures of the law: speed over B1 against s, the law against the measurement, what parity takes, and what if."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from blockshock_lib.report import figures, frames
from blockshock_lib.report.figures import FAINT, INK, MUTED
from blockshock_lib.studies.linear.axes import AXES, optimizer_name
from blockshock_lib.studies.linear.report import build, law

_DASHED = (0, (4, 3))
_SMALL = dict(fontsize=8, color=MUTED, va="bottom")
_NO_CASE = "no case holds kernel times of A, B1 and Block-Shock"
_S = "s: speed of the 2:4 product over the dense one (×)"
_PARITY = "parity with B1"


def law_figure(frame: pd.DataFrame) -> Figure:
    """The law: Block-Shock's speed over B1 is s/2. The line, and each case with 99% intervals, cut at the axes.

    It holds without communication and where B1's half product takes half of A's time: speed = s t(B1's product) / t(A).
    """
    chosen, setting = frames.focus(frame, AXES, metrics=("forward_kernel", "compute_kernel", "reduce_kernel"))
    table, title = law.law_rows(chosen, needs=()), "The law: speed over B1 = s / 2"
    if table.empty:
        return figures.empty(title, _NO_CASE)
    if not frames.no_claim(table):
        below, total = int(table["s_high"].lt(2).sum()), len(table)
        least, most = table["s"].min(), table["s"].max()
        title = f"The law s/2 over B1: measured s = {f'{least:.2f} to ' if total > 1 else ''}{most:.2f}, "
        all_cases = f"below 2 in {f'all {total} cases' if total > 1 else 'the one case'}"
        title += all_cases if below == total else f"its interval below 2 in {below} of {total} cases"
    # From the points, not their intervals: two groups may give an interval without a useful end.
    right, top = 1.2 * max(2.0, table["s"].max()), 1.2 * max(1.0, table["ratio"].max())
    with figures.drawing(
        *(7.4, 4.5, title, frames.no_claim(table), setting),
        *("parity needs s = 2 where B1's half product takes half of A's time", "bars: 99% intervals"),
        alt="Scatter of speed over B1 against s with the line s/2. "
        + _each(table, lambda r: f"s={r.s:.2f}, {r.ratio:.2f}x."),
        note="s = time of A's dense product / time of the 2:4 product of the same size. Arithmetic allows s = 2 at "
        "most, and reading the weight s = 16/9 (packed bytes are 9/16 of dense). Two things lift points above the "
        "line: communication that costs both methods the same, and a half product of B1 that takes more than half "
        "of A's time, as at small N·B.",
    ) as (fig, grid):
        ax, line = grid[0, 0], np.array([0, right])
        ax.plot(line, line / 2, color=INK, linewidth=1.4, zorder=2)
        # One label on the outer side of each line, so that they stay apart on any scale.
        for place, words, side in ((16 / 9, "bytes: s ≤ 16/9", "right"), (2.0, "arithmetic: s ≤ 2", "left")):
            ax.axvline(place, color=FAINT, linewidth=1.2, zorder=1.1)
            shift = 0.007 * right * (1 if side == "left" else -1)
            ax.text(place + shift, 0.03 * top, words, rotation=90, ha=side, **_SMALL)
        rule = Line2D([], [], color=INK, linewidth=1.4, label="law: s / 2")
        _points(ax, table, ("s", "s_low", "s_high"), right, top, rule, markeredgewidth=0.7, alpha=0.95)
        ax.text(0.03 * right, 1.01, _PARITY, **_SMALL)
        ax.set(xlabel=_S, ylabel="speed of Block-Shock over B1, whole forward (×)")
    return fig


def law_check(frame: pd.DataFrame) -> Figure:
    """The ratio that the law makes of the measured s, against the ratio as measured, a point a case."""
    table = law.law_rows(frame)
    if table.empty:
        return figures.empty("The law against the measurement", _NO_CASE)
    close, worst = int(table["residual"].abs().le(law.CLOSE).sum()), table.loc[table["residual"].abs().idxmax()]
    no_claim = frames.no_claim(table)
    title = f"The law says what was measured to within {law.CLOSE:.0%} in {close} of {len(table)} cases"
    top = 1.12 * max(1.0, table["ratio"].max(), table["predicted"].max())
    with figures.drawing(
        *(6.6, 4.4, "The law against the measurement: no claim" if no_claim else title),
        *(no_claim, frames.setting(table.iloc[0], AXES), "bars: 99% intervals"),
        alt=_each(table, lambda r: f"{r.predicted:.2f}x said, {r.ratio:.2f}x measured."),
        note="Law: B1's product takes its share of A's, Block-Shock's 2/s of that, both add B1's collective. Farthest: "
        f"{AXES.case(worst)}, {worst['residual']:+.1%}: {worst['reason']}.",
    ) as (fig, grid):
        ax = grid[0, 0]
        ax.axline((0, 0), slope=1, color=INK, linewidth=1.2, zorder=1)
        rule = Line2D([], [], color=INK, linewidth=1.2, label="law = measured")
        _points(ax, table, ("predicted",) * 3, top, top, rule)
        ax.text(0.02 * top, 1.01, _PARITY, **_SMALL)
        ax.set(xlabel="speed over B1 that the law makes of the measured s (×)", ylabel="speed over B1 as measured (×)")
    return fig


def parity(frame: pd.DataFrame) -> Figure:
    """Contours of the ratio to B1 over s and the share of communication, with every case where it was measured."""
    table = law.law_rows(frame)
    if table.empty:
        return figures.empty("What parity takes", _NO_CASE)
    share = table["reduce"] / table["b1"]
    s, c = np.meshgrid(np.linspace(0.25, 3, 200), np.geomspace(min(0.02, share.min()), max(10, share.max()), 200))
    no_claim, needed = frames.no_claim(table), table["s_needed"].dropna()
    takes = f"s of {needed.min():.2f} to {needed.max():.2f}" if len(needed) else "more than any s"
    title = f"Parity takes {takes}; {table['s'].min():.2f} to {table['s'].max():.2f} was measured"
    with figures.drawing(
        *(7.4, 4.5, "What parity takes: no claim" if no_claim else title, no_claim),
        *(frames.setting(table.iloc[0], AXES), "needed: with the communication of each case held"),
        alt=_each(table, lambda r: f"s={r.s:.2f}, communication {r.reduce / r.b1:.2f} of B1's product."),
        note="Lines: speed over B1 by the law, (1 + c) / (2/s + c). A slower link (upwards) brings it towards 1, and "
        "no link takes it across: only s does. Dashed: parity. Points: measured s and communication.",
    ) as (fig, grid):
        ax, foot = grid[0, 0], 1.15 * c.min()
        levels = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2]
        ax.contour(s, c, (1 + c) / (2 / s + c), levels=levels, colors=FAINT, linewidths=1.1)
        for level in levels:
            look = dict(ha="center", fontsize=8, color=MUTED, bbox=dict(fc="white", ec="none", pad=1))
            ax.text(2 / ((1 + foot) / level - foot), foot, f"{level}×", **look)
        ax.axvline(2, color=INK, linewidth=1.3, linestyle=_DASHED)
        for row, place, look in zip(table.itertuples(index=False), share, _looks(table), strict=True):
            ax.plot(row.s, place, zorder=3, linestyle="", **look)
        ax.set(yscale="log", xlim=(0.25, 3), ylim=(c.min(), c.max()), xlabel=_S)
        ax.set_ylabel("communication over B1's product (×)")
        _legend(ax, table, Line2D([], [], color=INK, linestyle=_DASHED, label="parity by the law: s = 2"))
    return fig


def what_if(table: pd.DataFrame, subtitle: str = "") -> Figure:
    """A table of `findings.WhatIf`: ratio to B1 as measured (hollow) and then (filled), on B, a panel a work."""
    if table.empty:
        return figures.empty("What if", _NO_CASE)
    panels = [panel for _, panel in table.groupby(["work", "method", "optimizer"], sort=False)]
    after, no_claim = table[table["work"].eq("forward")], frames.no_claim(table)
    title = f"Then Block-Shock's forward reaches {after['then'].min():.2f} to {after['then'].max():.2f} of B1's speed: "
    title += f"faster than B1 in {int(after['low'].gt(1).sum())} of {len(after)} cases"
    codes = table.attrs.get("works", {}) if table["work"].nunique() > 1 else {}
    cases = zip(table["work"], table["method"].map(AXES.label), table.to_dict("records"), strict=True)
    with figures.drawing(
        *(max(6.4, 3.1 * len(panels)), 3.2, "What if: no claim" if no_claim else title, no_claim, subtitle),
        alt=" ".join(f"{w}, {m}, {AXES.case(r)}: {r['ratio']:.2f}x, {r['then']:.2f}x then." for w, m, r in cases),
        note="Computed from measured parts, not measured. Hollow and dotted: as measured. Filled: then. Faster: above "
        f"1 with an interval as wide as the measured one. {law.codes_sentence(codes)}",
        columns=len(panels),
        sharey=True,
    ) as (fig, grid):
        looks = {n: dict(color=t, marker=m) for (n, t), m in zip(_tints(table["size"]).items(), _MARKS, strict=False)}
        for ax, rows in zip(grid[0], panels, strict=True):
            # One batch alone would put all sizes on one line: then they stand side by side.
            along, first = "batch" if rows["batch"].nunique() > 1 else "size", rows.iloc[0]
            for size, part in rows.sort_values("batch").groupby("size"):
                ax.plot(part[along], part["ratio"], linestyle=":", markerfacecolor="white", linewidth=1, **looks[size])
                ax.plot(part[along], part["then"], linewidth=1.6, **looks[size])
            ax.axhline(1, color=INK, linewidth=0.9, linestyle=_DASHED)
            ticks = sorted(rows[along].unique())
            ax.set_xscale("log", base=2)
            ax.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
            ax.margins(x=0.15)
            ax.set_title(build.listed(AXES.short(first["method"]), first["work"], optimizer_name(first["optimizer"])))
            ax.set_xlabel(AXES.y_name() if along == "batch" else f"N (B = {first['batch']})")
        grid[0, 0].set(ylabel="speed over B1 (×)", ylim=(0, 1.1 * max(1.0, table[["ratio", "then"]].max().max())))
        keys = [Line2D([], [], label=f"N = {n:.0f}", **look) for n, look in looks.items()]
        grid[0, -1].legend(handles=keys, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
    return fig


def _points(
    ax: Axes, table: pd.DataFrame, x: tuple[str, str, str], right: float, top: float, rule: Line2D, **look: float
) -> None:
    """Each case's measured ratio at `x` (value, low, high), with bars cut at the axes; parity, and the legend."""
    ax.axhline(1, color=MUTED, linewidth=0.9, linestyle=_DASHED, zorder=1)
    for row, own in zip(table.to_dict("records"), _looks(table), strict=True):
        value, low, high = (row[name] for name in x)
        bars = dict(yerr=[[row["ratio"] - row["low"]], [min(row["high"], top) - row["ratio"]]])
        if high > low:
            bars |= dict(xerr=[[value - low], [min(high, right) - value]])
        ax.errorbar(value, row["ratio"], elinewidth=0.9, zorder=3, **bars, **own | look)
    ax.set(xlim=(0, right), ylim=(0, top))
    _legend(ax, table, rule)


def _each(table: pd.DataFrame, words: Callable) -> str:
    return " ".join(f"{AXES.case(row._asdict())}: {words(row)}" for row in table.itertuples(index=False))


_MARKS = 4 * "osD^vPX*h"


def _tints(values: pd.Series) -> dict:
    known = sorted(values.unique())
    return dict(zip(known, sns.color_palette("viridis_r", len(known) + 1)[1:], strict=True))


def _looks(table: pd.DataFrame) -> list[dict]:
    """The marker of each row: its B by colour, its N by form."""
    tints, markers = _tints(table["batch"]), dict(zip(sorted(table["size"].unique()), _MARKS, strict=False))
    look = dict(markersize=7.5, markeredgecolor="white")
    cells = zip(table["batch"], table["size"], strict=True)
    return [dict(color=tints[batch], marker=markers[size], **look) for batch, size in cells]


def _legend(ax: Axes, table: pd.DataFrame, rule: Line2D) -> None:
    known, sizes = dict(linestyle="", markersize=7), zip(sorted(table["size"].unique()), _MARKS, strict=False)
    keys = [Line2D([], [], color=t, marker="o", label=f"B = {b}", **known) for b, t in _tints(table["batch"]).items()]
    keys += [Line2D([], [], color=MUTED, marker=mark, label=f"N = {n:.0f}", **known) for n, mark in sizes]
    ax.legend(handles=[*keys, rule], loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
