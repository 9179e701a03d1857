"""Records frame in, table out; units stand in the columns' names, numbers are rounded to what a reader can use."""

from collections.abc import Iterable, Mapping
from functools import partial

import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.axes import CEILING, MACHINE, Axes

GIB = 2**30
ABSENT = "–"
MOST_ROWS = 20  # that Markdown shows unfolded
_WORDS = {"failed": "FAIL", "oom": "out of memory", "timeout": "out of time"}


def correctness_table(frame: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    """Outcome of every check, a row a value of `axes.rows`, a column a method: the worst of all cases and groups,
    "FAIL", "out of memory", "out of time", "unsupported", "pass, some unsupported" or "pass"; "–": not asked for.
    """
    rows = frames.checks(frames.complete(frame, axes))
    index = pd.MultiIndex.from_product([axes.sort(name, rows[name]) for name in axes.rows], names=axes.rows)
    columns = [axes.label(name) for name in axes.ordered(rows["method"])]
    table = pd.DataFrame(ABSENT, index=index, columns=columns, dtype=object)
    for (*place, method), group in rows.groupby([*axes.rows, "method"], sort=False):
        outcomes = set(group["outcome"])
        fine = "pass" if outcomes == {"passed"} else "pass, some unsupported" if "passed" in outcomes else "unsupported"
        worst = next((word for name, word in _WORDS.items() if name in outcomes), fine)
        table.loc[tuple(place), axes.label(method)] = worst
    return table[(table != ABSENT).any(axis=1)]


def error_table(frame: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    """Worst error of each method over its valid cells, a row a method, and a tensor where more than one was checked.
    Ratios ("x") are to a low-precision product sharded the same way; the others to the RMS of the float64 truth.
    """
    columns = {
        "error_max_ratio": "worst max ratio (x)" if axes.looser else "worst max ratio (x, gate 2)",
        "error_rms_ratio": "worst RMS ratio (x)" if axes.looser else "worst RMS ratio (x, gate 1.05)",
        "error_max": "worst max error (of truth's RMS)",
        "error_rms": "worst RMS error (of truth's RMS)",
    }
    rows, keys = frames.valid(frame), ["method", "detail"]
    rows = rows[rows["metric"].isin(list(columns))]
    worst = rows.pivot_table(index=keys, columns="metric", values="value", aggfunc="max", observed=True)
    order = pd.MultiIndex.from_product([axes.ordered(rows["method"]), axes.sort("detail", rows["detail"])], names=keys)
    table = worst.reindex(index=order[order.isin(worst.index)], columns=list(columns)).rename(columns=columns)
    table.columns.name = None
    table.insert(0, "cases", rows.groupby(keys)["case"].nunique().reindex(table.index).astype("int64"))
    table = table.rename(index=axes.label, level="method")
    table = rounded(table.rename(index=lambda name: axes.word("detail", name), level="detail"))
    if set(rows["detail"].unique()) <= {""}:
        return table.droplevel("detail")
    return table.rename_axis(["method", axes.header("detail")])


def reasons(frame: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    """Why checks were not made or did not pass, a row a (method, status, reason), and how many cases it concerns."""
    rows = frames.complete(frame)
    rows = rows[rows["metric"].eq("check") & ~rows["status"].eq("ok")]
    table = rows.groupby(["method", "status", "reason"], sort=False)["case"].nunique().reset_index(name="cases")
    order = axes.place_of(table["method"])
    table = table.sort_values("method", key=lambda names: names.map(order), kind="stable")
    return shown(table, axes, ["method", "status", "cases", "reason"])


def shown(table: pd.DataFrame, axes: Axes, columns) -> pd.DataFrame:
    """`columns` of `table` as a reader knows them: methods by their labels, the case's columns by their headers."""
    words = {name: table[name].map(partial(axes.word, name)) for name in axes.panels if name in columns}
    table = table[list(columns)].assign(method=table["method"].map(axes.label), **words)
    return table.rename(columns={name: axes.header(name) for name in axes.case_columns}).reset_index(drop=True)


def smallest_first(table: pd.DataFrame, axes: Axes, *more: str) -> pd.DataFrame:
    table = table.assign(size=axes.size(table), order=table["method"].map(axes.place_of(table["method"])))
    return frames.by_size(table, axes, "case", "order", *more)


def formula_table(frame: pd.DataFrame, axes: Axes, metric: str) -> pd.DataFrame:
    """Bytes of `metric` on the fullest rank, measured and against its formula: a row a size, a column a method."""
    rows = frames.valid(frames.complete(frame, axes))
    rows = rows[rows["metric"].isin([metric, f"{metric}_formula"])].assign(size=axes.size)
    keys = dict(index=["size", axes.x, "dtype"], columns=["method", "metric"])
    wide = rows.pivot_table(**keys, values="value", aggfunc="max", observed=True).droplevel("size")
    table = pd.DataFrame(index=wide.index)
    for name in axes.ordered(wide.columns.get_level_values("method")):
        same = wide[name, metric].eq(wide[name, f"{metric}_formula"]).map({True: "= formula", False: "NOT the formula"})
        table[axes.short(name)] = wide[name, metric].map("{:,.0f}".format) + " " + same
    return table.reset_index()


def speed_table(frame: pd.DataFrame, axes: Axes, stem: str = "") -> pd.DataFrame:
    """Median times of every valid cell, a row a (case, method), smallest case first; ms of the slowest rank.
    "kernel": the narrowest work, or that of `stem`, without the host (on a CPU plain calls). "vs": speed over the
    baseline on kernel time, else call time, with its 99% interval; `claim` says faster or slower only where that
    excludes 1; "a further run": in which interval its ratio lies, by the runs of this reference, or of a single one
    by `interval.MACHINE`. exposed communication = kernel - compute, host = call - kernel: within the spread they
    may be below 0. "of floor (%)" = 100 * floor / kernel, some percent above 100 where a ceiling, the median of one
    shape, is low.
    """
    work = stem or axes.stem
    metrics = {"kernel": f"{work}_kernel", "compute": "compute_kernel", "reduce": "reduce_kernel"}
    metrics |= {"call": f"{work}_call", "floor": f"floor_{work}"}
    table = frames.medians(frame, axes, **metrics)
    table = table.assign(**{f"{name} (ms)": rounded(table[name], 4) for name in metrics})
    spread = table[["kernel p10", "kernel p90"]].itertuples(index=False)
    table["kernel p10–p90 (ms)"] = [ABSENT if pd.isna(low) else f"{low:.3g}–{high:.3g}" for low, high in spread]
    # Differences of rounded times: no digits that the times do not have.
    table["exposed communication (ms)"] = (table["kernel (ms)"] - table["compute (ms)"]).round(6)
    host = (table["call (ms)"] - table["kernel (ms)"]).round(6)
    table["host (ms)"] = host.mask(table["device"].eq("cpu"))
    table["of floor (%)"] = (100 * table["floor (ms)"] / table["kernel (ms)"]).round(1)
    metric, vs = frames.time_metric(frame, metrics["kernel"]), f"vs {axes.short(axes.over)}"
    further = "a further run"
    ratios = beside(frame, axes, axes.over, set(table["method"]), metric)
    ratios = ratios.rename(columns={"ratio": vs, "further": further})
    table = smallest_first(table.merge(ratios, on=["case", "method"], how="left"), axes)
    table[[vs, further, "claim"]] = table[[vs, further, "claim"]].fillna(ABSENT)
    columns = [axes.x, axes.y, *varying(table, axes), "method", "kernel (ms)", "kernel p10–p90 (ms)", vs]
    # A product and a collective are parts of the narrowest work alone.
    parts = (*(() if stem else ("compute", "reduce", "exposed communication")), "host", "call")
    columns += ["claim", further, *(f"{name} (ms)" for name in parts), "of floor (%)"]
    return rounded(shown(table, axes, columns))


def beside(
    frame: pd.DataFrame, axes: Axes, base: str, methods: Iterable[str], metric: str, turned: bool = False
) -> pd.DataFrame:
    """Of each of `methods` in each case the `ratio` t(base) / t(method) in words, or `turned` its inverse, in which
    interval a `further` run's lies, and the `claim`.
    """
    found = []
    for method in methods:
        pair = (method, base) if turned else (base, method)
        for row in verdicts.ratio(frame, axes, *pair, metric).to_dict("records"):
            told = verdicts.interval_text(row), verdicts.further_text(row), row["outcome"]
            found.append((row["case"], method, *(("1 (itself)", ABSENT, ABSENT) if method == base else told)))
    return pd.DataFrame(found, columns=["case", "method", "ratio", "further", "claim"], dtype=object)


def varying(table: pd.DataFrame, axes: Axes) -> list[str]:
    return [name for name in axes.all_settings if name != axes.y and table[name].nunique() > 1]


def memory_table(frame: pd.DataFrame, axes: Axes, metrics: Mapping[str, str], whole: str = "") -> pd.DataFrame:
    """GiB on the fullest GPU (or process), a row a (case, method): measured, and over its formula.
    `metrics`: word -> metric of bytes, with a `<metric>_formula`; `whole`, one of them: also over `axes.whole`'s.
    """
    names = [name for metric in metrics.values() for name in (metric, f"{metric}_formula")]
    rows = frames.valid(frames.complete(frame, axes))
    rows = rows[rows["metric"].isin(names)]
    about = rows.drop_duplicates(["case", "method"])[[*axes.case_columns, "method"]]
    wide = rows.pivot_table(index=["case", "method"], columns="metric", values="value", aggfunc="max", observed=True)
    wide = smallest_first(about.merge(wide.reindex(columns=names).reset_index(), on=["case", "method"]), axes)
    made = {}
    for word, metric in metrics.items():
        held, formula = wide[metric], wide[f"{metric}_formula"]
        made[f"{word} (GiB)"], made[f"{word} / formula"] = held / GIB, held / formula.where(formula.gt(0))
    if whole:
        alone = wide[wide["method"].eq(axes.whole)].set_index("case")[metrics[whole]]
        made[f"{whole} / {axes.whole}"] = wide[metrics[whole]] / wide["case"].map(alone)
    cell = [axes.x, axes.y, *(name for name in axes.panels if wide[name].nunique() > 1), "dtype", "method"]
    wide = wide.assign(**made).drop_duplicates([*cell, *(f"{word} (GiB)" for word in metrics)])
    return rounded(shown(wide, axes, [*cell, *made]))


def markdown(table: pd.DataFrame) -> list[str]:
    """Its lines; the index is left out. What has many rows is folded."""
    known = table.astype(object).where(table.notna(), ABSENT)
    rows = [
        list(table),
        ["---"] * table.shape[1],
        *([f"{one:g}" if isinstance(one, float) else str(one) for one in row] for row in known.to_numpy()),
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    folded = [f"<details><summary>{len(table)} rows</summary>", "", *lines, "", "</details>"]
    return folded if len(table) > MOST_ROWS else lines


def ceilings_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What the machine itself reached: copy (GB/s), dense GEMM (TFLOP/s), all-reduce bus bandwidth (GB/s)."""
    rows = frames.valid(frame)
    grouped = rows[rows["method"].eq(CEILING)].groupby(["metric", "unit"], sort=False)["value"]
    table = grouped.agg(median="median", lowest="min", highest="max", samples="size").reset_index()
    names = {"copy_bandwidth": "copy", "gemm_rate": "dense GEMM", "allreduce_bandwidth": "all-reduce"}
    table["metric"] = table["metric"].replace(names)
    return rounded(table.rename(columns={"metric": "ceiling"}))


def machine_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Power (W) and SM clock (MHz) of each GPU: p10, median and p90 over all cases and groups; the share in which it
    was throttled, why; "shared for sums", the all-reduce's most symmetric memory, which no method's peak counts.
    """
    rows = frames.complete(frame)
    rows = rows[rows["method"].eq(MACHINE) & rows["status"].eq("ok") & rows["rank"].ge(0)]  # others are of the case
    if len(frame) and rows.empty:
        return pd.DataFrame({"GPU": ["no GPU: power and clocks were not read"]})
    table = []
    for rank, gpu in rows.groupby("rank"):
        values, row = gpu.set_index("metric")["value"], {"GPU": rank}
        for metric, name in (("power", "power {} (W)"), ("sm_clock", "SM clock {} (MHz)")):
            for word, q in (("p10", 0.1), ("median", 0.5), ("p90", 0.9)):
                row[name.format(word)] = values[values.index == metric].quantile(q)
        if "shared_bytes" in values:
            row["shared for sums (GiB)"] = values["shared_bytes"].max() / GIB
        throttle = gpu[gpu["metric"].eq("throttle")]
        throttled = throttle["value"].ne(0)
        words = {word.strip() for text in throttle.loc[throttled, "detail"] for word in str(text).split(",")}
        row |= {"cases throttled (%)": 100 * throttled.mean(), "reasons": ", ".join(sorted(words - {""}))}
        table.append(row)
    return rounded(pd.DataFrame(table))


def widest(frame: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    """`frame`, its rows of energy and power only of the widest work of each case."""
    rows, works = frames.complete(frame, axes), [f"{stem}_kernel" for stem in axes.times]
    drawn = rows["metric"].isin(["energy", "power", "sm_clock"]) & ~rows["method"].eq(MACHINE)
    slot = rows["detail"].astype(str).str.split(" ").str[0]
    most = {case: max(map(works.index, of)) for case, of in slot[drawn & slot.isin(works)].groupby(rows["case"])}
    return rows[~drawn | slot.eq(rows["case"].map(most).map(dict(enumerate(works))))]


def energy_table(frame: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    """What one call of a case's whole work takes, a row a (case, method): joules of all GPUs that work for it, and
    those over the baseline's with their 99% interval; of one GPU the median power and the lowest SM clock.
    """
    rows = widest(frame, axes)
    table = frames.summary(rows, axes, "energy")
    if table.empty:
        return pd.DataFrame({"energy": ["none was measured"]})
    of = frames.valid(rows).groupby(["metric", "case", "method"])["value"]
    for metric, name, value in (("power", "power (W a GPU)", of.median()), ("sm_clock", "SM clock (MHz)", of.min())):
        at = pd.MultiIndex.from_arrays([[metric] * len(table), table["case"], table["method"]])
        table[name] = value.reindex(at).to_numpy()
    named = f"over {axes.short(axes.over)}'s"
    over = beside(rows, axes, axes.over, set(table["method"]), "energy", turned=True).rename(columns={"ratio": named})
    table = table.merge(over, on=["case", "method"], how="left").fillna({named: ABSENT})
    table = rounded(smallest_first(table, axes).rename(columns={"median": "energy (J)"}))
    about = [axes.x, axes.y, *varying(table, axes), "method"]
    return shown(table, axes, [*about, "energy (J)", named, "power (W a GPU)", "SM clock (MHz)"])


def top_kernels(frame: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    """The five slowest kernels of each profiled (case, method), with their share of all its kernels' time."""
    rows, cell = frames.valid(frames.complete(frame, axes)), ["case", "method"]
    columns = [axes.x, axes.y, "method", "kernel", "time (ms)", "share (%)"]
    rows = rows[rows["metric"].eq("kernel_time")]
    median = rows.groupby([*cell, "detail"], sort=False)["value"].transform("median")
    rows = rows.assign(value=median).drop_duplicates([*cell, "detail"])
    rows["share (%)"] = 100 * rows["value"] / rows.groupby(cell)["value"].transform("sum")
    rows = smallest_first(rows.assign(slowest=-rows["value"]), axes, "slowest").groupby(cell, sort=False).head(5)
    # Without its return type, template arguments and parameters, which can fill a page.
    short = (name.removeprefix("void ").split("<")[0].split("(")[0].strip() or name for name in rows["detail"])
    short = [name if len(name) <= 72 else f"{name[:71]}…" for name in short]
    rows = shown(rows.assign(kernel=short, **{"time (ms)": rows["value"]}), axes, columns)
    return rounded(rows, digits=3).assign(**{"share (%)": rows["share (%)"].round(1)})


def rounded(table, digits: int = 3):
    """`table` (a DataFrame or a Series), its floats of `digits` significant digits; what rounding left of 0 is 0."""
    if isinstance(table, pd.DataFrame):
        return table.assign(**{name: rounded(table[name], digits) for name in table.select_dtypes("float")})
    return table.map(lambda value: float(f"{value:.{digits}g}") if abs(value) > 1e-9 else 0.0, na_action="ignore")
