"""From the tidy records frame to the rows that a report may use.

A *cell* is one method in one case. No valid check, no number: the measurements of a cell count only where the cell has
a passed check and no failed one, in any group. `samples` then gives one value a repeat: the slowest rank's.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from blockshock_lib.report import labels

CASE = [
    "case",
    "shape",
    "in_features",
    "out_features",
    "n",
    "batch",
    "dtype",
    "mask",
    "workload",
    "world_size",
    "emulated",
    "device",
    "optimizer",
]
COLUMNS = [
    "run",
    "phase",
    *CASE,
    "group",
    "seed",
    "code",
    "method",
    "metric",
    "unit",
    "value",
    "repeat",
    "rank",
    "status",
    "reason",
    "detail",
]
NO_CLAIM = {
    "cpu": "no claim about speed: CPU",
    "emulated": "no claim about speed: emulated on one GPU",
}


def complete(frame: pd.DataFrame) -> pd.DataFrame:
    """`frame` with every column of a records frame; one without rows stays without rows."""
    if not len(frame.columns) or frame.empty:
        return pd.DataFrame({name: pd.Series(dtype="object") for name in COLUMNS}).astype({"value": float})
    missing = {name: "" for name in ("optimizer", "code") if name not in frame}
    return frame.assign(**missing) if missing else frame


def kind(frame: pd.DataFrame) -> pd.Series:
    """ "gpu", "emulated" or "cpu" for each row: only "gpu" rows may carry a claim about speed."""
    emulated = frame["emulated"].astype(bool)
    return pd.Series(
        np.select([frame["device"].eq("cpu"), emulated], ["cpu", "emulated"], "gpu"), index=frame.index, dtype=object
    )


def no_claim(frame: pd.DataFrame) -> str:
    """Why these rows support no claim about speed; "" where all of them are measured on real GPUs."""
    if frame.empty:
        return ""
    kinds = set(kind(frame))
    return next((NO_CLAIM[k] for k in ("cpu", "emulated") if k in kinds), "")


def size(cells: pd.DataFrame) -> pd.Series:
    """sqrt(in_features * out_features): N where the weight is square."""
    return np.sqrt(cells["in_features"].astype(float) * cells["out_features"].astype(float))


def checks(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each (run, case, group, method) that was to be checked, with `outcome`.

    The outcome is the worst of its check rows: passed < unsupported < timeout < oom < failed.
    """
    rows = complete(frame)
    rows = rows[rows["metric"].eq("check") & ~rows["method"].isin([labels.CEILING, labels.MACHINE])]
    ok = rows["status"].eq("ok")
    outcome = rows["status"].mask(ok & rows["value"].eq(1), "passed").mask(ok & ~rows["value"].eq(1), "failed")
    rows = rows.assign(outcome=pd.Categorical(outcome, ["passed", "unsupported", "timeout", "oom", "failed"], True))
    rows = rows.sort_values("outcome", kind="stable").drop_duplicates(["run", "case", "group", "method"], keep="last")
    return rows.assign(outcome=rows["outcome"].astype(object)).sort_index()


def valid(frame: pd.DataFrame) -> pd.DataFrame:
    """The ok rows of cells whose check passed in every group that was checked, and the ceiling and machine rows."""
    frame = complete(frame)
    outcome = checks(frame)
    good = pd.MultiIndex.from_frame(outcome.loc[outcome["outcome"].eq("passed"), ["case", "method"]])
    bad = pd.MultiIndex.from_frame(outcome.loc[outcome["outcome"].eq("failed"), ["case", "method"]])
    cell = pd.MultiIndex.from_frame(frame[["case", "method"]])
    machine = frame["method"].isin([labels.CEILING, labels.MACHINE]).to_numpy(dtype=bool)
    keep = (cell.isin(good) & ~cell.isin(bad)) | machine
    return frame[keep & frame["status"].eq("ok").to_numpy(dtype=bool) & frame["value"].notna().to_numpy(dtype=bool)]


