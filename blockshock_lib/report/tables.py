"""Records frame in, table out.

Correctness and failures hold no floats, so they are the same on every run; numbers carry their unit in the column's
name, and are rounded to what a reader can use: the records hold them in full.
"""

from __future__ import annotations

import pandas as pd

from blockshock_lib.report import cells, labels, verdicts

GIB = 2**30
ABSENT = "–"
_WORDS = {"passed": "pass", "failed": "FAIL", "oom": "out of memory", "timeout": "out of time"}


def correctness_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Outcome of every check: rows (mask, workload), a column a method, text only.

    A field covers all shapes, batches, dtypes, groups and world sizes and says the worst of them: "FAIL", "out of
    memory", "out of time", "unsupported", "pass, some unsupported" or "pass". "–": not asked for.
    """
    rows = cells.checks(frame)
    methods = labels.methods_in(rows["method"])
    table = pd.DataFrame(
        ABSENT,
        index=pd.MultiIndex.from_product(
            [labels.ordered(rows["mask"], labels.MASKS), labels.ordered(rows["workload"], labels.WORKLOADS)],
            names=["mask", "workload"],
        ),
        columns=pd.Index([labels.label(name) for name in methods], name=None),
        dtype=object,
    )
    for (mask, workload, method), group in rows.groupby(["mask", "workload", "method"], sort=False):
        table.loc[(mask, workload), labels.label(method)] = _worst(set(group["outcome"]))
    return table[(table != ABSENT).any(axis=1)]


def _worst(outcomes: set[str]) -> str:
    for name in ("failed", "oom", "timeout"):
        if name in outcomes:
            return _WORDS[name]
    if outcomes == {"unsupported"}:
        return "unsupported"
    return "pass, some unsupported" if "unsupported" in outcomes else "pass"


def error_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Worst error of each method over its valid cells, a row a method, and a tensor where more than y was checked.

    Ratios ("x") are to a low-precision product sharded the same way: the gate allows max 2x and RMS 1.25x. The others
    are relative to the RMS of the float64 truth. `cases` counts what lies behind.
    """
    columns = {
        "error_max_ratio": "worst max ratio (x, gate 2)",
        "error_rms_ratio": "worst RMS ratio (x, gate 1.25)",
        "error_max": "worst max error (of truth's RMS)",
        "error_rms": "worst RMS error (of truth's RMS)",
    }
    rows = cells.valid(frame)
    rows = rows[rows["metric"].isin(list(columns))]
    keys = ["method", "detail"]
    worst = rows.pivot_table(index=keys, columns="metric", values="value", aggfunc="max", observed=True)
    order = pd.MultiIndex.from_product([labels.methods_in(rows["method"]), labels.TENSORS], names=keys)
    table = worst.reindex(index=order[order.isin(worst.index)], columns=list(columns)).rename(columns=columns)
    table.columns.name = None
    table.insert(0, "cases", rows.groupby(keys)["case"].nunique().reindex(table.index).astype("int64"))
    table = rounded(table.rename(index=labels.label, level="method").rename(index=labels.TENSORS, level="detail"))
    if set(rows["detail"]) <= {""}:
        return table.droplevel("detail")
    return table.rename_axis(["method", "tensor"])


def failures(frame: pd.DataFrame) -> pd.DataFrame:
    """Every row that is not ok, equal ones of several groups and ranks counted in `times`; failed first."""
    rows = cells.complete(frame)
    rows = rows[~rows["status"].eq("ok") | (rows["metric"].eq("check") & ~rows["value"].eq(1))].copy()
    rows["status"] = rows["status"].mask(rows["status"].eq("ok"), "failed")
    keys = ["status", "method", "shape", "batch", "dtype", "mask", "workload", "metric", "reason", "case"]
    table = rows.groupby(keys, sort=False, dropna=False).size().reset_index(name="times")
    order = table["status"].map({"failed": 0, "oom": 1, "timeout": 2, "unsupported": 3}).fillna(0)
    table = table.assign(order=order).sort_values(["order", "reason", "method"], kind="stable").drop(columns="order")
    table["method"] = table["method"].map(labels.label)
    return table.rename(columns={"batch": "B"}).reset_index(drop=True)


