"""Time over the baseline's against the size; on (y, size) one method's speed, and which method to use: the fastest,
those that nothing here tells from it, and by how much it leads; and the checks that each passed.
"""

import textwrap
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes as Subplot
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from blockshock_lib.report import answer, figures, frames, verdicts
from blockshock_lib.report.axes import Axes
from blockshock_lib.report.figures import FAINT, INK, PAPER
from blockshock_lib.report.tables import widest
from blockshock_lib.report.verdicts import NO_CLAIM, UNDECIDED

# Orange to blue is told apart with any common colour blindness; both ends are equally far from white.
_SLOW_FAST = LinearSegmentedColormap.from_list("slow_fast", ["#D55E00", "#F3B98E", "#FFFFFF", "#8FBCE0", "#0072B2"])


def time_over(frame: pd.DataFrame, axes: Axes, metric: str = "") -> Figure:
    """Time of each method over the baseline's (log) against the size (log2), with its 99% interval: a panel a value of
    `axes.y` (and of `axes.panels`). `metric` "": kernel time of the narrowest work. Without the baseline, over the
    first method.
    """
    metric = frames.time_metric(frame, metric or f"{axes.stem}_kernel")
    chosen, setting = frames.focus(frame, axes, axes.panels, [metric])
    methods, size = axes.ordered(frames.samples(chosen, metric)["method"]), axes.header("size")
    base = axes.over if axes.over in methods else "".join(methods[:1])
    ratios = [verdicts.ratio(chosen, axes, method, base, metric).assign(method=method) for method in methods]
    if not ratios:
        return figures.empty(f"Time against {size}", f"no valid {metric.replace('_', ' ')} in these records")
    table = pd.concat([one for one in ratios if len(one)], ignore_index=True)
    table.loc[table["method"].eq(base), ["low", "high"]] = 1.0  # by definition: no run tells it better
    table["panel"], panels = frames.panels(table, axes)
    places = [(panel, y) for panel in panels for y in sorted(table[axes.y].unique())]
    name, sizes = frames.time_name(table, axes, metric), sorted(table["size"].unique())
    cell = frames.largest(table, axes)
    columns = 2 if len(places) == 4 else min(3, len(places))
    height = -(-len(places) // columns)
    others = [method for method in methods if method in cell.index and method != base]
    times = ", ".join(f"{axes.label(method)} {verdicts.interval_text(cell.loc[method])}" for method in others)
    with figures.drawing(
        max(5.1, 3.4 * columns),
        2.5 * height + 0.5,
        f"Time over that of {axes.label(base)}: below 1 is faster",
        *(frames.no_claim(table), setting, name, "bar: 99% interval"),
        alt=f"Lines of {name} over that of {axes.label(base)} against {size}, one panel a {axes.header(axes.y)}. "
        f"At {frames.where(cell.iloc[0], axes)}: {times}.",
        rows=height,
        columns=columns,
        sharey=True,
    ) as (fig, grid):
        grid = grid.ravel()
        for place, (ax, (panel, y)) in enumerate(zip(grid, places, strict=False)):
            _time_panel(ax, table[table["panel"].eq(panel) & table[axes.y].eq(y)], axes, methods, sizes)
            ax.set_title(", ".join(filter(None, [panel, f"{axes.header(axes.y)} = {y}"])))
            if place + columns >= len(places):
                ax.set_xlabel(axes.size_name(table))
            if place % columns == 0:
                ax.set_ylabel(f"time over {axes.short(base)}'s")
        for ax in grid[len(places) :]:
            ax.set_axis_off()
        handles = [grid[0].plot([], [], **_line(method, axes), label=axes.label(method))[0] for method in methods]
        fig.legend(handles=handles, loc="outside lower center", ncols=columns + 1, fontsize=9, handlelength=2.6)
    return fig


def _line(method: str, axes: Axes) -> dict:
    # The two that the question is about lie broad below; the thin ones on top stay visible where they coincide.
    look, lead = axes.look(method), method in (axes.over, axes.under)
    how = dict(linewidth=2.6, markersize=7.5, zorder=3) if lead else dict(linewidth=1.1, markersize=4.5, zorder=4)
    return how | dict(color=look.colour, marker=look.marker, markeredgecolor="white", markeredgewidth=0.6)


def _time_panel(ax: Subplot, panel: pd.DataFrame, axes: Axes, methods: list, sizes: list) -> None:
    for method in methods:
        line = panel[panel["method"].eq(method)].sort_values("size")
        ends = np.array([line["ratio"] - line["low"], line["high"] - line["ratio"]], float)
        ends = np.where(line["low"].gt(0) & line["high"].le(100 * line["low"]), ends.clip(0), 0)  # else no interval
        ax.errorbar(line["size"], line["ratio"], ends, elinewidth=1.1, **_line(method, axes))
    ax.grid(True, axis="y")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
    ax.set_xlim(sizes[0] / 1.12, sizes[-1] * 1.12)
    ends = [*panel["ratio"], *ax.get_ylim()]
    subs = (1.0, 1.5) if max(ends) < 16 * min(ends) else (1.0,)  # more would hide all of them
    ax.yaxis.set_major_locator(LogLocator(base=2, subs=subs))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}×"))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())


