"""Tables of "How close to the limit": the engine against the stock op, calls, compression and reduction."""

from __future__ import annotations

import pandas as pd

from blockshock_lib.report import cells, verdicts
from blockshock_lib.report.limit.products import OURS, WAYS, over_floor
from blockshock_lib.report.tables import ABSENT, rounded
from blockshock_lib.report.training.tables import shown
from blockshock_lib.report.training.ways import ways_table

STOCK, RIVAL = "block_shock_torch", "row_parallel"
PRODUCTS = {"dense": "dense half", "torch": "stock op", "cslt": "planned", "small": "small-batch"}
COMPRESSIONS = {"library": "cuSPARSELt, by value", "by mask": "ours, by mask"}
CHUNKS = ("1", "2")


def nothing(frame: pd.DataFrame, what: str, why: str) -> pd.DataFrame:
    """One field that says that `what` was not measured: on a CPU `why`, elsewhere that the records hold none."""
    rows = cells.complete(frame)
    reason = why if len(rows) and rows["device"].eq("cpu").all() else "these records hold no valid row of it"
    return pd.DataFrame({what: [f"not measured: {reason}"]})


def product_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One rank's product by each way, a row a case: median µs; what share of their floors B1's half product and the
    faster 2:4 product of ours reach; the bandwidth of the latter (bytes read and written over time); the small-batch
    kernel's speed over the planned product, with its 99% interval.
    """
    table = over_floor(frame)
    table = table.assign(median=table["median"].astype(float), over=table["over"].astype(float))
    best = table[table["way"].isin(["cslt", "small"])].sort_values("over", kind="stable").drop_duplicates("case")
    if best.empty:
        return nothing(frame, "products of packed weights", "a CPU has no 2:4 hardware")
    for way, name in PRODUCTS.items():
        best[f"{name} (µs)"] = _micro(best["case"].map(table[table["way"].eq(way)].set_index("case")["median"]))
    half = best["case"].map(table[table["way"].eq("dense")].set_index("case")["over"])
    best["dense half, % of floor"], best["best 2:4, % of floor"] = (rounded(100 / x, 3) for x in (half, best["over"]))
    rows = cells.complete(frame)
    rows = rows[rows["method"].eq(OURS)]
    moved = [cells.summary(rows, f"bytes_{way}").set_index("case")["median"] for way in ("read", "written")]
    best["best 2:4 (GB/s)"] = rounded(best["case"].map(sum(moved)).astype(float) / best["median"] / 1e6, 3)
    best["small-batch over planned"] = (
        best["case"].map(_over(rows, "product_by_kernel", "cslt", "small")).astype(object)
    )
    told = [f"{name} (µs)" for name in PRODUCTS.values()]
    told += ["dense half, % of floor", "best 2:4, % of floor", "best 2:4 (GB/s)", "small-batch over planned"]
    return shown(best, told).drop(columns="method")


def gain_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Speed of Block-Shock's forward over its own stock path, a row a case: as an eager call and as kernels, in "x"
    with their 99% intervals, and a claim only where the interval excludes 1.
    """
    rows = cells.complete(frame)
    ours = rows[rows["method"].eq(OURS) & rows["metric"].eq("compute_kernel")]
    if (rows["method"].eq(STOCK) & rows["metric"].eq("compute_kernel")).any() and not ours["detail"].fillna("").astype(
        bool
    ).any():
        return pd.DataFrame({"over the stock op": ["not measured: these records are older than the engine"]})
    found = {}
    for name, metric in (("eager call", "forward_call"), ("kernel", "forward_kernel")):
        table = verdicts.ratio(frame, STOCK, OURS, metric)
        if len(table):
            table[f"{name}, over the stock op"] = [verdicts.interval_text(row) for row in table.to_dict("records")]
            found[name] = table.rename(columns={"outcome": f"{name}: claim"})
    if not found:
        return nothing(frame, "over the stock op", "PyTorch has no 2:4 op for a CPU")
    told = [f"{name}{end}" for name in found for end in (", over the stock op", ": claim")]
    table = pd.concat(found.values())[[*cells.CASE, "size"]].drop_duplicates("case").assign(method=OURS)
    for one in found.values():
        table = table.merge(one[["case", *[name for name in told if name in one]]], on="case", how="left")
    return shown(table, told).drop(columns="method")


