""" "How close to the limit": the 2:4 product, its host time, compression and reduction over their floors."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from blockshock_lib.report import figures, frames
from blockshock_lib.report.figures import MUTED
from blockshock_lib.report.tables import ABSENT, rounded
from blockshock_lib.studies.linear.axes import AXES
from blockshock_lib.studies.linear.report import build
from blockshock_lib.studies.linear.report.build import B1, KEYS, OURS, STOCK, A, micro, nothing, shown
from blockshock_lib.studies.linear.report.training import against_floor

WAYS = {
    "dense": "dense half (B1)",
    "torch": "2:4, stock op",
    "cslt": "2:4, cuSPARSELt planned",
    "small": "2:4, small-batch kernel",
    "reference": "2:4, unpacked (no 2:4 hardware)",
    "": "2:4 product",
}
"""Of a product, by the detail of a row, in the order of tables; "" where older records do not name it."""
_PRODUCTS = {"dense": "dense half", "torch": "stock op", "cslt": "planned", "small": "small-batch"}
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_TICKS = (1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)


def over_floor(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a (case, way), smallest case first: `median`, `p10`, `p90` and `floor` in ms, and `over` = median / floor:
    the larger of the method's FLOP over the measured GEMM rate and its bytes over the measured copy bandwidth.
    """
    rows = frames.complete(frame, AXES)
    rows = rows[rows["metric"].isin(["check", "compute_kernel", "product_by_kernel", "floor_compute"])]
    b1, stock, ours = (rows[rows["method"].eq(method)] for method in (B1, STOCK, OURS))
    found = [build.summary(ours, ("product_by_kernel", way)).assign(way=way) for way in WAYS]
    rest = ours[~ours["case"].isin(pd.concat(found)["case"])]
    found += [build.summary(rest, ("compute_kernel", way)).assign(way=way) for way in WAYS]
    # A method that has one way may leave its name out.
    found += [build.summary(one, "compute_kernel").assign(way=way) for one, way in ((b1, "dense"), (stock, "torch"))]
    table = build.add_medians(build.stacked(found), rows, {"floor": "floor_compute"}).dropna(subset="floor")
    table["over"] = table["median"].astype(float) / table["floor"]
    return table.sort_values(
        ["size", "batch", "way"], key=lambda c: c.map(list(WAYS).index) if c.name == "way" else c, ignore_index=True
    )


def product_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One rank's product by each way, a row a case: median µs; what share of their floors B1's half product and the
    faster 2:4 product of ours reach, and the latter's bandwidth; the small-batch kernel's speed over the planned one;
    and the product of each newcomer, a method that is no shipped one.
    """
    table = over_floor(frame).astype({"median": float, "over": float})
    best = table[table["way"].isin(["cslt", "small"])].sort_values("over", kind="stable").drop_duplicates("case")
    if best.empty:
        return nothing(frame, "products of packed weights", "a CPU has no 2:4 hardware")
    best = build.add_medians(best, frame, {"read": "bytes_read", "written": "bytes_written"})
    by = {way: table[table["way"].eq(way)].set_index("case") for way in _PRODUCTS}
    columns = {f"{name} (µs)": micro(best["case"].map(by[way]["median"])) for way, name in _PRODUCTS.items()}
    columns["dense half, % of floor"] = rounded(100 / best["case"].map(by["dense"]["over"]), 3)
    columns["best 2:4, % of floor"] = rounded(100 / best["over"], 3)
    columns["best 2:4 (GB/s)"] = rounded((best["read"] + best["written"]) / best["median"] / 1e6, 3)
    over = build.speed_of_way(frame[frame["method"].eq(OURS)], "product_by_kernel", "cslt", "small")
    columns["small-batch over planned"] = _by_case(best, over)
    for method in build.newcomers(frame):
        rows = frame[frame["method"].eq(method)]
        times = build.medians(rows, {"time": "compute_kernel", "floor": "floor_compute"}).set_index("case")
        columns[f"{AXES.short(method)} (µs)"] = micro(best["case"].map(times["time"]))
        columns[f"{AXES.short(method)}, % of floor"] = rounded(
            best["case"].map(100 * times["floor"] / times["time"]), 3
        )
    return shown(best, columns, method=False)


def _by_case(table: pd.DataFrame, ratios: pd.DataFrame) -> pd.Series:
    words = [build.interval(row) for row in ratios.to_dict("records")]
    return table["case"].map(dict(zip(ratios["case"], words, strict=True))).astype(object)


def gain_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Speed of Block-Shock's forward, and of newcomers', over its own stock path: as an eager call and as kernels."""
    rows, metrics = frames.complete(frame, AXES), {"eager call": "forward_call", "kernel": "forward_kernel"}
    more = build.newcomers(rows)
    parts = {name: build.speeds(frame, STOCK, [OURS, *more], metric) for name, metric in metrics.items()}
    table = build.medians(rows[rows["method"].isin([OURS, *more])], metrics)
    table = table[table["case"].isin(pd.concat([part["case"] for part in parts.values()]))]
    if table.empty:
        return nothing(frame, "over the stock op", "PyTorch has no 2:4 op for a CPU")
    columns = []
    for name, part in parts.items():
        columns += [f"{name}, over the stock op", f"{name}: claim"] if len(part) else []
        table = table.merge(
            part.set_axis([*KEYS, *(f"{name}, over the stock op", f"{name}: claim")], axis=1), how="left"
        )
    return shown(table, table[columns], method=bool(more))