def reasons(frame: pd.DataFrame) -> pd.DataFrame:
    """Why checks were not made or did not pass, a row a (method, status, reason), and how many cases it concerns.

    No floats and no times: the same on every run of a machine.
    """
    rows = cells.complete(frame)
    rows = rows[rows["metric"].eq("check") & ~rows["status"].eq("ok")]
    table = rows.groupby(["method", "status", "reason"], sort=False)["case"].nunique().reset_index(name="cases")
    order = {name: i for i, name in enumerate(labels.methods_in(table["method"]))}
    table = table.sort_values("method", key=lambda names: names.map(order), kind="stable")
    table["method"] = table["method"].map(labels.label)
    return table[["method", "status", "cases", "reason"]].reset_index(drop=True)


def weights(frame: pd.DataFrame) -> pd.DataFrame:
    """Bytes of the stored weight on the fullest rank, measured and by formula: a row a shape, two columns a method."""
    rows = cells.valid(frame)
    rows = rows[rows["metric"].isin(["weight_bytes", "weight_bytes_formula"])].assign(size=lambda r: cells.size(r))
    wide = rows.pivot_table(
        index=["size", "shape", "dtype"], columns=["method", "metric"], values="value", aggfunc="max", observed=True
    ).droplevel("size")
    if wide.empty:
        return wide
    table = pd.DataFrame(index=wide.index)
    for name in labels.methods_in(wide.columns.get_level_values("method")):
        measured, formula = wide[name, "weight_bytes"], wide[name, "weight_bytes_formula"]
        same = measured.eq(formula).map({True: "= formula", False: "NOT the formula"})
        table[labels.style(name).short] = measured.map("{:,.0f}".format) + " " + same
    return table.reset_index()