def ratio_heatmap(frame: pd.DataFrame, axes: Axes, metric: str = "") -> Figure:
    """Speed of `axes.under` over `axes.over` on (size, y), a panel for each of `axes.panels`; `metric` "": kernel time
    of the narrowest work. Only cells whose interval excludes 1 get colour: blue faster, orange slower.
    """
    metric = frames.time_metric(frame, metric or f"{axes.stem}_kernel")
    names = axes.label(axes.under), axes.label(axes.over)
    chosen, setting = frames.focus(frame, axes, axes.panels, [metric])
    table = verdicts.ratio(chosen, axes, axes.over, axes.under, metric)
    if table.empty:
        return figures.empty(f"{names[0]} against {names[1]}", "no case holds valid times of both")
    spoken = table["outcome"].ne(NO_CLAIM).any()
    note = f"Number: t({names[1]}) / t({names[0]}), above 1 where {names[0]} is faster; below it the 99% interval"
    return cells(
        *(table, axes, _ratio_cell, f"Is {names[0]} faster? {answer.counted(table, names[1])}"),
        *(frames.no_claim(table), setting, frames.time_name(table, axes, metric)),
        alt=" ".join(f"{frames.where(row, axes)}: {verdicts.interval_text(row)}." for row in table.to_dict("records")),
        note=note + (". Hatched: the interval holds 1." if spoken else ". Grey: no claim."),
    )


def cells(
    table: pd.DataFrame, axes: Axes, text: Callable[[dict], tuple], title: str, *parts: str, alt: str, note: str
) -> Figure:
    """A field a row of `table` on (size, y), one panel below the other for each of `axes.panels`. `text`: row -> large
    and small words and the face, a colour, or "" where it is hatched.
    """
    table = table.assign(column=axes.x_text(table), panel=frames.panels(table, axes)[0])
    panels, columns = frames.panels(table, axes)[1], list(dict.fromkeys(table["column"]))
    ys = sorted(table[axes.y].unique(), reverse=True)
    size = 0.8 + 1.08 * max(3, len(columns)), len(panels) * (0.7 + 0.58 * len(ys))
    with figures.drawing(*size, title, *parts, alt=alt, note=note, rows=len(panels)) as (fig, grid):
        for ax, panel in zip(grid[:, 0], panels, strict=True):
            for row in table[table["panel"].eq(panel)].to_dict("records"):
                (large, small, face), x, y = text(row), columns.index(row["column"]), ys.index(row[axes.y])
                hatch = {} if face else dict(hatch="////", edgecolor=FAINT)
                ax.add_patch(Rectangle((x + 0.02, y + 0.03), 0.96, 0.94, facecolor=face or PAPER, lw=0, **hatch))
                look = dict(color=INK, ha="center", linespacing=1.05)
                look["path_effects"] = [withStroke(linewidth=3, foreground=PAPER)] * (not face)
                points = 10 if max(map(len, large.split("\n"))) <= 12 else 8
                seam = y + 0.51 + 0.012 * points * large.count("\n") - 0.1 * small.count("\n")
                how = dict(fontsize=points, fontweight="bold", va="bottom" if small else "center")
                ax.text(x + 0.5, seam, large, **how, **look)
                ax.text(x + 0.5, seam + 0.04, small, fontsize=min(points, 9), va="top", **look)
            ax.set(title=panel, xlim=(0, len(columns)), ylim=(len(ys), 0))
            ax.set_ylabel(axes.y_name() if len(ys) > 2 else axes.header(axes.y))
            ax.set_xticks(np.arange(len(columns)) + 0.5, columns)
            ax.set_yticks(np.arange(len(ys)) + 0.5, ys)
            ax.tick_params(length=0)
            ax.spines[:].set_visible(False)
        grid[-1, 0].set_xlabel(axes.x_name(table))
    return fig


