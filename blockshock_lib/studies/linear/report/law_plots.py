"""The law drawn: speed over B1 against s."""

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from blockshock_lib.report import figures, frames
from blockshock_lib.report.figures import FAINT, INK, MUTED
from blockshock_lib.studies.linear.axes import AXES
from blockshock_lib.studies.linear.report import law

_SMALL = dict(fontsize=8, color=MUTED, va="bottom")
_MARKS = 4 * "osD^vPX*h"


def law_figure(frame: pd.DataFrame) -> Figure:
    """The law: Block-Shock's speed over B1 is s/2. The line, and each case with 99% intervals, cut at the axes.

    It holds without communication and where B1's half product takes half of A's time: speed = s t(B1's product) / t(A).
    """
    chosen, setting = frames.focus(frame, AXES, metrics=("forward_kernel", "compute_kernel", "reduce_kernel"))
    table, title = law.law_rows(chosen, needs=()), "The law: speed over B1 = s / 2"
    if table.empty:
        return figures.empty(title, "no case holds kernel times of A, B1 and Block-Shock")
    if not frames.no_claim(table):
        below, total = int(table["s_high"].lt(2).sum()), len(table)
        least, most = table["s"].min(), table["s"].max()
        title = f"The law s/2 over B1: measured s = {f'{least:.2f} to ' if total > 1 else ''}{most:.2f}, "
        all_cases = f"below 2 in {f'all {total} cases' if total > 1 else 'the one case'}"
        title += all_cases if below == total else f"its interval below 2 in {below} of {total} cases"
    batches, sizes = sorted(table["batch"].unique()), sorted(table["size"].unique())
    tints = dict(zip(batches, sns.color_palette("viridis_r", len(batches) + 1)[1:], strict=True))
    markers = dict(zip(sizes, _MARKS, strict=False))
    told = [f"{AXES.case(row)}: s={row['s']:.2f}, {row['ratio']:.2f}x." for row in table.to_dict("records")]
    # From the points, not their intervals: two groups may give an interval without a useful end.
    right, top = 1.2 * max(2.0, table["s"].max()), 1.2 * max(1.0, table["ratio"].max())
    with figures.drawing(
        *(7.4, 4.5, title, frames.no_claim(table), setting),
        *("parity needs s = 2 where B1's half product takes half of A's time", "bars: 99% intervals"),
        alt=f"Scatter of speed over B1 against s with the line s/2. {' '.join(told)}",
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
        ax.axhline(1, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        look = dict(markersize=7.5, markeredgecolor="white", markeredgewidth=0.7, alpha=0.95, elinewidth=0.9, zorder=3)
        for row in table.to_dict("records"):
            bars = dict(yerr=[[row["ratio"] - row["low"]], [min(row["high"], top) - row["ratio"]]])
            if row["s_high"] > row["s_low"]:
                bars |= dict(xerr=[[row["s"] - row["s_low"]], [min(row["s_high"], right) - row["s"]]])
            ax.errorbar(row["s"], row["ratio"], color=tints[row["batch"]], marker=markers[row["size"]], **bars, **look)
        ax.text(0.03 * right, 1.01, "parity with B1", **_SMALL)
        ax.set(xlim=(0, right), ylim=(0, top), xlabel="s: speed of the 2:4 product over the dense one (×)")
        ax.set_ylabel("speed of Block-Shock over B1, whole forward (×)")
        known = dict(linestyle="", markersize=7)
        keys = [Line2D([], [], color=tint, marker="o", label=f"B = {b}", **known) for b, tint in tints.items()]
        keys += [Line2D([], [], color=MUTED, marker=m, label=f"N = {n:.0f}", **known) for n, m in markers.items()]
        keys.append(Line2D([], [], color=INK, linewidth=1.4, label="law: s / 2"))
        ax.legend(handles=keys, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
    return fig