def call_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What one call of the forward takes, a row a case of B1, Block-Shock, its stock path and newcomers: eagerly,
    through the layer's own CUDA graph, and its kernels alone; median µs of the slowest rank. Below 1 of "eager / graph"
    the graph does not pay.
    """
    rows = frames.complete(frame, AXES)
    rows = rows[rows["method"].isin([B1, OURS, STOCK, *build.newcomers(rows)])]
    times = {"eager call": "forward_call", "graph call": "forward_graph_call", "kernel": "forward_kernel"}
    table = build.medians(rows, times).dropna(subset="graph call")
    if table.empty:
        return nothing(frame, "forward through a CUDA graph", "there are no CUDA graphs on a CPU")
    table = table.merge(build.speeds(rows, B1, set(table["method"]), "forward_graph_call"), on=KEYS, how="left")
    columns = {f"{name} (µs)": micro(table[name]) for name in times}
    columns["eager / graph"] = rounded(table["eager call"] / table["graph call"], 3)
    return shown(table, columns | {"graph, vs B1": table["speed"]})


def host_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Host time of one eager call of a product, of several in a row without waiting for the GPU: a row a way. The dense
    one is A's, which like ours is the product alone: B1's also finds where the ranks add up.
    """
    rows, found = frames.samples(frame, "host_us"), []
    more = {method: f"{AXES.label(method)}: " for method in build.newcomers(rows)}
    rows = rows[rows["method"].isin([OURS, STOCK, A, *more])]
    names = WAYS | {"dense": "dense (A)"}
    for whose in ("", *more.values()):
        of_whom = dict(list(rows[rows["method"].map(more).astype(object).fillna("").eq(whose)].groupby("detail")))
        for way in sorted(of_whom, key=[*WAYS, *of_whom].index):
            mine = of_whom[way]
            cells = mine.groupby("case")["value"].median()
            low, middle, high = mine["value"].quantile([0.1, 0.5, 0.9])
            row = {"product": whose + (WAYS if whose else names).get(way, way), "host (µs)": middle}
            row |= {"p10–p90 (µs)": f"{low:.3g}–{high:.3g}", "least of a cell (µs)": cells.min()}
            found.append(row | {"most of a cell (µs)": cells.max(), "cells": len(cells)})
    if not found:
        return nothing(frame, "host time of a call", "there the host makes the product itself")
    return rounded(pd.DataFrame(found), 3)


def compression_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What packing a rank's term takes, for the forward and dX, in ms and over its floor: a row a shape, method, way"""
    rows, names = frames.complete(frame, AXES), {"library": "cuSPARSELt, by value", "by mask": "ours, by mask"}
    metrics = {name: (("compress_by_kernel", way), "floor_compress") for way, name in names.items()}
    table, columns = against_floor(rows, "compression", metrics)
    if table.empty:
        return nothing(frame, "compression", "nothing was packed")
    for method, own in table.groupby("method"):
        over = build.speed_of_way(rows[rows["method"].eq(method)], "compress_by_kernel", "library", "by mask")
        table.loc[own.index, "over"] = _by_case(own, over)
    columns["over cuSPARSELt"] = table["over"].where(table["compression"].eq(names["by mask"]), ABSENT)
    return shown(table, columns).drop(columns="B")