def speed_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Times of every valid cell, a row a (case, method), smallest case first; ms of the slowest rank, four digits.

    "kernel" is the median time of a forward without the host, p10 to p90 beside it; on a CPU, which has no CUDA graphs,
    that of plain calls in a loop. "vs B1" is the speed over row-parallel on kernel time (on call time where nothing has
    a kernel time) with its 99% interval; `claim` says faster or slower only where that interval excludes 1.
    Then medians: the product (compute) and the reduction alone; exposed communication = kernel - compute and host =
    call - kernel, the latter not told on a CPU (of medians: a difference within the spread may come out below 0).
    "of floor (%)" = 100 * floor / kernel time. The floor's ceilings are medians of one copy, one GEMM shape and one
    all-reduce by the library, so a cell can stand a few percent above 100.
    """
    parts = {
        "kernel": "forward_kernel",
        "compute": "compute_kernel",
        "reduce": "reduce_kernel",
        "call": "forward_call",
        "floor": "floor_forward",
    }
    keys = ["case", "method"]
    found = {name: cells.summary(frame, metric) for name, metric in parts.items()}
    about = pd.concat([part[[*cells.CASE, "method", "size"]] for part in found.values() if len(part)] or [_no_cells()])
    table = about.drop_duplicates(keys).reset_index(drop=True)
    for name, part in found.items():
        columns = {"median": f"{name} (ms)"} | ({"p10": "p10", "p90": "p90"} if name == "kernel" else {})
        table = table.merge(part.rename(columns=columns)[[*keys, *columns.values()]], on=keys, how="left")
    numbers = [name for name in table.columns if name not in about.columns]
    table[numbers] = rounded(table[numbers].astype(float))
    table["kernel p10–p90"] = [
        ABSENT if pd.isna(row.p10) else f"{row.p10:.4g}–{row.p90:.4g}" for row in table.itertuples(index=False)
    ]
    # Differences of rounded times: no digits that the times do not have.
    table["exposed communication (ms)"] = (table["kernel (ms)"] - table["compute (ms)"]).round(6)
    host = (table["call (ms)"] - table["kernel (ms)"]).round(6)
    table["host (ms)"] = host.mask(table["device"].eq("cpu"))
    table["of floor (%)"] = (100 * table["floor (ms)"] / table["kernel (ms)"]).round(1)
    table = table.merge(against_b1(frame, table), on=keys, how="left")
    own = table["method"].eq("row_parallel")
    table["vs B1"] = table["vs B1"].mask(own, "1 (itself)").fillna(ABSENT)
    table["claim"] = table["claim"].fillna(ABSENT)
    order = {name: i for i, name in enumerate(labels.methods_in(table["method"]))}
    table["order"] = table["method"].map(order)
    table = table.sort_values(["size", "batch", "case", "order"], kind="stable").rename(columns={"batch": "B"})
    table["method"] = table["method"].map(labels.label)
    settings = [name for name in cells.FOCUS if table[name].nunique() > 1]
    shown = ["shape", "B", *settings, "method", "kernel (ms)", "kernel p10–p90", "vs B1", "claim", "compute (ms)"]
    shown += ["reduce (ms)", "exposed communication (ms)", "host (ms)", "call (ms)", "of floor (%)"]
    return table[shown].reset_index(drop=True)


def against_b1(frame: pd.DataFrame, table: pd.DataFrame, metric: str = "forward_kernel") -> pd.DataFrame:
    """Columns case, method, `vs B1` (ratio and interval as text) and `claim`, for every method but B1 itself."""
    metric = cells.time_metric(frame, metric)
    found = [
        {"case": row["case"], "method": method, "vs B1": verdicts.interval_text(row), "claim": row["outcome"]}
        for method in labels.methods_in(table["method"])
        if method != "row_parallel"
        for row in verdicts.ratio(frame, "row_parallel", method, metric).to_dict("records")
    ]
    return pd.DataFrame(found, columns=["case", "method", "vs B1", "claim"], dtype=object)


def _no_cells() -> pd.DataFrame:
    return pd.DataFrame(columns=[*cells.CASE, "method", "size"])


def memory_table(frame: pd.DataFrame) -> pd.DataFrame:
    """GiB on the fullest GPU (or process), a row a (shape, B, method): measured, by formula, and measured / formula.

    "weight / dense" is the measured weight over method A's in the same case.
    """
    metrics = ["weight_bytes", "weight_bytes_formula", "peak_bytes", "peak_bytes_formula"]
    rows = cells.valid(frame)
    rows = rows[rows["metric"].isin(metrics)]
    keys = ["case", "shape", "in_features", "out_features", "batch", "dtype", "method"]
    wide = rows.pivot_table(index=keys, columns="metric", values="value", aggfunc="max", observed=True)
    wide = wide.reindex(columns=metrics).reset_index().rename_axis(columns=None)
    dense = wide[wide["method"].eq("dense")].set_index("case")["weight_bytes"]
    order = {name: i for i, name in enumerate(labels.methods_in(wide["method"]))}
    wide = wide.assign(size=cells.size(wide), order=wide["method"].map(order))
    wide = wide.sort_values(["size", "batch", "case", "order"], kind="stable").reset_index(drop=True)
    table = wide[["shape", "batch", "dtype"]].rename(columns={"batch": "B"})
    table["method"] = wide["method"].map(labels.label)
    for name in ("weight", "peak"):
        table[f"{name} (GiB)"] = wide[f"{name}_bytes"] / GIB
        table[f"{name} by formula (GiB)"] = wide[f"{name}_bytes_formula"] / GIB
        table[f"{name} / formula"] = wide[f"{name}_bytes"] / wide[f"{name}_bytes_formula"]
    table["weight / dense"] = wide["weight_bytes"] / wide["case"].map(dense)
    settings = ["shape", "B", "dtype", "method"]
    return rounded(table.drop_duplicates([*settings, "weight (GiB)", "peak (GiB)"]).reset_index(drop=True))


def ceilings_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What the machine itself reached: copy (GB/s), dense GEMM (TFLOP/s), all-reduce bus bandwidth (GB/s)."""
    rows = cells.valid(frame)
    rows = rows[rows["method"].eq(labels.CEILING)]
    grouped = rows.groupby(["metric", "unit"], sort=False)["value"]
    table = grouped.agg(median="median", lowest="min", highest="max", samples="size").reset_index()
    names = {"copy_bandwidth": "copy", "gemm_rate": "dense GEMM", "allreduce_bandwidth": "all-reduce"}
    table["metric"] = table["metric"].replace(names)
    return rounded(table.rename(columns={"metric": "ceiling"}))


