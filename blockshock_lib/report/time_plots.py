"""Figures of time: against the size, and split into compute, exposed communication and host overhead."""

import matplotlib.axes
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from blockshock_lib.report import figures, frames
from blockshock_lib.report.axes import Axes
from blockshock_lib.report.figures import FAINT, INK, MUTED, milliseconds


def time_vs_n(frame: pd.DataFrame, axes: Axes, metric: str = "") -> Figure:
    """Median time (log) of one setting against the size (log2), p10 to p90 as a band: a panel a value of `axes.y` (and
    of `axes.panels`), a line a method. `metric` "": kernel time of the narrowest work.
    """
    metric = frames.time_metric(frame, metric or f"{axes.stem}_kernel")
    chosen, setting = frames.focus(frame, axes, axes.panels, [metric])
    table, size = frames.summary(chosen, axes, metric), axes.header("size")
    if table.empty:
        return figures.empty(f"Time against {size}", f"no valid {metric.replace('_', ' ')} in these records")
    name, stem = frames.time_name(table, axes, metric), metric.rpartition("_")[0]
    work = axes.times[stem].words if stem in axes.times else stem.replace("_", " ")
    table["panel"], panels = frames.panels(table, axes)
    places = [(panel, y) for panel in panels for y in sorted(table[axes.y].unique())]
    methods, sizes = axes.ordered(table["method"]), sorted(table["size"].unique())
    # The legend takes the last place of the grid where one is over; else it lies below.
    columns = 2 if len(places) == 4 else min(3, len(places) + (len(places) < 3))
    height = -(-len(places) // columns)
    spare = columns * height - len(places)
    cell = frames.largest(table, axes)
    times = ", ".join(f"{axes.label(m)} {milliseconds(cell.loc[m, 'median'])}" for m in methods if m in cell.index)
    with figures.drawing(
        3.4 * columns,
        2.75 * height + (0 if spare else 0.5),
        _fastest_claim(table, axes) or f"Time of {work} against {size}",
        *(frames.no_claim(table), setting, "line: median, band: p10 to p90, slowest rank; scales differ"),
        alt=f"Lines of {name} against {size}, one panel a {axes.header(axes.y)}. "
        f"At {frames.where(cell.iloc[0], axes)}: {times}.",
        rows=height,
        columns=columns,
    ) as (fig, grid):
        grid = grid.ravel()
        for place, (ax, (panel, y)) in enumerate(zip(grid, places, strict=False)):
            _time_panel(ax, table[table["panel"].eq(panel) & table[axes.y].eq(y)], axes, methods, sizes)
            ax.set_title(", ".join(filter(None, [panel, f"{axes.header(axes.y)} = {y}"])))
            if place + columns >= len(places):
                ax.set_xlabel(axes.size_name(table))
            if place % columns == 0:
                ax.set_ylabel(name)
        for ax in grid[len(places) :]:
            ax.set_axis_off()
        handles = [grid[0].plot([], [], **_line(method, axes), label=axes.label(method))[0] for method in methods]
        if spare:
            grid[len(places)].legend(handles=handles, loc="center", labelspacing=0.7, fontsize=9, handlelength=2.6)
        else:
            figures.legend_below(fig, handles, 2 * columns, fontsize=9, handlelength=2.6)
    return fig


def _fastest_claim(table: pd.DataFrame, axes: Axes) -> str:
    """Which method on all GPUs has the lowest median in how many cells; "" where that is no claim or no contest."""
    several = table[table["method"].ne(axes.whole)]
    if frames.no_claim(table) or several["method"].nunique() < 2:
        return ""
    fastest = several.loc[several.groupby("case", sort=False)["median"].idxmin(), "method"].value_counts()
    best, ours, kind = fastest.index[0], axes.under, "multi-GPU method" if axes.whole else "method"
    claim = f"By median, {axes.label(best)} is the fastest {kind} in {fastest[best]} of {fastest.sum()} cells"
    other = best != ours and ours in set(several["method"])
    return claim + (f", {axes.label(ours)} in {fastest.get(ours, 0) or 'none'}" if other else "")


def _line(method: str, axes: Axes) -> dict:
    # The two that the question is about lie broad below; the thin ones on top stay visible where they coincide.
    look, lead = axes.look(method), method in (axes.over, axes.under)
    how = dict(linewidth=2.6, markersize=7.5, zorder=3) if lead else dict(linewidth=1.1, markersize=4.5, zorder=4)
    return how | dict(color=look.colour, marker=look.marker, markeredgecolor="white", markeredgewidth=0.6)


def _time_panel(ax: matplotlib.axes.Axes, panel: pd.DataFrame, axes: Axes, methods: list, sizes: list) -> None:
    for method in methods:
        line = panel[panel["method"].eq(method)].sort_values("size")
        if len(line):
            look = _line(method, axes)
            ax.fill_between(line["size"], line["p10"], line["p90"], color=look["color"], alpha=0.22, linewidth=0)
            ax.plot(line["size"], line["median"], **look)
    ax.grid(True, axis="y")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
    ax.set_xlim(sizes[0] / 1.12, sizes[-1] * 1.12)
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(milliseconds))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())