def call_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What one call of the forward takes, a row a case of B1, Block-Shock and its stock path: eagerly, through the
    layer's own CUDA graph, and its kernels alone; median µs of the slowest rank. Then the eager call over the graph's:
    below 1 the graph does not pay. Then the graph's speed over B1's, which has one too, with the 99% interval.
    """
    frame = cells.complete(frame)
    frame = frame[frame["method"].isin([RIVAL, OURS, STOCK])]
    table = cells.summary(frame, "forward_graph_call")
    if table.empty:
        return nothing(frame, "forward through a CUDA graph", "there are no CUDA graphs on a CPU")
    keys = ["case", "method"]
    against = pd.concat(
        [_spoken(verdicts.ratio(frame, RIVAL, name, "forward_graph_call"), name) for name in set(table["method"])]
    )
    table = table.merge(against, on=keys, how="left")
    table["graph call (µs)"] = table["median"]
    for name, metric in (("eager call (µs)", "forward_call"), ("kernel (µs)", "forward_kernel")):
        part = cells.summary(frame, metric).rename(columns={"median": name})[[*keys, name]]
        table = table.merge(part, on=keys, how="left")
    table["eager / graph"] = rounded(table["eager call (µs)"] / table["graph call (µs)"], 3)
    for name in ("eager call (µs)", "graph call (µs)", "kernel (µs)"):
        table[name] = _micro(table[name])
    return shown(table, ["eager call (µs)", "graph call (µs)", "kernel (µs)", "eager / graph", "graph, vs B1"])


def _spoken(table: pd.DataFrame, method: str) -> pd.DataFrame:
    said = [verdicts.interval_text(row) for row in table.to_dict("records")]
    said = ["1 (itself)"] * len(said) if method == RIVAL else said
    return pd.DataFrame({"case": table["case"], "method": method, "graph, vs B1": said}, dtype=object)


def _micro(ms: pd.Series) -> pd.Series:
    return rounded(1e3 * ms.astype(float), 3)


def host_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What the host does in one eager call of a product, of several in a row without waiting for the GPU, in µs: a row
    a way, the median of all samples, p10 to p90, and the medians of the cells (N, B) with the least and the most.

    The dense one is A's, which like ours is the product alone: B1's also finds where the ranks add up.
    """
    rows = cells.samples(frame, "host_us")
    rows = rows[rows["method"].isin([OURS, STOCK, "dense"])]
    if rows.empty:
        return nothing(frame, "host time of a call", "there the host makes the product itself")
    found = []
    for way in [way for way in WAYS if rows["detail"].eq(way).any()]:
        mine = rows[rows["detail"].eq(way)]
        each = mine.groupby("case")["value"].median()
        low, middle, high = mine["value"].quantile([0.1, 0.5, 0.9])
        found.append(
            {
                "product": "dense (A)" if way == "dense" else WAYS[way].label,
                "host (µs)": middle,
                "p10–p90": f"{low:.3g}–{high:.3g}",
                "least of a cell (µs)": each.min(),
                "most of a cell (µs)": each.max(),
                "cells": len(each),
            }
        )
    return rounded(pd.DataFrame(found), 3)