def _ratio_cell(row: dict) -> tuple:
    ratio, _, interval = verdicts.interval_text(row).partition(" ")
    shade = np.clip(np.log2(row["ratio"]) / 3 + 0.5, 0.15, 0.85)  # at the ends ink is hard to read
    face = {UNDECIDED: "", NO_CLAIM: "#F0F0F0"}.get(row["outcome"], _SLOW_FAST(shade))
    return ratio.replace("x", "×"), interval, face


def fastest(frame: pd.DataFrame, axes: Axes, metric: str) -> pd.DataFrame:
    """A row a case, smallest first: its columns, `size` and `best`, the methods with the least `metric`: the first of
    them, and each whose ratio to it is 1 or undecided (`verdicts.ratio`). `next` is the least of the others, "" without
    any, `ratio` what it takes over the first, with its 99% interval `low` to `high`.
    """
    table = frames.summary(frame, axes, metric)
    least = table.sort_values("median", kind="stable").drop_duplicates("case").set_index("case")["method"]
    pairs = [(first, other) for first in sorted(set(least)) for other in set(table["method"]) - {first}]
    found = [
        verdicts.ratio(frame, axes, other, first, metric).assign(method=other, first=first) for first, other in pairs
    ]
    none = pd.DataFrame(columns=["case", "method", "first", "ratio", "low", "high"])
    found = pd.concat(found, ignore_index=True) if found else none
    found = found[found["first"].eq(found["case"].map(least))].sort_values("ratio", kind="stable")
    cases = table.drop_duplicates("case").drop(columns=["method", "median", "p10", "p90"])
    behind = found[found["low"].gt(1)].drop_duplicates("case").set_index("case")
    ties = found[~found["low"].gt(1)].groupby("case")["method"].agg(list)
    cases["best"] = [(least[case], *ties.get(case, [])) for case in cases["case"]]
    cases["next"] = cases["case"].map(behind["method"]).astype(object).fillna("")
    return cases.assign(**{name: cases["case"].map(behind[name]).astype(float) for name in ("ratio", "low", "high")})


def which_to_use(
    frame: pd.DataFrame, axes: Axes, metric: str = "", title: str = "Which is fastest", more: str = ""
) -> Figure:
    """`fastest` on (size, y), a panel for each of `axes.panels`; `metric` "": kernel time of the narrowest work. `more`
    is said at the foot.
    """
    metric = frames.time_metric(frame, metric or f"{axes.stem}_kernel")
    rows = widest(frame, axes) if metric == "energy" else frame
    chosen, setting = frames.focus(rows, axes, axes.panels, [metric])
    table = fastest(chosen, axes, metric)
    if table.empty:
        return figures.empty(title, f"no valid {metric.replace('_', ' ')} in these records")
    no_claim = frames.no_claim(table)
    told = [f"{frames.where(row, axes)}: {fastest_words(row, axes)}." for row in table.to_dict("records")]
    used = axes.ordered({name for names in table["best"] for name in names} | {*table["next"]} - {""})
    what, of = "how many times as long it takes", frames.time_name(table, axes, metric)
    if metric == "energy":
        what, of = "how many times its energy", "joules of one call, all that work for it"
    note = f"Below the best: the next that is no tie, and {what}. Tie: the 99% interval of the ratio holds 1. Named: "
    note += f"{', '.join(axes.label(name) for name in used)}."
    note += f" {axes.short(axes.whole)} needs one device alone." * (axes.whole in used) + more
    text = partial(_fastest_cell, axes=axes, grey=bool(no_claim))
    title = f"{title}: {no_claim or _counted(table['best'], axes)}"
    return cells(table, axes, text, title, setting, of, alt=" ".join(told), note=note)