UNKNOWN = "not told apart (no kernel time)"
_PARTS = {
    "compute": ("#3B6FA0", ""),
    "exposed communication": ("#E6A23C", ""),
    "host overhead": ("#C9C9C9", ""),
    UNKNOWN: ("#E3E3E3", "////"),
}


def parts(frame: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    """Median ms of the parts of the narrowest work, a row a (case, method): compute = the product alone; exposed
    communication = kernel - compute, at least 0; host overhead = call - kernel; the last two are one part on a CPU and
    without a kernel time. `low` and `high`: p10 and p90 of the `whole` (call time, else kernel time). `adds` is False
    where a layer that overlaps nothing (`detail` of its kernel time is "" or "1") has a kernel - compute that falls
    short of the reduction alone by more than that one's p10 to p90: clocks or launch gaps of the two graphs differed.
    """
    keys, own = ["case", "method"], {name: f"{axes.stem}_{name}" for name in ("call", "kernel")}
    table = frames.medians(frame, axes, **own, product="compute_kernel", reduce="reduce_kernel")
    name = "call" if table["call"].notna().any() else "kernel"
    table = table.rename(columns={f"{name} p10": "low", f"{name} p90": "high"}).dropna(subset=[name])
    table["whole"] = whole = table[name]
    kernel = table["kernel"].mask(table["device"].eq("cpu"))
    table["adds"] = ~(table["reduce"] - (kernel - table["product"])).gt(table["reduce p90"] - table["reduce p10"])
    cut = frames.samples(frame, own["kernel"])
    cut = cut[~cut["detail"].isin(["", "1"])]
    table["adds"] |= pd.MultiIndex.from_frame(table[keys]).isin(pd.MultiIndex.from_frame(cut[keys]))
    table["compute"] = known = table["product"].fillna(0).clip(upper=whole)
    table["exposed communication"] = (kernel - known).clip(lower=0).fillna(0)
    table["host overhead"] = (whole - kernel.clip(lower=known)).clip(lower=0).fillna(0)
    table[UNKNOWN] = (whole - known).where(kernel.isna(), 0.0)
    return table


def stacked(frame: pd.DataFrame, axes: Axes) -> Figure:
    """The `parts` of each method, whiskers p10 to p90 of all: a panel for each of the four largest sizes at the
    smallest, middle and largest `axes.y`, each with a scale of its own.
    """
    metrics = [f"{axes.stem}_call", f"{axes.stem}_kernel", "compute_kernel", "reduce_kernel"]
    chosen, setting = frames.focus(frame, axes, metrics=metrics)
    table, whose = parts(chosen, axes), axes.times[axes.stem].words
    if table.empty:
        return figures.empty("Where the time goes", f"no valid time of {whose} in these records")
    have = sorted(table[axes.y].unique())
    have = sorted({have[0], have[(len(have) - 1) // 2], have[-1]})
    table = table[table[axes.y].isin(have)]
    sizes = list(dict.fromkeys(table[axes.x]))[-4:]
    drawn = table[table[axes.x].isin(sizes)]
    methods = axes.ordered(table["method"])[::-1]
    named = [name for name in _PARTS if table[name].gt(0).any()]
    cell = frames.largest(table, axes)
    bars = [
        f"{axes.label(method)}: " + ", ".join(f"{name} {milliseconds(row[name])}" for name in _PARTS if row[name] > 0)
        for method, row in cell.iterrows()
    ]
    title, ours = f"Where the time of {whose} goes", drawn[drawn["method"].eq(axes.under) & drawn["adds"]]
    ours = ours[ours["kernel"].notna()]
    if len(ours) and not frames.no_claim(drawn):
        row = frames.largest(ours, axes).iloc[0]
        times = row[list(_PARTS)].astype(float)
        share = 100 * times.max() / times.sum()
        title = f"At {axes.case(row)}, {share:.0f}% of {axes.label(axes.under)}'s call is {times.idxmax()}"
    with figures.drawing(
        *(max(6.0, 1.6 + 2.3 * len(sizes)), 0.5 + (0.42 + 0.21 * len(methods)) * len(have), title),
        *(frames.no_claim(table), setting, "medians, slowest rank; whisker: p10 to p90 of the call; scales differ"),
        "" if drawn["adds"].all() else "hatched: the parts do not add, clocks or launch gaps differed",
        alt=f"Stacked bars of {whose}'s time. At {axes.case(cell.iloc[0])}: {'; '.join(bars)}.",
        rows=len(have),
        columns=len(sizes),
        sharey=True,
    ) as (fig, grid):
        for i, y in enumerate(have):
            for j, size in enumerate(sizes):
                same_size = table[table[axes.x].eq(size)]
                panel = same_size[same_size[axes.y].eq(y)].set_index("method").reindex(methods)
                _parts_panel(grid[i, j], panel, axes, named)
                grid[i, j].set_title(axes.place(same_size.head(1).assign(**{axes.y: y}))[0])
        looks = [(name, *_PARTS[name]) for name in named]
        patches = [Patch(facecolor=face, hatch=hatch, edgecolor="white", label=name) for name, face, hatch in looks]
        fig.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8.5)
    return fig


def _parts_panel(ax: matplotlib.axes.Axes, rows: pd.DataFrame, axes: Axes, named: list[str]) -> None:
    places, end = range(len(rows)), pd.Series(0.0, index=rows.index)
    for name in named:
        (colour, hatch), width = _PARTS[name], rows[name].astype(float).fillna(0)
        look = dict(color=colour, hatch=hatch, edgecolor="white", linewidth=0.4, height=0.72)
        ax.barh(places, width, left=end, **look)
        end = end + width
    odd = rows["adds"].eq(False).to_numpy().nonzero()[0]  # not where a method did not run
    ax.barh(odd, end.iloc[odd], height=0.72, facecolor="none", edgecolor=INK, hatch="////", linewidth=0, alpha=0.55)
    ax.hlines(places, rows["low"].astype(float), rows["high"].astype(float), color=INK, linewidth=1.4)
    figures.lines(ax, [axes.label(method) for method in rows.index])
    for place in places:
        if pd.isna(rows["case"].iloc[place]):
            ax.text(0, place, " not run", va="center", fontsize=7.5, color=MUTED)
    ax.xaxis.set_major_locator(MaxNLocator(3, prune=None))
    ax.xaxis.set_major_formatter(FuncFormatter(milliseconds))
    ax.set_xlim(left=0)
    ax.tick_params(axis="x", labelsize=8)
    ax.grid(True, axis="x", color=FAINT, linewidth=0.6)
