"""Figures of one method's speed over another's: on (N, B), and against the law s / 2."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from blockshock_lib.report import cells, figures, labels, verdicts
from blockshock_lib.report.figures import FAINT, INK, MUTED

# Orange to blue is told apart with any common colour blindness; both ends are equally far from white.
_SLOW_FAST = LinearSegmentedColormap.from_list("slow_fast", ["#D55E00", "#F3B98E", "#FFFFFF", "#8FBCE0", "#0072B2"])
_GREY = LinearSegmentedColormap.from_list("grey", ["#F0F0F0"] * 2)


def outcome_claim(table: pd.DataFrame, over: str, under: str) -> str:
    """A title from a table of `verdicts.ratio` that says no more than its intervals."""
    first, second = labels.label(under), labels.label(over)
    count = {name: int(table["outcome"].eq(name).sum()) for name in ("faster", "slower", "undecided", "no claim")}
    total = len(table)
    if not total or count["no claim"]:
        return f"{first} against {second}: measured, no claim"
    for word in ("faster", "slower"):
        if count[word] == total:
            where = f"in all {total} cells" if total > 1 else f"at {table['shape'].iloc[0]}, B={table['batch'].iloc[0]}"
            return f"{first} is {word} than {second} {where}"
    if count["undecided"] == total:
        return f"{first} against {second}: no cell of {total} is decided"
    said = [f"{word} in {count[word]}" for word in ("slower", "faster", "undecided") if count[word]]
    return f"Against {second}, {first} is {', '.join(said)} of {total} cells"


def ratio_heatmap(
    frame: pd.DataFrame, over: str = "row_parallel", under: str = "block_shock", metric: str = "forward_kernel"
) -> Figure:
    """Speed of `under` over `over` on (N, B), each cell with its ratio and 99% interval, a panel an optimizer.

    Colour is given only to cells whose interval excludes 1: blue faster, orange slower. Undecided cells are hatched;
    CPU and emulated ones stay grey.
    """
    metric = cells.time_metric(frame, metric)
    timed = frame[frame["metric"].isin([metric, "check"])] if len(frame) else frame
    chosen, setting = cells.focus(timed, panels=("optimizer",))
    table = verdicts.ratio(chosen, over, under, metric)
    names = labels.label(under), labels.label(over)
    if table.empty:
        return figures.empty(f"{names[0]} against {names[1]}", "no case holds valid times of both")
    square = table["in_features"].eq(table["out_features"]).all()
    table["column"] = table["in_features"].astype(str) if square else table["shape"]
    columns = list(dict.fromkeys(table["column"]))
    batches = sorted(table["batch"].unique(), reverse=True)
    panels = labels.ordered(table["optimizer"], labels.OPTIMIZERS)
    spoken = table["outcome"].ne("no claim").any()
    with figures.theme():
        fig = figures.canvas(
            max(5.6, 1.4 + 1.45 * len(columns) * len(panels)),
            0.9 + 0.62 * len(batches),
            outcome_claim(table, over, under),
            figures.subtitle(cells.no_claim(table), setting, cells.time_name(table, metric)),
            " ".join(f"{_place(r)}: {verdicts.interval_text(r._asdict())}." for r in table.itertuples(index=False)),
            f"Number: t({names[1]}) / t({names[0]}), above 1 where {names[0]} is faster; below it the 99% interval"
            + (". Hatched: the interval holds 1." if spoken else ". Grey: no claim."),
        )
        axes = fig.subplots(1, len(panels), squeeze=False)[0]
        for ax, optimizer in zip(axes, panels, strict=True):
            _heat_panel(ax, table[table["optimizer"].eq(optimizer)], columns, batches, spoken)
            ax.set_title(labels.optimizer(optimizer))
            ax.set_xlabel("N (in = out features)" if square else "weight (out x in features)")
        axes[0].set_ylabel("B (rows of the input)")
    return fig


def _place(row) -> str:
    where = f"{row.shape}, B={row.batch}"
    return f"{where}, {labels.optimizer(row.optimizer)}" if row.optimizer else where


def _heat_panel(ax: Axes, table: pd.DataFrame, columns: list[str], batches: list[int], spoken: bool) -> None:
    claimed = table.assign(ratio=table["ratio"].where(table["outcome"].isin(["faster", "slower"]), 1.0))
    colours = claimed.pivot(index="batch", columns="column", values="ratio").reindex(index=batches, columns=columns)
    sns.heatmap(
        np.log2(colours.astype(float)),
        ax=ax,
        cmap=_SLOW_FAST if spoken else _GREY,
        vmin=-1.5,
        vmax=1.5,
        cbar=False,
        linewidths=2,
        linecolor="white",
    )
    for row in table.itertuples(index=False):
        _cell(ax, row, columns.index(row.column), batches.index(row.batch))
    ax.set(xlabel="", ylabel="")
    ax.set_yticklabels(batches, rotation=0)
    ax.tick_params(length=0)


def _cell(ax: Axes, row, x: int, y: int) -> None:
    if row.outcome == "undecided":
        ax.add_patch(
            Rectangle((x + 0.02, y + 0.03), 0.96, 0.94, facecolor="white", edgecolor=FAINT, hatch="////", lw=0)
        )
    # Blue is the darker end: ink on it is hard to read.
    ink = "white" if row.outcome == "faster" and np.log2(row.ratio) > 0.9 else INK
    ratio, _, interval = verdicts.interval_text(row._asdict()).partition(" ")
    top = ax.text(x + 0.5, y + 0.36, ratio.replace("x", "×"), fontsize=11, fontweight="bold", color=ink)
    low = ax.text(x + 0.5, y + 0.71, interval, fontsize=8, color=ink)
    for text in (top, low):
        text.set(horizontalalignment="center", verticalalignment="center")
        if row.outcome == "undecided":
            text.set_path_effects([withStroke(linewidth=3, foreground="white")])


def law_points(frame: pd.DataFrame) -> pd.DataFrame:
    """Measured s and speed over B1, a row a case.

    s = t(A's product) / (t(Block-Shock's product) * world_size / 2): how much faster a 2:4 product is than the dense
    one of the same size. With more than two ranks the terms are sharded, and A's product is taken to shrink in
    proportion.
    Columns of `verdicts.ratio`, `s`, `s_low`, `s_high` (99% interval).
    """
    found = verdicts.ratio(frame, "row_parallel", "block_shock")
    sparse = verdicts.ratio(frame, "dense", "block_shock", "compute_kernel")
    half = sparse["world_size"].astype(float) / 2
    sparse = sparse.assign(
        **{f"s{end}": sparse[name] / half for end, name in (("", "ratio"), ("_low", "low"), ("_high", "high"))}
    )
    return found.merge(sparse[["case", "s", "s_low", "s_high"]], on="case")


def law(frame: pd.DataFrame) -> Figure:
    """The law: Block-Shock's speed over B1 is s/2. The line, and each case with 99% intervals, cut at the axes.

    It holds without communication and where B1's half product takes half of A's time: speed = s t(B1's product) / t(A).
    """
    chosen, setting = cells.focus(
        frame[frame["metric"].isin(["forward_kernel", "compute_kernel", "check"])] if len(frame) else frame
    )
    table = law_points(chosen)
    if table.empty:
        return figures.empty("The law: speed over B1 = s / 2", "no case holds kernel times of A, B1 and Block-Shock")
    batches = sorted(table["batch"].unique())
    sizes = sorted(table["size"].unique())
    tints = sns.color_palette("viridis_r", len(batches) + 1)[1:]
    markers = dict(zip(sizes, "osD^vPX*h" * (1 + len(sizes) // 9), strict=False))
    # From the points, not their intervals: two groups may give an interval without a useful end.
    right, top = 1.2 * max(2.0, table["s"].max()), 1.2 * max(1.0, table["ratio"].max())
    with figures.theme():
        fig = figures.canvas(
            7.4,
            4.5,
            _law_title(table),
            figures.subtitle(
                cells.no_claim(table),
                setting,
                "parity needs s = 2 where B1's half product takes half of A's time",
                "bars: 99% intervals",
            ),
            "Scatter of speed over B1 against s with the line s/2. "
            + " ".join(f"{r.shape}, B={r.batch}: s={r.s:.2f}, {r.ratio:.2f}x." for r in table.itertuples(index=False)),
            "s = time of A's dense product / time of the 2:4 product of the same size. Arithmetic allows s = 2 at "
            "most, and reading the weight s = 16/9 (packed bytes are 9/16 of dense). Two things lift points above the "
            "line: communication that costs both methods the same, and a half product of B1 that takes more than half "
            "of A's time, as at small N·B.",
        )
        ax = fig.subplots()
        line = np.array([0, right])
        ax.plot(line, line / 2, color=INK, linewidth=1.4, zorder=2)
        ax.axhline(1, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        # One label on the outer side of each line, so that they stay apart on any scale.
        for place, text, side in ((16 / 9, "bytes: s ≤ 16/9", "right"), (2.0, "arithmetic: s ≤ 2", "left")):
            ax.axvline(place, color=FAINT, linewidth=1.2, zorder=1)
            shift = 0.007 * right * (1 if side == "left" else -1)
            ax.text(place + shift, 0.03 * top, text, rotation=90, ha=side, va="bottom", fontsize=8, color=MUTED)
        for row in table.itertuples(index=False):
            colour = tints[batches.index(row.batch)]
            ax.errorbar(
                row.s,
                row.ratio,
                xerr=[[row.s - row.s_low], [min(row.s_high, right) - row.s]],
                yerr=[[row.ratio - row.low], [min(row.high, top) - row.ratio]],
                color=colour,
                marker=markers[row.size],
                markersize=7.5,
                markeredgecolor="white",
                markeredgewidth=0.7,
                elinewidth=0.9,
                alpha=0.95,
                zorder=3,
            )
        ax.set_xlim(0, right)
        ax.set_ylim(0, top)
        ax.text(0.03 * right, 1.01, "parity with B1", fontsize=8, color=MUTED, va="bottom")
        ax.set_xlabel("s: speed of the 2:4 product over the dense one (×)")
        ax.set_ylabel("speed of Block-Shock over B1, whole forward (×)")
        known = dict(linestyle="", markersize=7)
        of_b = [Line2D([], [], color=tints[i], marker="o", label=f"B = {b}", **known) for i, b in enumerate(batches)]
        of_n = [Line2D([], [], color=MUTED, marker=markers[n], label=f"N = {n:.0f}", **known) for n in sizes]
        rule = [Line2D([], [], color=INK, linewidth=1.4, label="law: s / 2")]
        ax.legend(handles=[*of_b, *of_n, *rule], loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
    return fig


def _law_title(table: pd.DataFrame) -> str:
    if cells.no_claim(table):
        return "The law: speed over B1 = s / 2"
    below, total = int(table["s_high"].lt(2).sum()), len(table)
    least, most = table["s"].min(), table["s"].max()
    span = f"s = {least:.2f} to {most:.2f}" if total > 1 else f"s = {most:.2f}"
    if below == total:
        cases = f"all {total} cases" if total > 1 else "the one case"
        return f"The law s/2 over B1: measured {span}, below 2 in {cases}"
    return f"The law s/2 over B1: measured {span}, its interval below 2 in {below} of {total} cases"