def _counted(best: pd.Series, axes: Axes) -> str:
    """ "B2 in 9 of 20 cases, A in 4, a tie in 7"; and that the method in question wins none, where that is so."""
    alone = best[best.map(len).eq(1)].map(lambda names: names[0]).value_counts()
    parts = [f"{axes.short(name)} in {alone[name]}" for name in sorted(alone.index, key=lambda name: -alone[name])]
    parts += [f"a tie in {len(best) - alone.sum()}"] if alone.sum() < len(best) else []
    parts[0] += f" of {len(best)} cases"
    mine = sum(axes.under in names for names in best)
    return ", ".join(parts) + f"; {axes.short(axes.under)} in none" * (not mine and axes.under in axes.methods)


def fastest_words(row: Mapping, axes: Axes) -> str:
    """A row of `fastest`: "tie: B1, B2; D permuted dense takes 1.09x [1.06, 1.12]"."""
    behind = f"; {axes.label(row['next'])} takes {verdicts.interval_text(row)}" if row["next"] else ""
    return _named(row["best"], axes) + behind


def _named(names: tuple[str, ...], axes: Axes) -> str:
    return "tie: " * (len(names) > 1) + ", ".join(map(axes.short, names))


def _fastest_cell(row: dict, axes: Axes, grey: bool) -> tuple[str, str, str]:
    best, named = row["best"], _named(row["best"], axes)
    names, small = textwrap.fill(named, 12, break_on_hyphens=False), 14
    if names.count("\n") > 1:
        names, small = textwrap.fill(named, 15, break_on_hyphens=False), 18
    behind = f"{axes.short(row['next'])} {row['ratio']:.2f}×" if row["next"] else ""
    face = "#F0F0F0" if grey or len(best) > 1 else to_hex(0.65 + 0.35 * np.array(to_rgb(axes.look(best[0]).colour)))
    return names, textwrap.fill(behind, small, break_on_hyphens=False), face


_FILL = {"passed": "#CFE8F5", "unsupported": "#EEEEEE", "wrong": "#D55E00"}  # blue, grey, orange: told apart by all


def check_matrix(frame: pd.DataFrame, axes: Axes) -> Figure:
    """Passed of asked checks, a row a method, a column a value of the first of `axes.rows`."""
    rows, column = frames.checks(frame), axes.rows[0]
    if rows.empty:
        return figures.empty("Checks", "nothing was checked")
    methods, values = axes.ordered(rows["method"]), axes.sort(column, rows[column])
    count = rows.groupby(["method", column, "outcome"]).size().unstack(fill_value=0)
    count = count.reindex(columns=list(frames.OUTCOMES), fill_value=0)
    count["wrong"], count["asked"] = count[["timeout", "oom", "failed"]].sum(axis=1), count.sum(axis=1)
    wrong, passed, asked = (int(count[name].sum()) for name in ("wrong", "passed", "asked"))
    title = f"{wrong} of {asked} checks did not pass" if wrong else f"{passed} of {asked} checks passed, none failed"
    cells = [f"{axes.label(m)}, {value}: {n.passed}/{n.asked}." for (m, value), n in count.iterrows()]
    alt = f"Passed of asked: {' '.join(cells)}"
    with figures.drawing(2.0 + 0.78 * max(3, len(values)), 0.7 + 0.3 * len(methods), title, alt=alt) as (fig, grid):
        ax = grid[0, 0]
        for (method, value), field in count.iterrows():
            x, y = values.index(value), methods.index(method)
            kind = "wrong" if field["wrong"] else "passed" if field["passed"] else "unsupported"
            ax.add_patch(Rectangle((x + 0.02, y + 0.04), 0.96, 0.92, facecolor=_FILL[kind], lw=0))
            text = f"{field['passed']}/{field['asked']}"
            ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8.5, color=INK)
        ax.set(xlim=(0, len(values)), ylim=(len(methods), 0))
        ax.set_xticks(np.arange(len(values)) + 0.5, [str(value).replace("_", "\n") for value in values], fontsize=7.5)
        ax.set_yticks(np.arange(len(methods)) + 0.5, [axes.label(method) for method in methods])
        ax.tick_params(length=0)
        ax.spines[:].set(visible=True, color=FAINT)
    return fig
