"""The study's own tables: products, calls, all-reduce, pieces of a step, and which way a layer chose."""

import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.tables import beside, rounded
from blockshock_lib.studies.linear.axes import AXES
from blockshock_lib.studies.linear.phases import LINES
from blockshock_lib.studies.linear.report import build
from blockshock_lib.studies.linear.report.build import B1, KEYS, OURS, PIECES, STOCK, micro, nothing, shown

_PRODUCTS = {"dense": "dense half", "torch": "stock op", "cslt": "planned", "small": "small-batch"}
_ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


def over_floor(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a (case, way): `median` and `floor` in ms, and `over` = median / floor."""
    rows = frames.complete(frame, AXES)
    rows = rows[rows["metric"].isin(["check", "compute_kernel", "product_by_kernel", "floor_compute"])]
    b1, stock, ours = (rows[rows["method"].eq(method)] for method in (B1, STOCK, OURS))
    found = [frames.summary(ours, AXES, ("product_by_kernel", way)).assign(way=way) for way in ("cslt", "small")]
    # Older records name the way where they time the product; a method that has one way may leave its name out.
    rest = ours[~ours["case"].isin(pd.concat(found)["case"])]
    found += [frames.summary(rest, AXES, ("compute_kernel", way)).assign(way=way) for way in ("cslt", "small")]
    for way, one in (("dense", b1), ("torch", stock)):
        found.append(frames.summary(one, AXES, "compute_kernel").assign(way=way))
    table = build.stacked(found).merge(frames.medians(rows, AXES, floor="floor_compute")[[*KEYS, "floor"]], on=KEYS)
    return table.assign(over=table["median"].astype(float) / table["floor"])


def product_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One rank's product by each way, a row a case: median µs and shares of floors."""
    table = over_floor(frame).astype({"median": float, "over": float})
    best = table[table["way"].isin(["cslt", "small"])].sort_values("over", kind="stable").drop_duplicates("case")
    if best.empty:
        return nothing(frame, "products of packed weights", "a CPU has no 2:4 hardware")
    moved = frames.medians(frame, AXES, read="bytes_read", written="bytes_written")
    best = best.merge(moved[[*KEYS, "read", "written"]], on=KEYS, how="left")
    by = {way: table[table["way"].eq(way)].set_index("case") for way in _PRODUCTS}
    columns = {f"{name} (µs)": micro(best["case"].map(by[way]["median"])) for way, name in _PRODUCTS.items()}
    columns["dense half, % of floor"] = rounded(100 / best["case"].map(by["dense"]["over"]), 3)
    columns["best 2:4, % of floor"] = rounded(100 / best["over"], 3)
    columns["best 2:4 (GB/s)"] = rounded((best["read"] + best["written"]) / best["median"] / 1e6, 3)
    ours, metric = frame[frame["method"].eq(OURS)], "product_by_kernel"
    ways = [ours[ours["metric"].ne(metric) | ours["detail"].eq(way)].assign(method=way) for way in ("cslt", "small")]
    over = verdicts.ratio(pd.concat(ways), AXES, "cslt", "small", metric)
    words = {row["case"]: build.interval(row) for row in over.to_dict("records")}
    columns["small-batch over planned"] = best["case"].map(words).astype(object)
    return shown(best, columns, method=False)


def call_table(frame: pd.DataFrame) -> pd.DataFrame:
    """A forward called eagerly and through the layer's own CUDA graph, a row a (case, method): median µs."""
    rows = frames.complete(frame, AXES)
    rows = rows[~rows["method"].isin(build.OTHERS)]
    times = {"eager call": "forward_call", "graph call": "forward_graph_call", "kernel": "forward_kernel"}
    table = frames.medians(rows, AXES, **times).dropna(subset="graph call")
    if table.empty:
        return nothing(frame, "forward through a CUDA graph", "there are no CUDA graphs on a CPU")
    table = table.merge(beside(rows, AXES, B1, set(table["method"]), "forward_graph_call"), on=KEYS, how="left")
    columns = {f"{name} (µs)": micro(table[name]) for name in times}
    columns["eager / graph"] = rounded(table["eager call"] / table["graph call"], 3)
    return shown(table, columns | {"graph, vs B1": table["ratio"]})


def lines_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The reference lines of phase 1, a row a (case, line): medians, and why one was not timed."""
    rows = build.with_lines(frames.complete(frame, AXES))
    rows = rows[rows["method"].isin([B1, *LINES.values()])]
    lines = rows[rows["method"].ne(B1) & rows["metric"].ne("check")]
    if lines.empty:
        return nothing(frame, "reference lines", "no run on ranks holds any")
    found = frames.medians(rows, AXES, kernel="forward_kernel", call="forward_call", error="error_rms")
    table = lines.drop_duplicates(KEYS)[[*AXES.case_columns, "method"]].assign(size=AXES.size)
    why = lines[lines["status"].ne("ok")].drop_duplicates(KEYS).rename(columns={"reason": "why"})
    table = table.merge(found[[*KEYS, "kernel", "call", "error"]], on=KEYS, how="left")
    table = table.merge(beside(rows, AXES, B1, LINES.values(), "forward_kernel"), on=KEYS, how="left")
    table = table.merge(why[[*KEYS, "why"]], on=KEYS, how="left")
    columns = {"kernel (µs)": micro(table["kernel"]), "call (µs)": micro(table["call"]), "vs B1": table["ratio"]}
    columns["RMS error of y"] = build.text(table["error"], "{:.2%}")
    return shown(table, columns | {"claim": table["claim"], "not timed": table["why"].astype(object)})


def reduce_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The all-reduce of a forward's partial results alone, timed once for all methods, a row a case."""
    rows = frames.complete(frame, AXES)
    each = rows[rows["metric"].eq("reduce_by_kernel")]
    rows, ways = rows[rows["method"].isin(set(each["method"]))], sorted(set(each["detail"]))
    table = frames.medians(rows, AXES, sent="bytes_sent", **{way: ("reduce_by_kernel", way) for way in ways})
    table = table[table["sent"].notna() & table[ways].notna().any(axis=1)]
    if table.empty:
        return nothing(frame, "all-reduce by backend", "there is one backend only, gloo")
    taken = frames.samples(rows, "reduce_kernel").groupby(KEYS)["detail"].agg(lambda one: ", ".join(sorted(set(one))))
    table = table.merge(taken.rename("taken").reset_index(), on=KEYS, how="left")
    sizes = table["batch"] * table["out_features"] * table["dtype"].map(_ITEMSIZE) / 1024
    columns = {"KiB": sizes.astype(int)}
    for way in ways:
        columns[f"{way} (µs)"] = micro(table[way])
        columns[f"{way} (GB/s)"] = rounded(table["sent"] / table[way] / 1e6, 3)
    return shown(table, columns | {"taken": table["taken"]}, method=False)


def pieces_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Median ms of every piece alone, a row a (case, method)."""
    table = frames.medians(frame, AXES, **{name: f"{stem}_kernel" for name, stem in PIECES.items()})
    names = piece_names(frame)
    return shown(
        table, {f"{names[each]} (ms)": build.text(table[each]) for each in PIECES if table[each].notna().any()}
    )


def piece_names(frame: pd.DataFrame) -> dict[str, str]:
    """How each of PIECES is called: the forward's collective is timed with the bias added, where there is a bias."""
    biased = frames.complete(frame, AXES)["detail"].eq("db").any()
    return {name: f"{name} + bias" if biased and name == "forward collective" else name for name in PIECES}


def ways_table(frame: pd.DataFrame, metric: str, chosen: str, *ways: str, missing=(), called="{}") -> pd.DataFrame:
    """Median ms each way, `called` so, a row a (case, method); `taken`, by the detail of `chosen`: in how many fresh
    groups each.
    """
    table = frames.medians(frame, AXES, **{way: (metric, way) for way in ways})
    if table.empty:
        return build.nothing(frame, *missing) if missing else pd.DataFrame()
    taken = frames.samples(frame, chosen).groupby(KEYS, sort=False)[["detail", "group"]].apply(_taken).rename("taken")
    table = table.merge(taken.reset_index(), on=KEYS, how="left")
    timed = [way for way in ways if table[way].notna().any()]
    columns = {f"{called.format(way)} (ms)": rounded(table[way]) for way in timed}
    if len(timed) == 2:
        columns[f"{timed[1]} / {timed[0]}"] = rounded(table[timed[1]] / table[timed[0]], 3)
    return shown(table, columns | {"taken": table["taken"].astype(object)})


def _taken(rows: pd.DataFrame) -> str:
    counts = rows.groupby("detail")["group"].nunique().sort_values(ascending=False, kind="stable")
    return ", ".join(f"{way} in {n} of {counts.sum()}" if len(counts) > 1 else way for way, n in counts.items())
