"""From the tidy records frame to the rows that a report may use.

No valid check, no number: a cell, one method in one case, counts only with a passed check and no failed one, in any
group. `samples` then gives one value a repeat: the slowest rank's.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from blockshock_lib.report.axes import CEILING, GENERAL, MACHINE, TWIN, Axes

COLUMNS = (
    *("run", "phase", "case", "group", "seed", "code", *GENERAL),
    *("method", "metric", "unit", "value", "repeat", "rank", "status", "reason", "detail"),
)
Metric = str | tuple[str, str]  # or (metric, detail): its rows of that detail alone
OUTCOMES = ("passed", "unsupported", "timeout", "oom", "failed")  # of a check, the worst last
NO_CLAIM = {"cpu": "no claim about speed: CPU", "emulated": "no claim about speed: emulated on one GPU"}


def complete(frame: pd.DataFrame, axes: Axes | None = None) -> pd.DataFrame:
    """`frame`; where it has no rows, with every column that a records frame has."""
    names = dict.fromkeys([*COLUMNS, *(axes.columns if axes else ()), *frame.columns])
    return pd.DataFrame(columns=list(names), dtype="object").astype({"value": float}) if frame.empty else frame


def kind(frame: pd.DataFrame) -> pd.Series:
    """ "gpu", "emulated" or "cpu" for each row: only "gpu" rows may carry a claim about speed."""
    kinds = np.select([frame["device"].eq("cpu"), frame["emulated"].astype(bool)], ["cpu", "emulated"], "gpu")
    return pd.Series(kinds, index=frame.index, dtype=object)


def no_claim(frame: pd.DataFrame) -> str:
    """Why these rows support no claim about speed; "" where all of them are measured on real GPUs."""
    kinds = set() if frame.empty else set(kind(frame).unique())
    return next((reason for name, reason in NO_CLAIM.items() if name in kinds), "")


def checks(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each (run, case, group, method) that was to be checked, with `outcome`, the worst of its rows'."""
    rows = complete(frame)
    rows = rows[rows["metric"].eq("check") & ~rows["method"].isin([CEILING, MACHINE, TWIN])]
    ok = rows["status"].eq("ok")
    outcome = rows["status"].mask(ok & rows["value"].eq(1), "passed").mask(ok & ~rows["value"].eq(1), "failed")
    rows = rows.assign(outcome=pd.Categorical(outcome, OUTCOMES, ordered=True))
    rows = rows.sort_values("outcome", kind="stable").drop_duplicates(["run", "case", "group", "method"], keep="last")
    return rows.assign(outcome=rows["outcome"].astype(object)).sort_index()


def valid(frame: pd.DataFrame, metric: str = "") -> pd.DataFrame:
    """The ok rows, of `metric` alone if given, of cells that passed in all groups checked; ceiling and machine rows."""
    frame = complete(frame)
    keep = frame["status"].eq("ok") & frame["value"].notna()
    keep = (keep & frame["metric"].eq(metric) if metric else keep).to_numpy(bool, copy=True, na_value=False)
    if not keep.any():
        return frame[keep]
    outcome = checks(frame[["run", "case", "group", "method", "metric", "status", "value"]])
    rows = frame.loc[keep, ["case", "method"]]
    cells, cell = (rows["case"].astype(str) + "\0" + rows["method"].astype(str) for rows in (outcome, rows))
    passed = cell.isin(cells[outcome["outcome"].eq("passed")]) & ~cell.isin(cells[outcome["outcome"].eq("failed")])
    keep[keep] = passed | rows["method"].isin([CEILING, MACHINE])
    return frame[keep]


def samples(frame: pd.DataFrame, metric: Metric) -> pd.DataFrame:
    """A row a (case, method, run, group, repeat) of a valid cell: rank -1's, the slowest, else the ranks' largest."""
    name, *detail = [metric] if isinstance(metric, str) else metric
    rows = valid(frame, name)
    rows = rows[rows["detail"].isin(detail)] if detail else rows
    whole, keys = rows["rank"].eq(-1), ["case", "method", "run", "group", "repeat"]
    if whole.all():
        return rows
    single = rows[~whole.groupby([rows["case"], rows["method"]]).transform("any")]
    single = single.sort_values("value", kind="stable").drop_duplicates(keys, keep="last")
    return pd.concat([rows[whole], single]).sort_index() if len(single) else rows[whole]


def summary(frame: pd.DataFrame, axes: Axes, metric: Metric) -> pd.DataFrame:
    """A row a (case, method): the case's columns, method, median, p10, p90 and `size`, smallest cells first. `median`
    is the geometric mean, over runs and within a run over groups, of the groups' medians: the ratio of two is that of
    `verdicts.ratio`, which a median of all samples would miss by up to 1%.
    """
    rows = samples(frame, metric)
    if rows.empty:
        return pd.DataFrame(columns=[*axes.case_columns, "method", "median", "p10", "p90", "size"])
    quantiles = rows.groupby(["case", "method"], sort=False)["value"].quantile([0.1, 0.9]).unstack()
    quantiles.columns = ["p10", "p90"]
    quantiles["median"] = _typical(rows)
    about = rows.drop_duplicates("case")[axes.case_columns]
    table = about.merge(quantiles.reset_index(), on="case", how="right")
    return by_size(table.assign(size=axes.size(table)), axes)