def samples(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """One row for each (case, method, run, group, repeat) of a valid cell: `value` in the metric's unit.

    A row of rank -1 is the slowest rank already; where there is none, the largest value of the ranks is taken.
    """
    rows = valid(frame)
    rows = rows[rows["metric"].eq(metric)]
    if rows.empty:
        return rows
    over_ranks = rows["rank"].eq(-1).groupby([rows["case"], rows["method"]]).transform("any")
    whole, single = rows[rows["rank"].eq(-1)], rows[~over_ranks]
    if not single.empty:
        keys = ["case", "method", "run", "group", "repeat"]
        single = single.sort_values("value", kind="stable").drop_duplicates(keys, keep="last")
    return pd.concat([whole, single]).sort_index() if len(single) else whole


def groups(rows: pd.DataFrame) -> dict[tuple, np.ndarray]:
    """The values of each fresh group of processes, by (run, group), in order of their repeats."""
    return {
        key: group.sort_values("repeat", kind="stable")["value"].to_numpy(dtype=float)
        for key, group in rows.groupby(["run", "group"], sort=True)
    }


def spread(values: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Median, p10 and p90 of `value` for each group of `by`, with those keys as columns."""
    grouped = values.groupby(by, sort=False, dropna=False, observed=True)["value"]
    quantiles = grouped.quantile([0.1, 0.5, 0.9]).unstack()
    quantiles.columns = ["p10", "median", "p90"]
    return quantiles[["median", "p10", "p90"]].reset_index()


def summary(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A row a (case, method): CASE columns, method, median, p10, p90 and `size`, smallest cells first."""
    rows = samples(frame, metric)
    if rows.empty:
        return pd.DataFrame(columns=[*CASE, "method", "median", "p10", "p90", "size"])
    table = spread(rows, ["case", "method"])
    about = rows.drop_duplicates("case")[CASE]
    table = about.merge(table, on="case", how="right")
    table["size"] = size(table)
    return table.sort_values(["size", "batch"], kind="stable").reset_index(drop=True)


def time_metric(frame: pd.DataFrame, wanted: str = "forward_kernel") -> str:
    """`wanted` where the frame holds it, else the call time of the same work.

    CPU records hold `forward_kernel` too: a CPU has no CUDA graphs, so there it is the time of plain calls in a loop.
    """
    have, call = set(valid(frame)["metric"]), wanted.replace("_kernel", "_call")
    return wanted if wanted in have or call not in have else call


WORK = {"forward": "a forward", "pass": "a forward and dX", "step": "a training step"}


def work(metric: str) -> str:
    """What `metric` times, in words: "a training step" for step_kernel and step_call."""
    return WORK.get(metric.rpartition("_")[0], metric.replace("_", " "))


def time_name(rows: pd.DataFrame, metric: str) -> str:
    """What `metric` is on the machine of `rows`, in words for an axis or a subtitle."""
    name, _, kind = metric.rpartition("_")
    if name not in WORK:
        return metric.replace("_", " ")
    if kind == "kernel" and rows["device"].eq("cpu").all():
        return f"time of {WORK[name]}, plain calls"
    return f"{kind} time of {WORK[name]}"


FOCUS = ["device", "emulated", "world_size", "dtype", "mask", "workload", "optimizer"]


def focus(frame: pd.DataFrame, panels: tuple[str, ...] = ()) -> tuple[pd.DataFrame, str]:
    """Rows of one setting (FOCUS columns), so that a figure never joins points of different masks or machines.

    Real GPUs come before emulated ones and the CPU, then the setting with the most cases, then the first. Ceiling rows
    of its cases stay. All values of the columns in `panels` stay too: the figure keeps them apart. Returns the rows and
    a phrase that names the setting and how many others were left out.
    """
    rows, keys = complete(frame), [name for name in FOCUS if name not in panels]
    measured = rows[~rows["method"].isin([labels.CEILING, labels.MACHINE]) & ~rows["metric"].eq("check")]
    if measured.empty:
        return rows.iloc[:0], ""
    rank = kind(measured).map({"gpu": 0, "emulated": 1, "cpu": 2})
    counts = measured.assign(rank=rank).groupby(["rank", *keys], sort=False, dropna=False)["case"].nunique()
    counts = counts.reset_index(name="cases").sort_values(["rank", "cases"], ascending=[True, False], kind="stable")
    best = counts.iloc[0]
    same = np.logical_and.reduce([rows[name].eq(best[name]) for name in keys])
    return rows[same], setting(best, others=len(counts) - 1)


def setting(row: pd.Series, others: int = 0) -> str:
    """ "2 GPUs, bf16, checkerboard mask, gaussian input" for a row with the FOCUS columns; and its optimizer."""
    if row["device"] == "cpu":
        where = f"{row['world_size']} CPU processes"
    elif row["emulated"]:
        where = f"{row['world_size']} ranks played by 1 GPU"
    else:
        where = f"{row['world_size']} GPUs"
    words = f"{where}, {row['dtype']}, {row['mask']} mask, {row['workload']} input"
    words += f", {labels.optimizer(row['optimizer'])}" if row.get("optimizer") else ""
    return words + (f" ({others} other setting{'s' if others > 1 else ''} not drawn)" if others else "")
