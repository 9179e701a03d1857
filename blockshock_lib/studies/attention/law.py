"""The law of block-sparse attention: time = slope x density + overhead, and the density below which it beats dense."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, interval, verdicts
from blockshock_lib.report.interval import Interval
from blockshock_lib.studies.attention.axes import AXES
from blockshock_lib.studies.attention.methods import METHODS

KEYS = ["k_len", *(name for name in AXES.case_columns if name not in ("case", "pattern", "k_len"))]
"""Cases alike in these differ in their pattern alone."""
RIVALS = tuple(name for name, method in METHODS.items() if method.dense and not method.strategy)
DOWN_TO = 0.1


class Law(NamedTuple):
    """Of one method at one length: ms, at full density and at none; and d*, where it takes as long as dense."""

    slope: float
    overhead: float
    worst: float  # of the relative deviations from the law
    even: Interval  # d*, 99%, by the groups of processes that have one above 0; to inf where others have none
    lacks: str  # "1 of 3": groups without a d*
    kept: Interval = Interval(*[np.nan] * 3)  # t(1) d / t(d) at d = DOWN_TO: what is left of proportionality


def sparse(frame: pd.DataFrame) -> list[str]:
    """The methods that take the lists, in table order."""
    return [name for name in AXES.ordered(frame["method"]) if not METHODS[name].dense]


def densities(frame: pd.DataFrame) -> pd.Series:
    """Case -> the share of its blocks that is visited, as measured."""
    rows = frames.valid(frames.complete(frame, AXES))
    return rows[rows["metric"].eq("block_density")].groupby("case")["value"].first()


def blocks(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of whole blocks at random."""
    frame = frames.complete(frame, AXES)
    return frame[frame["pattern"].astype(str).str.startswith("blocks")]


def cells(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Of whole blocks at random: a row a (case, method), smallest density first within KEYS, with `density`, `median`
    and `logs`, (run, group) -> log of its median ms.
    """
    frame = blocks(frame)
    table = frames.summary(frame, AXES, metric)
    medians = frames.samples(frame, metric).groupby(["case", "method", "run", "group"])["value"].median()
    logs = np.log(medians.astype(float))
    table["density"] = table["case"].map(densities(frame)).astype(float)
    table["logs"] = [logs[key].to_dict() for key in zip(table["case"], table["method"], strict=True)]
    return table.dropna(subset="density").sort_values([*KEYS, "density"], kind="stable")


def line(density: np.ndarray, ms: np.ndarray) -> tuple[float, float]:
    """(slope, overhead) with the least squared relative deviations."""
    slope, overhead = np.linalg.lstsq(np.stack([density, np.ones_like(density)], 1) / ms[:, None], np.ones(len(ms)))[0]
    return float(slope), float(overhead)


def laws(frame: pd.DataFrame, work: str = "forward") -> pd.DataFrame:
    """A row a (KEYS, method), shortest first: `law`; `rival`, the faster of the dense kernels, and `dense`, its ms; and
    `dense kernels`, those that ran. Intervals are over runs, of a single one over its fresh groups of processes, each
    with a law of its own, and hold at 99% for all methods together, for the best of them is chosen; d* is the time of
    the dense kernel less the overhead, over the slope.
    """
    table = cells(frame, frames.time_metric(frame, f"{work}_kernel"))
    found = []
    for place, part in table.groupby(KEYS, sort=True):
        logs = np.log(part["median"].astype(float)).groupby(part["method"]).mean()  # dense takes as long in each case
        logs = logs[logs.index.isin(RIVALS)]
        rival = logs.idxmin() if len(logs) else ""
        dense = part[part["method"].eq(rival)]
        for method in sparse(part):
            own = part[part["method"].eq(method)]
            if own["density"].nunique() > 1 and len(dense):
                law, each = _law(own, dense)
                mean = float(np.exp(logs[rival]))
                about = dict(zip(KEYS, place, strict=True)) | {"method": method, "rival": rival, "dense": mean}
                ran = ", ".join(map(AXES.short, AXES.ordered(logs.index)))
                about |= {"dense kernels": ran, "densities": own["density"].nunique()}
                found.append(about | {"law": law} | each)
    for name in ("even", "kept"):
        known = [row for row in found if row[name] and all(one > 0 for one in row[name].values())]
        logs = [interval.by_run(row[name], np.log([*row[name].values()])) for row in known]
        level = 1 - (1 - interval.LEVEL) / max(1, len({row["method"] for row in found}))  # Bonferroni
        for row, both in zip(known, interval.intervals(logs, level), strict=True):
            mean = both.mean if both.mean.high < 100 else Interval(both.mean.ratio, 0.0, np.inf)
            row["law"] = row["law"]._replace(**{name: mean})
    columns = [*KEYS, "method", "rival", "dense", "dense kernels", "densities", "law"]
    return pd.DataFrame(found, columns=columns)


def _law(own: pd.DataFrame, dense: pd.DataFrame) -> tuple[Law, dict[str, dict[tuple, float]]]:
    """And of each group of processes, by a law of its own, `even` and `kept`."""
    density, ms = own["density"].to_numpy(float), own["median"].to_numpy(float)
    slope, overhead = line(density, ms)
    worst = float(np.abs((slope * density + overhead) / ms - 1).max())
    each = {"even": {}, "kept": {}}
    for key in sorted(set().union(*own["logs"])):  # runs may hold other cells
        here = np.array([key in logs for logs in own["logs"]])
        level = [logs[key] for logs in dense["logs"] if key in logs]
        if not level or len(set(density[here])) < 2:
            continue
        a, b = line(density[here], np.exp([logs[key] for logs in own["logs"][here]]))
        each["even"][key] = (np.exp(np.mean(level)) - b) / a if a > 0 else np.nan
        each["kept"][key] = (a + b) / (a + b / DOWN_TO)
    has = np.log([even for even in each["even"].values() if even > 0])
    point = Interval(float(np.exp(has.mean())) if len(has) else np.nan, 0.0, np.inf)
    count = len(each["even"])
    return Law(slope, overhead, worst, point, f"{count - len(has)} of {count}" * (count > len(has))), each


def fastest(table: pd.DataFrame) -> pd.DataFrame:
    """Of `laws` the method of each KEYS whose d* has the largest lower end; without intervals the largest d*."""
    ends = pd.DataFrame([law.even for law in table["law"]], table.index, Interval._fields).fillna(0.0)
    order = ends.sort_values(["low", "ratio"], ascending=False, kind="stable").index
    return table.loc[order].drop_duplicates(KEYS).sort_index()


def judged(frame: pd.DataFrame) -> Iterator[tuple[dict, pd.DataFrame]]:
    """Of `blocks`, a KEYS, shortest first: the row of `laws` that counts, with `nowhere`, whether each method is slower
    in all its cells, and `by` what it is; and its cells, those of `verdicts.ratio` over the rival.
    """
    for _, every in laws(frame).groupby(KEYS):
        part = frame[np.logical_and.reduce([frame[name].eq(every[name].iloc[0]) for name in KEYS])]
        metric = frames.time_metric(part, "forward_kernel")
        found = {name: verdicts.ratio(part, AXES, every["rival"].iloc[0], name, metric) for name in every["method"]}
        (row,) = fastest(every).to_dict("records")
        row["nowhere"] = all(one["outcome"].eq(verdicts.SLOWER).all() for one in found.values())
        by = "each kernel" if row["nowhere"] else AXES.short(row["method"])
        yield row | {"by": f"{by}, batch {row['batch']}, {row['densities']} densities"}, found[row["method"]]