def machine_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Power (W) and SM clock (MHz) of each GPU: p10, median and p90 of the medians of all cases and groups; and the
    share of those in which it was throttled for a moment or longer, with reasons.

    "shared for sums" is the most symmetric memory that the all-reduce held there, which no method's peak counts; it is
    not shown where there was none.

    One row that says so where the records hold no row of a GPU, as on a CPU.
    """
    rows = cells.complete(frame)
    rows = rows[rows["method"].eq(labels.MACHINE) & rows["status"].eq("ok")]
    if len(frame) and rows.empty:
        return pd.DataFrame({"GPU": ["no GPU: power and clocks were not read"]})
    found = []
    for rank, gpu in rows.groupby("rank"):
        by = {metric: part for metric, part in gpu.groupby("metric")}
        row: dict[str, object] = {"GPU": rank}
        for metric, name in (("power", "power {} (W)"), ("sm_clock", "SM clock {} (MHz)")):
            values = by[metric]["value"] if metric in by else pd.Series(dtype=float)
            for word, q in (("p10", 0.1), ("median", 0.5), ("p90", 0.9)):
                row[name.format(word)] = values.quantile(q)
        if "shared_bytes" in by:
            row["shared for sums (GiB)"] = by["shared_bytes"]["value"].max() / GIB
        throttle = by.get("throttle", gpu.iloc[:0])
        row["cases throttled (%)"] = 100 * throttle["value"].ne(0).mean()
        reasons = throttle.loc[throttle["value"].ne(0), "detail"]
        row["reasons"] = ", ".join(sorted({word.strip() for text in reasons for word in str(text).split(",")} - {""}))
        found.append(row)
    return rounded(pd.DataFrame(found))


def top_kernels(frame: pd.DataFrame, count: int = 5) -> pd.DataFrame:
    """The `count` slowest kernels of each profiled (case, method), with their share of all its kernels' time."""
    rows = cells.valid(frame)
    rows = rows[rows["metric"].eq("kernel_time")]
    keys = ["case", "shape", "in_features", "out_features", "batch", "method", "detail"]
    rows = rows.groupby(keys, sort=False)["value"].median().reset_index()
    rows["share (%)"] = 100 * rows["value"] / rows.groupby(["case", "method"])["value"].transform("sum")
    order = {name: i for i, name in enumerate(labels.methods_in(rows["method"]))}
    rows = rows.assign(size=cells.size(rows), order=rows["method"].map(order), slowest=-rows["value"])
    rows = rows.sort_values(["size", "batch", "case", "order", "slowest"], kind="stable")
    rows = rows.groupby(["case", "method"], sort=False).head(count)
    rows["method"] = rows["method"].map(labels.label)
    rows["detail"] = rows["detail"].map(plain_kernel)
    rows = rows.rename(columns={"batch": "B", "detail": "kernel", "value": "time (ms)"})
    rows = rows[["shape", "B", "method", "kernel", "time (ms)", "share (%)"]].reset_index(drop=True)
    return rounded(rows, digits=3).assign(**{"share (%)": rows["share (%)"].round(1)})


def plain_kernel(name: str, most: int = 72) -> str:
    """A kernel's name without its return type, template arguments and parameters, which can fill a page."""
    name = name.removeprefix("void ").split("<")[0].split("(")[0].strip() or name
    return name if len(name) <= most else f"{name[: most - 1]}…"


def rounded(table, digits: int = 4):
    """`table` (a DataFrame or a Series) with its floats rounded to `digits` significant digits."""
    if isinstance(table, pd.DataFrame):
        return table.assign(**{name: rounded(table[name], digits) for name in table.select_dtypes("float")})
    return table.map(lambda value: float(f"{value:.{digits}g}"), na_action="ignore")
