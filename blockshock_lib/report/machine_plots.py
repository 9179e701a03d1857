"""Figures against what the machine allows: the roofline, predicted floors."""

import textwrap

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from blockshock_lib.report import figures, frames
from blockshock_lib.report.axes import CEILING, Axes
from blockshock_lib.report.figures import INK, MUTED, milliseconds


def roofline_points(frame: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    """A row a (case, method): `intensity` (FLOP/B), `rate`, `rate_low`, `rate_high` (TFLOP/s at median, p90, p10 time)
    of one rank's product alone, by the FLOPs and bytes of the method's cost.
    """
    costs = {name: name for name in ("flops", "bytes_read", "bytes_written")}
    table = frames.medians(frame, axes, product="compute_kernel", **costs).dropna(subset="product")
    table["intensity"] = table["flops"] / (table["bytes_read"] + table["bytes_written"])
    for name, time in (("rate", "product"), ("rate_low", "product p90"), ("rate_high", "product p10")):
        table[name] = table["flops"] / table[time] / 1e9
    return table[table["intensity"].gt(0)]


def ceilings(frame: pd.DataFrame) -> dict[str, float]:
    """Median of each measured ceiling, as "copy_bandwidth" (GB/s) and "gemm_rate" (TFLOP/s)."""
    rows = frames.valid(frame)
    return rows[rows["method"].eq(CEILING)].groupby("metric")["value"].median().to_dict()


CLAIM = "{label}'s product reaches {rate} TFLOP/s, {share}% of the GEMM ceiling"
NOTE = "A ceiling is the median of one copy and one GEMM shape, so a point can lie a few percent above it."


def roofline(frame: pd.DataFrame, axes: Axes, claim: str = CLAIM, note: str = "") -> Figure:
    """Achieved TFLOP/s of each method's product against arithmetic intensity, under ceilings of the same run. `claim`:
    the title where there is one, with {label}, {rate} and {share} of `axes.under`'s best.
    """
    metrics = ["compute_kernel", "flops", "bytes_read", "bytes_written"]
    chosen, setting = frames.focus(frame, axes, metrics=metrics)
    table = roofline_points(chosen, axes)
    if table.empty:
        return figures.empty("Roofline", "no valid product time with its FLOPs and bytes in these records")
    roof = ceilings(chosen)
    copy, gemm = roof.get("copy_bandwidth"), roof.get("gemm_rate")
    known, title = "No ceiling was measured.", "Achieved rate of each product under the measured ceilings"
    ours = table.loc[table["method"].eq(axes.under), "rate"]
    if gemm and len(ours) and not frames.no_claim(table):
        share = f"{100 * ours.max() / gemm:.0f}"
        title = claim.format(label=axes.label(axes.under), rate=_three(ours.max()), share=share)
    if copy and gemm:
        known = f"Ceilings: copy {_three(copy)} GB/s, dense GEMM {_three(gemm)} TFLOP/s."
    with figures.drawing(
        *(7.6, 5.0, title),
        *(frames.no_claim(table), setting, "a point a case; bar: p10 to p90"),
        f"beside {axes.short(axes.under)}'s: {axes.header('size')}, {axes.header(axes.y)}" * bool(len(ours)),
        alt=f"Log-log points under a roof. {known}",
        note=note + NOTE,
    ) as (fig, grid):
        ax = grid[0, 0]
        ax.set_xscale("log")
        ax.set_yscale("log")
        for method in axes.ordered(table["method"]):
            points, look, ours = table[table["method"].eq(method)], axes.look(method), method == axes.under
            spread = [points["rate"] - points["rate_low"], points["rate_high"] - points["rate"]]
            how = dict(color=look.colour, marker=look.marker, markersize=6.5 if ours else 5.5, zorder=4 if ours else 3)
            how |= dict(markeredgecolor="white", markeredgewidth=0.6, elinewidth=0.9, alpha=0.9, linestyle="")
            ax.errorbar(points["intensity"], points["rate"], spread, label=look.label, **how)
        left, right = table["intensity"].min() / 1.6, table["intensity"].max() * 1.6
        if copy and gemm:
            x = np.array([left, np.clip(gemm * 1e3 / copy, left, right), right])
            label = f"copy {_three(copy)} GB/s,\ndense GEMM {_three(gemm)} TFLOP/s"
            ax.plot(x, np.minimum(copy * x / 1e3, gemm), color=INK, linewidth=1.5, zorder=2, label=label)
        ax.set_xlim(left, right)
        ax.set_xlabel("arithmetic intensity of one rank's product (FLOP / byte)")
        ax.set_ylabel("achieved on one rank (TFLOP/s)")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.grid(True, which="major")
        ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
        ours = table["method"].eq(axes.under)
        points, others = (table.loc[some, ["intensity", "rate"]].to_numpy(float) for some in (ours, ~ours))
        if len(points):
            names = zip(axes.x_text(table[ours]), table.loc[ours, axes.y], strict=True)
            figures.name_points(ax, points, [f"{x}, {y}" for x, y in names], others)
    return fig


def _three(value: float) -> str:
    """4256.4 -> "4256", 0.41703 -> "0.417"."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


_DOT = dict(marker="o", color=INK, markeredgecolor="white", markersize=8, linestyle="", zorder=5)
BINDS = {"bytes": "moving bytes", "arithmetic": "arithmetic", "link": "the link"}
# Okabe and Ito's palette, told apart by the hatch too, so that the figure can be read in grey.
_WORK, _LINK = (
    dict(facecolor=c, hatch=h, edgecolor="white", lw=0.4) for c, h in (("#56B4E9", ""), ("#009E73", "...."))
)


def floors_figure(table: pd.DataFrame, axes: Axes, source: str = "", run: str = "") -> Figure:
    """A bar a method of one case of a dry run, ms: its work, as bytes or arithmetic bind each piece of it, and the link
    after it, hatched. A dot is the time of the column `measured` (ms), which `run` measured.
    """
    known = table[table["floor_whole"].notna()] if "floor_whole" in table else table.iloc[:0]
    if known.empty:
        return figures.empty("Predicted floors", "no ceilings are known for this machine, so no floor can be told")
    methods = axes.ordered(table["method"])
    known = known.assign(measured=known["measured"] if run else np.nan)
    rows, case = table.assign(measured=known["measured"]).set_index("method").loc[methods[::-1]], known.iloc[0]
    most = known[["floor_whole", "measured"]].max(axis=None)
    times = {name: f"{milliseconds(value)} measured" for name, value in rows["measured"].dropna().items()}
    whole = rows["floor_whole"].map(milliseconds)
    bars = {method: "cannot run" for method in methods}
    for method, row in rows[rows["floor_whole"].notna()].iterrows():
        bars[method] = f"{whole[method]} (link {milliseconds(row['floor_link'])}; {row['bound']} binds)"
        bars[method] += f"; {times[method]}" if method in times else ""
    with figures.drawing(
        *(8.2, 0.95 + 0.33 * len(methods), _floors_title(known.set_index("method"), axes)),
        *(frames.no_claim(known), axes.case(case), frames.setting(case, axes)),
        alt="Horizontal bars of predicted floors. " + " ".join(f"{axes.label(m)}: {text}." for m, text in bars.items()),
        note="A floor is a prediction: cost / ceiling, nothing overlapped."
        + (f" Ceilings: {source}." if source else "")
        + (f" Dots: medians of {run}." if run else ""),
    ) as (fig, grid):
        ax = grid[0, 0]
        for place, (method, row) in enumerate(rows.iterrows()):
            if pd.isna(row["floor_whole"]):
                why = textwrap.shorten(row["unsupported"], 72, placeholder=" …")
                ax.text(0, place, f" cannot run: {why}", va="center", fontsize=8, color=MUTED)
                continue
            work = row["floor_whole"] - row["floor_link"]
            ax.barh(place, work, height=0.68, **_WORK)
            ax.barh(place, row["floor_link"], left=work, height=0.68, **_LINK)
            ax.plot([row["measured"]], [place], **_DOT)
            end = np.nanmax([row["floor_whole"], row["measured"]]) + 0.02 * most
            text = f"{whole[method]}, bound by {BINDS[row['bound']]}"
            text = f"{times[method]}; floor {text}" if method in times else text
            ax.text(end, place, text, va="center", fontsize=8.5)
        figures.lines(ax, [axes.label(method) for method in rows.index])
        ax.set(xlim=(0, (2 if times else 1.42) * most), ylim=(-0.55, len(methods) - 0.45))
        ax.set_xlabel(f"predicted floor of {axes.times[case['work']].words} (time, lower is better)")
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(FuncFormatter(milliseconds))
        ax.grid(True, axis="x")
        patches = [Patch(**_WORK, label="bytes or arithmetic")]
        patches += [Patch(**_LINK, label="the link")] if known["floor_link"].gt(0).any() else []
        patches += [Line2D([], [], **_DOT, label="measured")] if run else []
        ax.legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(patches), fontsize=8.5)
    return fig


def _floors_title(known: pd.DataFrame, axes: Axes) -> str:
    if not {axes.under, axes.over} <= set(known.index):
        best = known["floor_whole"].idxmin()
        return f"The lowest floor is {axes.label(best)}'s, bound by {BINDS[known.loc[best, 'bound']]}"
    ratio = known.loc[axes.under, "floor_whole"] / known.loc[axes.over, "floor_whole"]
    word = "equals" if abs(ratio - 1) < 0.005 else f"is {ratio:.2f} of"
    binds = f"{BINDS[known.loc[axes.under, 'bound']]} binds it most"
    title = f"{axes.short(axes.under)}'s floor {word} {axes.short(axes.over)}'s; {binds}"
    speed = known.loc[axes.over, "measured"] / known.loc[axes.under, "measured"]
    return title if np.isnan(speed) else f"{title}; measured, it has {speed:.2f} of its speed"
