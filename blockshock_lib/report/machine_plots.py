"""Figures against what the machine allows: memory against its formula, and the roofline under measured ceilings."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from blockshock_lib.report import cells, figures, labels
from blockshock_lib.report.figures import INK, MUTED

_MEMORY = ["weight_bytes", "weight_bytes_formula", "peak_bytes", "peak_bytes_formula"]


def byte_text(value: float) -> str:
    """3355443200 -> "3.125 GiB": four digits in the nearest unit."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 0.9 * 1024**power:
            return f"{value / 1024**power:.4g} {name}"
    return f"{value:.0f} B"


def memory_bars(frame: pd.DataFrame) -> Figure:
    """Bytes of weights and peak on the fullest GPU, a bar a method, the formula as a black tick; the largest case."""
    chosen, setting = cells.focus(frame[frame["metric"].isin([*_MEMORY, "check"])] if len(frame) else frame)
    rows = cells.valid(chosen)
    rows = rows[rows["metric"].isin(_MEMORY)]
    if rows.empty:
        return figures.empty("Memory", "no valid memory row in these records")
    case = rows.loc[(cells.size(rows) * rows["batch"].astype(float)).idxmax()]
    wide = rows[rows["case"].eq(case["case"])].pivot_table(
        index="method", columns="metric", values="value", aggfunc="max"
    )
    wide = wide.reindex(columns=_MEMORY, index=labels.methods_in(wide.index)[::-1]).astype(float)
    place = "process" if case["device"] == "cpu" else "GPU"
    shown = [name for name in ("weight_bytes", "peak_bytes") if wide[name].notna().any()]
    if not shown:
        return figures.empty("Memory", "no measured bytes in these records")
    with figures.theme():
        fig = figures.canvas(
            4.1 * len(shown) + 0.9,
            0.75 + 0.34 * len(wide),
            _memory_title(wide, case, _holds_twice(frame, case)),
            figures.subtitle(cells.no_claim(rows), f"{case['shape']}, B={case['batch']}", setting),
            _memory_alt(wide, shown),
        )
        axes = fig.subplots(1, len(shown), squeeze=False, sharey=True)[0]
        work = cells.WORK[{"phase2": "pass", "phase3": "step"}.get(case["phase"], "forward")]
        one = case["phase"] in ("phase2", "phase3")  # what dX reads beside them is in the peak
        titles = {"weight_bytes": "Weights of the forward" if one else "Weights", "peak_bytes": f"Peak of {work}"}
        for ax, name in zip(axes, shown, strict=True):
            _memory_panel(ax, wide, name, titles[name], place)
        tick = Line2D([], [], color=INK, marker="|", markersize=11, markeredgewidth=2, linestyle="", label="formula")
        axes[-1].legend(handles=[tick], loc="lower right", bbox_to_anchor=(1, 1), fontsize=8.5, borderpad=0)
    return fig


def _memory_panel(ax, wide: pd.DataFrame, name: str, title: str, place: str) -> None:
    unit, word = next(
        ((1024**p, w) for p, w in ((3, "GiB"), (2, "MiB"), (1, "KiB")) if wide[name].max() >= 1024**p), (1, "B")
    )
    heights = range(len(wide))
    ax.barh(heights, wide[name] / unit, color=[labels.style(method).colour for method in wide.index], height=0.66)
    ax.plot(
        wide[f"{name}_formula"] / unit, heights, color=INK, marker="|", markersize=15, markeredgewidth=2, linestyle=""
    )
    reach = max(wide[name].max(), wide[f"{name}_formula"].max() if wide[f"{name}_formula"].notna().any() else 0) / unit
    for height, (_, row) in zip(heights, wide.iterrows(), strict=True):
        if pd.notna(row[name]):
            end = np.nanmax([row[name], row[f"{name}_formula"]]) / unit
            ax.text(end + 0.025 * reach, height, f"{row[name] / unit:.4g} {word}", va="center", fontsize=8.5)
        else:
            ax.text(0, height, " not measured", va="center", fontsize=8, color=MUTED)
    ax.set_xlim(0, 1.27 * reach)
    ax.set_yticks(heights, [labels.label(method) for method in wide.index])
    ax.set_title(title)
    ax.set_xlabel(f"{word} on the fullest {place}")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def _holds_twice(frame: pd.DataFrame, case: pd.Series) -> bool:
    """Whether Block-Shock multiplies dX in 2:4 in this case, from a second packed copy as large as the first."""
    rows = frame[frame["case"].eq(case["case"]) & frame["method"].eq("block_shock")]
    return bool((rows["metric"].eq("dx_kernel") & rows["detail"].eq("2:4")).any())