def _typical(rows: pd.DataFrame) -> pd.Series:
    cell = ["case", "method"]
    of_groups = rows.groupby([*cell, "run", "group"], sort=False)["value"].median()
    least, most = (of_groups.groupby(cell).agg(how) for how in ("min", "max"))
    logs = np.log(of_groups.where(of_groups > 0))  # what may be 0 or less has a plain mean
    geometric = np.exp(logs.groupby([*cell, "run"]).mean().groupby(cell).mean())
    plain = of_groups.groupby([*cell, "run"]).mean().groupby(cell).mean()
    return geometric.where(least > 0, plain).where(least < most, least)


def medians(frame: pd.DataFrame, axes: Axes, **metrics: Metric) -> pd.DataFrame:
    """`summary` of several: a row a (case, method) that has one, with columns "<name>", "<name> p10", "<name> p90"."""
    parts = {name: summary(frame, axes, metric) for name, metric in metrics.items()}
    about = pd.concat([part for part in parts.values() if len(part)] or list(parts.values()))
    table = about.drop_duplicates(["case", "method"])[[*axes.case_columns, "method", "size"]]
    for name, part in parts.items():
        columns = {"median": name, "p10": f"{name} p10", "p90": f"{name} p90"}
        part = part[["case", "method", *columns]].astype(dict.fromkeys(columns, float)).rename(columns=columns)
        table = table.merge(part, on=["case", "method"], how="left")
    return by_size(table, axes)


def by_size(table: pd.DataFrame, axes: Axes, *more: str) -> pd.DataFrame:
    """`table`, which has a column `size`, with its smallest cases first, then by `more`."""
    return table.sort_values(["size", axes.y, *more], kind="stable").reset_index(drop=True)


def largest(table: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    """The rows of the largest case, by method."""
    case = table.loc[axes.work(table).idxmax(), "case"]
    return table[table["case"].eq(case)].set_index("method", drop=False).rename_axis(None)


def time_metric(frame: pd.DataFrame, wanted: str) -> str:
    """`wanted` where the frame holds it, else the call time of the same work."""
    call = wanted.replace("_kernel", "_call")
    return wanted if len(valid(frame, wanted)) or valid(frame, call).empty else call


def time_name(rows: pd.DataFrame, axes: Axes, metric: str) -> str:
    """What `metric` is on the machine of `rows`, in words."""
    stem, _, which = metric.rpartition("_")
    if stem not in axes.times:
        return metric.replace("_", " ")
    if which == "kernel" and rows["device"].eq("cpu").all():
        return f"time of {axes.times[stem].words}, plain calls"
    return f"{which} time of {axes.times[stem].words}"


def focus(
    frame: pd.DataFrame, axes: Axes, panels: Sequence[str] = (), metrics: Sequence[str] = ()
) -> tuple[pd.DataFrame, str]:
    """Rows of one setting and machine, and its words: of real GPUs before emulated ones and the CPU, then of the most
    cases. Ceiling rows of its cases stay, and all values of the columns in `panels`. Only `metrics` and checks count.
    """
    rows, keys = complete(frame, axes), [name for name in axes.all_settings if name not in panels]
    if metrics:
        rows = rows[rows["metric"].isin([*metrics, "check"]) | rows["method"].eq(CEILING)]
    measured = rows[~rows["method"].isin([CEILING, MACHINE]) & ~rows["metric"].eq("check")]
    if measured.empty:
        return rows.iloc[:0], ""
    rank = kind(measured).map({"gpu": 0, "emulated": 1, "cpu": 2})
    counts = measured.assign(rank=rank).groupby(["rank", *keys], sort=False, dropna=False)["case"].nunique()
    counts = counts.reset_index(name="cases").sort_values(["rank", "cases"], ascending=[True, False], kind="stable")
    best, others = counts.iloc[0], len(counts) - 1
    same = np.logical_and.reduce([rows[name].eq(best[name]) for name in keys])
    more = f" ({others} other setting{'s' if others > 1 else ''} not drawn)" if others else ""
    return rows[same], setting(best.drop([name for name in panels if name in best]), axes) + more


def setting(row: Mapping, axes: Axes) -> str:
    """ "2 GPUs, bf16" for a row with the columns of its setting, and the study's own words."""
    device, many = ("CPU process", "es") if row["device"] == "cpu" else ("GPU", "s")
    devices = "ranks played by 1 GPU" if row["emulated"] else device + ("" if row["world_size"] == 1 else many)
    return ", ".join(filter(None, [f"{row['world_size']} {devices}", row["dtype"], axes.setting(row)]))


def where(row: Mapping, axes: Axes) -> str:
    """The case of `row` in words, and what its panel is of: "n=4096, order=random, float keys"."""
    return ", ".join(filter(None, [axes.case(row), _panel(row, axes)]))


def panels(table: pd.DataFrame, axes: Axes) -> tuple[pd.Series, list[str]]:
    """The words for the panel of each row, and all of them in order."""
    words = pd.Series([_panel(row, axes) for row in table.to_dict("records")], table.index, dtype=object)
    places = {name: table[name].map(axes.sort(name, table[name]).index) for name in axes.panels}
    order = table.assign(**places).sort_values(list(axes.panels), kind="stable").index if places else table.index
    return words, list(dict.fromkeys(words[order]))


def _panel(row: Mapping, axes: Axes) -> str:
    return ", ".join(filter(None, (axes.word(name, row[name]) for name in axes.panels)))
