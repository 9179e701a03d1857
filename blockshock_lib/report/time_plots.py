"""Figures of time: against N, and split into compute, exposed communication and host overhead."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from blockshock_lib.report import cells, figures, labels
from blockshock_lib.report.figures import FAINT, INK, MUTED

_LEADS = ("row_parallel", "block_shock")


def milliseconds(value: float, _position: int = 0) -> str:
    """0.00812 -> "8.1 µs", 12.7 -> "13 ms": two digits in the nearer unit."""
    for unit, name in ((1e3, "s"), (1, "ms"), (1e-3, "µs"), (1e-6, "ns")):
        if abs(value) >= unit * 0.995:
            scaled = value / unit
            return f"{scaled:.0f} {name}" if scaled >= 9.95 else f"{scaled:.1f}".removesuffix(".0") + f" {name}"
    return f"{value:g}"


def time_vs_n(frame: pd.DataFrame, metric: str = "forward_kernel") -> Figure:
    """Median time (log) against N (log2), one panel a B (and optimizer), p10 to p90 as a band, one line a method.

    Rectangular weights stand at sqrt(in * out features). One setting (mask, dtype, ...) is drawn, which the subtitle
    names. On a CPU a "kernel time" is that of plain calls in a loop, and the axis says so.
    """
    metric = cells.time_metric(frame, metric)
    timed = frame[frame["metric"].isin([metric, "check"])] if len(frame) else frame
    chosen, setting = cells.focus(timed, panels=("optimizer",))
    table = cells.summary(chosen, metric)
    if table.empty:
        return figures.empty("Time against N", f"no valid {metric.replace('_', ' ')} in these records")
    name, work = cells.time_name(table, metric), cells.work(metric)
    optimizers = labels.ordered(table["optimizer"], labels.OPTIMIZERS)
    places = [(optimizer, batch) for optimizer in optimizers for batch in sorted(table["batch"].unique())]
    methods = labels.methods_in(table["method"])
    # The legend takes the last place of the grid where one is over; else it lies below.
    columns = 2 if len(places) == 4 else min(3, len(places) + (len(places) < 3))
    height = -(-len(places) // columns)
    spare = columns * height - len(places)
    with figures.theme():
        fig = figures.canvas(
            3.4 * columns,
            2.75 * height + (0 if spare else 0.5),
            _fastest_claim(table) or f"Time of {work} against N",
            figures.subtitle(
                cells.no_claim(table), setting, "line: median, band: p10 to p90, slowest rank; scales differ"
            ),
            _time_alt(table, methods, name),
        )
        axes = fig.subplots(height, columns, squeeze=False).ravel()
        for ax, (optimizer, batch) in zip(axes, places, strict=False):
            _time_panel(ax, table[table["optimizer"].eq(optimizer) & table["batch"].eq(batch)], methods)
            ax.set_title(", ".join(filter(None, [labels.optimizer(optimizer), f"B = {batch}"])))
            _time_axes(ax, table)
        square = table["in_features"].eq(table["out_features"]).all()
        for place, ax in enumerate(axes[: len(places)]):
            if place + columns >= len(places):
                ax.set_xlabel("N (in = out features)" if square else "√(in · out features)")
            if place % columns == 0:
                ax.set_ylabel(name)
        for ax in axes[len(places) :]:
            ax.set_axis_off()
        handles = [axes[0].plot([], [], **_line(method), label=labels.label(method))[0] for method in methods]
        look = dict(fontsize=9, handlelength=2.6)
        if spare:
            axes[len(places)].legend(handles=handles, loc="center", labelspacing=0.7, **look)
        else:
            figures.legend_below(fig, handles, 2 * columns, **look)
    return fig


def _fastest_claim(table: pd.DataFrame) -> str:
    """Which method on all GPUs has the lowest median in how many cells; "" where that is no claim or no contest."""
    several = table[table["method"].ne("dense")]
    if cells.no_claim(table) or several["method"].nunique() < 2:
        return ""
    fastest = several.loc[several.groupby("case", sort=False)["median"].idxmin(), "method"].value_counts()
    best, total = fastest.index[0], int(fastest.sum())
    claim = f"By median, {labels.label(best)} is the fastest multi-GPU method in {fastest[best]} of {total} cells"
    if best == "block_shock" or "block_shock" not in set(several["method"]):
        return claim
    return f"{claim}, Block-Shock in {fastest.get('block_shock', 0) or 'none'}"


def _line(method: str) -> dict:
    look = labels.style(method)
    lead = method in _LEADS
    return dict(
        color=look.colour,
        marker=look.marker,
        linewidth=2.6 if lead else 1.1,
        markersize=7.5 if lead else 4.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
        # The two that the question is about lie broad below; the thin ones on top stay visible where they coincide.
        zorder=3 if lead else 4,
    )


def _time_panel(ax: Axes, panel: pd.DataFrame, methods: list[str]) -> None:
    for method in methods:
        line = panel[panel["method"].eq(method)].sort_values("size")
        if line.empty:
            continue
        ax.fill_between(
            line["size"], line["p10"], line["p90"], color=labels.style(method).colour, alpha=0.22, linewidth=0
        )
        ax.plot(line["size"], line["median"], **_line(method))
    ax.grid(True, axis="y")


def _time_axes(ax: Axes, table: pd.DataFrame) -> None:
    sizes = sorted(table["size"].unique())
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(sizes[0] / 1.12, sizes[-1] * 1.12)
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(milliseconds))
    ax.yaxis.set_minor_locator(NullLocator())


def _time_alt(table: pd.DataFrame, methods: list[str], name: str) -> str:
    row = table.loc[(table["size"] * table["batch"]).idxmax()]
    cell = table[table["case"].eq(row["case"])].set_index("method")["median"]
    times = ", ".join(f"{labels.label(m)} {milliseconds(cell[m])}" for m in methods if m in cell)
    at = ", ".join(filter(None, [row["shape"], f"B={row['batch']}", labels.optimizer(row["optimizer"])]))
    return f"Lines of {name} against N, one panel a B. At {at}: {times}."


_PARTS = {
    "compute": ("#3B6FA0", ""),
    "exposed communication": ("#E6A23C", ""),
    "host overhead": ("#C9C9C9", ""),
    "not told apart (no kernel time)": ("#E3E3E3", "////"),
}


def parts(frame: pd.DataFrame) -> pd.DataFrame:
    """Median ms of a forward's parts, a row a (case, method).

    compute = the product alone; exposed communication = kernel - compute, at least 0; host overhead = call - kernel.
    The last two are one part on a CPU, whose "kernel" rows are plain calls too, and where there is no kernel time.
    `low` and `high` are p10 and p90 of the whole (call time, else kernel time).

    `adds` is False where kernel - compute falls short of the reduction measured alone by more than that one's p10 to
    p90: a layer that overlaps nothing cannot hide it, so the two graphs ran at other clocks or with other launch gaps.
    Where the batch was cut it can, and what is exposed is what it could not hide.
    """
    found = {name: cells.summary(frame, name) for name in ("forward_call", "forward_kernel", "compute_kernel")}
    whole = found["forward_call"] if len(found["forward_call"]) else found["forward_kernel"]
    keys = ["case", "method"]
    table = whole.rename(columns={"median": "whole", "p10": "low", "p90": "high"})
    for name in ("forward_kernel", "compute_kernel"):
        table = table.merge(found[name][[*keys, "median"]].rename(columns={"median": name}), on=keys, how="left")
    reduce = cells.summary(frame, "reduce_kernel").rename(columns={"median": "reduce"})
    reduce["reduce_spread"] = reduce["p90"] - reduce["p10"]
    table = table.merge(reduce[[*keys, "reduce", "reduce_spread"]], on=keys, how="left")
    kernel, compute = table["forward_kernel"].astype(float), table["compute_kernel"].astype(float)
    kernel = kernel.mask(table["device"].eq("cpu"))
    table["adds"] = ~(table["reduce"].astype(float) - (kernel - compute)).gt(table["reduce_spread"].astype(float))
    whole = table["whole"].astype(float)
    forward = cells.samples(frame, "forward_kernel")
    cut = forward[~forward["detail"].isin(["", "1"])] if len(forward) else forward
    table["adds"] |= pd.MultiIndex.from_frame(table[keys]).isin(pd.MultiIndex.from_frame(cut[keys]))
    known = compute.fillna(0).clip(upper=whole)
    table["compute"] = known
    table["exposed communication"] = (kernel - known).clip(lower=0).fillna(0)
    table["host overhead"] = (whole - kernel.clip(lower=known)).clip(lower=0).fillna(0)
    table["not told apart (no kernel time)"] = (whole - known).where(kernel.isna(), 0.0)
    return table


def stacked(frame: pd.DataFrame, batches: tuple[int, ...] | None = None) -> Figure:
    """Compute, exposed communication and host overhead of each method, a panel a (B, N), whiskers p10 to p90 of all.

    `batches` picks the B to draw: the smallest, middle and largest without it. Each panel has its own scale.
    """
    metrics = ["forward_call", "forward_kernel", "compute_kernel", "reduce_kernel", "check"]
    chosen, setting = cells.focus(frame[frame["metric"].isin(metrics)] if len(frame) else frame)
    table = parts(chosen)
    if table.empty:
        return figures.empty("Where the time goes", "no valid time of a forward in these records")
    have = sorted(table["batch"].unique())
    have = [b for b in have if b in batches] if batches else sorted({have[0], have[(len(have) - 1) // 2], have[-1]})
    table = table[table["batch"].isin(have)]
    if table.empty:
        return figures.empty("Where the time goes", f"no valid time at B in {batches}")
    shapes = list(dict.fromkeys(table["shape"]))[-4:]
    drawn = table[table["shape"].isin(shapes)]
    methods = labels.methods_in(table["method"])[::-1]
    named = [name for name in _PARTS if table[name].gt(0).any()]
    with figures.theme():
        fig = figures.canvas(
            max(6.0, 1.6 + 2.3 * len(shapes)),
            0.5 + (0.42 + 0.21 * len(methods)) * len(have),
            _parts_title(drawn),
            figures.subtitle(
                cells.no_claim(table),
                setting,
                "medians, slowest rank; whisker: p10 to p90 of the call; scales differ",
                "" if drawn["adds"].all() else "hatched: the parts do not add, clocks or launch gaps differed",
            ),
            _parts_alt(table),
        )
        axes = fig.subplots(len(have), len(shapes), squeeze=False, sharey=True)
        for i, batch in enumerate(have):
            for j, shape in enumerate(shapes):
                panel = table[table["batch"].eq(batch) & table["shape"].eq(shape)].set_index("method")
                _parts_panel(axes[i, j], panel, methods, named)
                square = shape.split("x")[0] == shape.split("x")[-1]
                axes[i, j].set_title(f"N={shape.split('x')[0]}, B={batch}" if square else f"{shape}, B={batch}")
        patches = [
            Patch(facecolor=_PARTS[name][0], hatch=_PARTS[name][1], edgecolor="white", label=name) for name in named
        ]
        fig.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8.5)
    return fig


def _parts_panel(ax: Axes, panel: pd.DataFrame, methods: list[str], named: list[str]) -> None:
    rows = panel.reindex(methods)
    start = pd.Series(0.0, index=methods)
    for name in named:
        colour, hatch = _PARTS[name]
        width = rows[name].astype(float).fillna(0)
        ax.barh(
            range(len(methods)),
            width,
            left=start,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.4,
            height=0.72,
        )
        start = start + width
    odd = [place for place, method in enumerate(methods) if method in panel.index and not panel.loc[method, "adds"]]
    ax.barh(odd, start.iloc[odd], height=0.72, facecolor="none", edgecolor=INK, hatch="////", linewidth=0, alpha=0.55)
    ax.hlines(range(len(methods)), rows["low"].astype(float), rows["high"].astype(float), color=INK, linewidth=1.4)
    ax.set_yticks(range(len(methods)), [labels.label(method) for method in methods])
    for place, method in enumerate(methods):
        if method not in panel.index:
            ax.text(0, place, " not run", va="center", fontsize=7.5, color=MUTED)
    ax.xaxis.set_major_locator(MaxNLocator(3, prune=None))
    ax.xaxis.set_major_formatter(FuncFormatter(milliseconds))
    ax.set_xlim(left=0)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=8)
    ax.spines["left"].set_visible(False)
    ax.grid(True, axis="x", color=FAINT, linewidth=0.6)


def _largest(table: pd.DataFrame) -> pd.DataFrame:
    row = table.loc[(table["size"] * table["batch"].astype(float)).idxmax()]
    return table[table["case"].eq(row["case"])].set_index("method")


def _parts_title(table: pd.DataFrame) -> str:
    ours = table[table["method"].eq("block_shock") & table["forward_kernel"].notna() & table["adds"]]
    if cells.no_claim(table) or ours.empty:
        return "Where the time of a forward goes"
    row = _largest(ours).loc["block_shock"]
    share = 100 * row[list(_PARTS)].astype(float) / row[list(_PARTS)].astype(float).sum()
    most = share.idxmax()
    return f"At {row['shape']}, B={row['batch']}, {share[most]:.0f}% of Block-Shock's call is {most}"


def _parts_alt(table: pd.DataFrame) -> str:
    cell = _largest(table)
    said = [
        f"{labels.label(method)}: " + ", ".join(f"{name} {milliseconds(row[name])}" for name in _PARTS if row[name] > 0)
        for method, row in cell.iterrows()
    ]
    first = cell.iloc[0]
    return f"Stacked bars of a forward's time. At {first['shape']}, B={first['batch']}: {'; '.join(said)}."