def _memory_title(wide: pd.DataFrame, case: pd.Series, twice: bool) -> str:
    weight = wide["weight_bytes"]
    if weight.get("block_shock", np.nan) > 0 and weight.get("dense", np.nan) > 0:
        ours, whole = weight["block_shock"] * (2 if twice else 1), weight["dense"]
        title = f"Block-Shock holds {byte_text(ours)} of weights, {ours / whole:.4g} of dense's {byte_text(whole)}"
        half = weight.get("row_parallel", np.nan)
        title = f"With the copy for dX, {title}" if twice else title
        return title + (f"; B1 holds {byte_text(half)}" if half > 0 else "")
    return f"Memory at {case['shape']}, B={case['batch']}: measured against the formula"


def _memory_alt(wide: pd.DataFrame, shown: list[str]) -> str:
    said = []
    for method, row in wide[::-1].iterrows():
        words = [
            f"{name.split('_')[0]} {byte_text(row[name])} (formula {byte_text(row[f'{name}_formula'])})"
            for name in shown
            if pd.notna(row[name])
        ]
        said.append(f"{labels.label(method)}: {', '.join(words) or 'not measured'}.")
    return "Bars with the formula as a tick. " + " ".join(said)


def roofline_points(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a (case, method): `intensity` (FLOP/B), `rate`, `rate_low`, `rate_high` (TFLOP/s at median, p90, p10 time).

    FLOPs and bytes are those of one rank's product as the method's cost counts them (nonzeros only for a 2:4 product);
    time is the product alone.
    """
    table = cells.summary(frame, "compute_kernel")
    rows = cells.valid(frame)
    rows = rows[rows["metric"].isin(["flops", "bytes_read", "bytes_written"])]
    cost = rows.pivot_table(index=["case", "method"], columns="metric", values="value", aggfunc="max")
    cost = cost.reindex(columns=["flops", "bytes_read", "bytes_written"]).reset_index()
    table = table.merge(cost, on=["case", "method"], how="inner")
    table["intensity"] = table["flops"] / (table["bytes_read"] + table["bytes_written"])
    for name, time in (("rate", "median"), ("rate_low", "p90"), ("rate_high", "p10")):
        table[name] = table["flops"] / table[time] / 1e9
    return table[table["intensity"].gt(0)]


def ceilings(frame: pd.DataFrame) -> dict[str, float]:
    """Median of each measured ceiling: copy_bandwidth (GB/s), gemm_rate (TFLOP/s), allreduce_bandwidth (GB/s)."""
    rows = cells.valid(frame)
    return rows[rows["method"].eq(labels.CEILING)].groupby("metric")["value"].median().to_dict()


def roofline(frame: pd.DataFrame) -> Figure:
    """Achieved TFLOP/s of each method's product against arithmetic intensity, under ceilings of the same run."""
    wanted = ["compute_kernel", "flops", "bytes_read", "bytes_written", "check"]
    if len(frame):
        frame = frame[frame["metric"].isin(wanted) | frame["method"].eq(labels.CEILING)]
    chosen, setting = cells.focus(frame)
    table = roofline_points(chosen)
    if table.empty:
        return figures.empty("Roofline", "no valid product time with its FLOPs and bytes in these records")
    roof = ceilings(chosen)
    copy, gemm = roof.get("copy_bandwidth"), roof.get("gemm_rate")
    methods = labels.methods_in(table["method"])
    known = (
        f"Ceilings: copy {_three(copy)} GB/s, dense GEMM {_three(gemm)} TFLOP/s."
        if copy and gemm
        else "No ceiling was measured."
    )
    with figures.theme():
        fig = figures.canvas(
            7.6,
            4.4,
            _roofline_title(table, gemm),
            figures.subtitle(cells.no_claim(table), setting, "a point a case; bar: p10 to p90"),
            f"Log-log points under a roof. {known}",
            "FLOPs of nonzeros only: a 2:4 product with s = 2 would touch the flat roof. A ceiling is the median of "
            "one copy and one GEMM shape, so a point can lie a few percent above it.",
        )
        ax = fig.subplots()
        ax.set_xscale("log")
        ax.set_yscale("log")
        for method in methods:
            points, look = table[table["method"].eq(method)], labels.style(method)
            errors = [points["rate"] - points["rate_low"], points["rate_high"] - points["rate"]]
            ax.errorbar(
                *(points["intensity"], points["rate"], errors),
                linestyle="",
                color=look.colour,
                marker=look.marker,
                markersize=6.5 if method == "block_shock" else 5.5,
                markeredgecolor="white",
                markeredgewidth=0.6,
                elinewidth=0.9,
                alpha=0.9,
                label=look.label,
                zorder=4 if method == "block_shock" else 3,
            )
        left, right = table["intensity"].min() / 1.6, table["intensity"].max() * 1.6
        if copy and gemm:
            left = _roof(ax, left, right, copy, gemm)
        ax.set_xlim(left, right)
        ax.set_xlabel("arithmetic intensity of one rank's product (FLOP / byte)")
        ax.set_ylabel("achieved on one rank (TFLOP/s)")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.grid(True, which="major")
        ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
    return fig


def _roof(ax, left: float, right: float, copy: float, gemm: float) -> float:
    """min(bandwidth * intensity, GEMM rate), drawn with its labels; GB/s * FLOP/B = GFLOP/s.

    Returns the left limit of the axis: `left`, or less where the label beside the slope needs room.
    """
    ridge = gemm * 1e3 / copy
    slope_end = min(ridge, right)
    look = dict(ha="right", fontsize=8)
    if left < ridge:
        left = min(left, slope_end / 8)
        ax.text(slope_end / 2.2, copy * slope_end / 2e3, f"copy {_three(copy)} GB/s", va="center", **look)
    x = np.array(sorted({left, max(slope_end, left), right}))
    ax.plot(x, np.minimum(copy * x / 1e3, gemm), color=INK, linewidth=1.5, zorder=2)
    if right > ridge:
        # Well above the roof, on and a little above which points may lie.
        ax.text(right / 1.05, gemm * 1.5, f"dense GEMM {_three(gemm)} TFLOP/s", va="bottom", **look)
    ax.set_ylim(top=max(ax.get_ylim()[1], gemm * 2.3))
    return left


def _three(value: float) -> str:
    """4256.4 -> "4256", 0.41703 -> "0.417": at least three significant digits, never an exponent for a rate."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _roofline_title(table: pd.DataFrame, gemm: float | None) -> str:
    if cells.no_claim(table) or not gemm or "block_shock" not in set(table["method"]):
        return "Achieved rate of each product under the measured ceilings"
    best = table[table["method"].eq("block_shock")].sort_values("rate").iloc[-1]
    share = 100 * best["rate"] / gemm
    return (
        f"Block-Shock's 2:4 product reaches {_three(best['rate'])} TFLOP/s of nonzeros, {share:.0f}% of the "
        "dense ceiling"
    )