def compression_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What packing a rank's term takes whose mask is known, for the forward and for dX: a row a (shape, way); ms, and
    over the floor: one read of the dense term, one write of values and metadata of each orientation. Beside them how
    much faster than cuSPARSELt's own compression, with its 99% interval.
    """
    rows = cells.complete(frame)
    each = {way: _way(rows, "compress_by_kernel", way) for way in COMPRESSIONS}
    found = [cells.summary(one, "compress_by_kernel").assign(way=way) for way, one in each.items()]
    table = pd.concat([one for one in found if len(one)] or found[:1])
    if table.empty:
        return nothing(frame, "compression", "nothing was packed")
    floors = cells.summary(rows, "floor_compress")[["case", "method", "median"]].rename(columns={"median": "floor"})
    table = table.merge(floors, on=["case", "method"], how="left")
    over = _over(rows, "compress_by_kernel", "library", "by mask")
    said = [over.get(row.case, ABSENT) if row.way == "by mask" else ABSENT for row in table.itertuples()]
    table["over cuSPARSELt"] = said
    table["time / floor"] = rounded(table["median"].astype(float) / table["floor"].astype(float), 3)
    table["time (ms)"], table["floor (ms)"] = (rounded(table[name].astype(float)) for name in ("median", "floor"))
    table["compression"] = table["way"].map(COMPRESSIONS)
    columns = ["compression", "time (ms)", "floor (ms)", "time / floor", "over cuSPARSELt"]
    return shown(table, columns).drop(columns=["method", "B"])


def reduce_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The all-reduce of a forward's partial results alone, a row a case: its size, each backend's median µs and bus
    bandwidth (bytes sent a rank over time, GB/s), and which of them the layers took. It is timed once, for all methods.
    """
    rows = cells.complete(frame)
    each = rows[rows["metric"].eq("reduce_by_kernel")]
    rows = rows[rows["method"].isin(set(each["method"]))]
    table = cells.summary(rows, "bytes_sent").rename(columns={"median": "sent"}).drop(columns=["p10", "p90"])
    keys, columns = ["case", "method"], []
    for way in sorted(set(each["detail"])):
        part = cells.summary(_way(rows, "reduce_by_kernel", way), "reduce_by_kernel")
        table = table.merge(part[[*keys, "median"]].rename(columns={"median": way}), on=keys, how="left")
        ms = table.pop(way).astype(float)
        table[f"{way} (µs)"], table[f"{way} (GB/s)"] = _micro(ms), rounded(table["sent"] / ms / 1e6, 3)
        columns += [f"{way} (µs)", f"{way} (GB/s)"]
    table = table[table[columns].notna().any(axis=1)]
    if table.empty:
        return nothing(frame, "all-reduce by backend", "there is one backend only, gloo")
    taken = cells.samples(rows, "reduce_kernel").groupby(keys)["detail"]
    taken = taken.agg(lambda details: ", ".join(sorted(set(details)))).rename("taken").reset_index()
    table = table.merge(taken, on=keys, how="left")
    table["KiB"] = (table["batch"] * table["out_features"] * table["dtype"].map(_ITEM) / 1024).astype(int)
    return shown(table, ["KiB", *columns, "taken"]).drop(columns="method")


_ITEM = {"bf16": 2, "fp16": 2, "fp32": 4}


def chunks_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Median ms of the forward with its batch whole and cut in two, the all-reduce of one piece beside the product of
    the next: a row a (case, method), and which was taken.
    """
    table = ways_table(frame, "forward_chunks_kernel", CHUNKS, "forward_kernel")
    if table.empty:
        return nothing(frame, "forward in pieces", "only batches from 1024 are cut, and this run has none")
    return table


def _way(rows: pd.DataFrame, metric: str, way: str) -> pd.DataFrame:
    """`rows` without the other ways of `metric`."""
    return rows[rows["metric"].ne(metric) | rows["detail"].eq(way)]


def _over(rows: pd.DataFrame, metric: str, first: str, second: str) -> dict[str, str]:
    """Case -> speed of the second way over the first, in words."""
    named = [_way(rows[rows["method"].eq(OURS)], metric, way).assign(method=way) for way in (first, second)]
    table = verdicts.ratio(pd.concat(named), first, second, metric)
    return {row["case"]: verdicts.interval_text(row) for row in table.to_dict("records")}