def reduce_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The all-reduce of a forward's partial results alone, a row a case: each backend's median µs and bus bandwidth
    (bytes sent a rank over time), and which of them the layers took. It is timed once, for all methods.
    """
    rows = frames.complete(frame, AXES)
    each = rows[rows["metric"].eq("reduce_by_kernel")]
    rows, ways = rows[rows["method"].isin(set(each["method"]))], sorted(set(each["detail"]))
    table = build.medians(rows, {"sent": "bytes_sent"} | {way: ("reduce_by_kernel", way) for way in ways})
    table = table[table["sent"].notna() & table[ways].notna().any(axis=1)]
    if table.empty:
        return nothing(frame, "all-reduce by backend", "there is one backend only, gloo")
    taken = frames.samples(rows, "reduce_kernel").groupby(KEYS)["detail"].agg(lambda one: ", ".join(sorted(set(one))))
    table = table.merge(taken.rename("taken").reset_index(), on=KEYS, how="left")
    sizes = table["batch"] * table["out_features"] * table["dtype"].map(_BYTES) / 1024
    columns = {"KiB": sizes.astype(int)}
    for way in ways:
        columns[f"{way} (µs)"] = micro(table[way])
        columns[f"{way} (GB/s)"] = rounded(table["sent"] / table[way] / 1e6, 3)
    return shown(table, columns | {"taken": table["taken"]}, method=False)


def limit_figure(frame: pd.DataFrame) -> Figure:
    """Time over floor (log; dashed: 1) against B (log2), a panel a shape, a line a way of the product; p10 to p90."""
    chosen, setting = frames.focus(frame, AXES)
    table, title = over_floor(chosen), "How far each product is from its floor"
    if table.empty:
        return figures.empty(title, "no valid time of a product with a floor in these records")
    panels = dict(list(table.groupby("shape", sort=False)))
    ways = [way for way in WAYS if table["way"].eq(way).any()]
    columns, told = min(4, len(panels)), []
    for shape, panel in panels.items():
        points = panel["over"].map("{:.2f} at B=".format) + panel["batch"].astype(str)
        words = points.groupby(panel["way"]).agg(", ".join)
        told.append(f"{shape}: {'; '.join(f'{WAYS[way]} {words[way]}' for way in ways if way in words)}.")
    height = -(-len(panels) // columns)
    with figures.drawing(
        *(max(6.0, 0.6 + 2.5 * columns), 2.6 * height + 0.5, _claim(table) or title),
        *(frames.no_claim(table), setting, "medians, slowest rank; bar: p10 to p90"),
        alt="Lines of time over floor against B, a panel a shape. " + " ".join(told),
        rows=height,
        columns=columns,
        sharey=True,
    ) as (fig, grid):
        for ax in grid.ravel()[len(panels) :]:
            ax.set_axis_off()
        for ax, (shape, panel) in zip(grid.ravel(), panels.items(), strict=False):
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.axhline(1, color=MUTED, linewidth=1, linestyle="--", zorder=1)
            for way in ways:
                line, look = panel[panel["way"].eq(way)].astype({"batch": float}), _look(way)
                ends = (line["p10"] / line["floor"], line["p90"] / line["floor"])
                ax.vlines(line["batch"], *ends, color=look["color"], lw=3)
                ax.plot(line["batch"], line["over"], **look)
            batches = sorted(panel["batch"].unique())
            ax.set_xticks(batches, [str(batch) for batch in batches])
            ax.set_xlabel("B")
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_minor_locator(NullLocator())
            ax.grid(True, axis="y")
            rows, inner = shape.split("x")
            ax.set_title(f"N = {rows}" if rows == inner else shape)
        for ax in grid[:, 0]:
            ax.set_ylabel("time / floor (lower is better)")
        first, top = grid[0, 0], 1.25 * table["over"].max()
        first.set_ylim(min(0.9, 0.95 * table["over"].min()), top)
        first.yaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if tick <= top]))
        first.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
        handles = [first.plot([], [], **_look(way), label=WAYS[way])[0] for way in ways]
        figures.legend_below(fig, handles, 4, fontsize=8.5)
    return fig


def _look(way: str) -> dict:
    look = AXES.look({"dense": B1, "torch": STOCK}.get(way, OURS))
    colour, marker = ("#E69F00", "^") if way == "cslt" else (look.colour, look.marker)
    return dict(color=colour, marker=marker, linewidth=1.6, markersize=7, markeredgecolor="white")


def _claim(table: pd.DataFrame) -> str:
    ours, stock = table[table["way"].isin(["cslt", "small"])], table.loc[table["way"].eq("torch"), "over"]
    if frames.no_claim(table) or ours.empty or stock.empty:
        return ""
    best, stock = (f"{x.min():.3g} to {x.max():.3g} times" for x in (ours.groupby("case")["over"].min(), stock))
    return f"The faster 2:4 product takes {best} its floor, the stock op {stock}"
