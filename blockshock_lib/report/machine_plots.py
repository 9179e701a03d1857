"""What the machine allows, and what was reached: the roofline."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from blockshock_lib.report import figures, frames
from blockshock_lib.report.axes import CEILING, Axes
from blockshock_lib.report.figures import INK


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
        *(7.6, 4.4, title),
        *(frames.no_claim(table), setting, "a point a case; bar: p10 to p90"),
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
    return fig


def _three(value: float) -> str:
    """4256.4 -> "4256", 0.41703 -> "0.417"."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
