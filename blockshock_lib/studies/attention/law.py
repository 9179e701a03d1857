"""The law of block-sparse attention: time = slope x density + overhead, and the density below which it beats dense."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, interval
from blockshock_lib.report.interval import Interval, log_medians
from blockshock_lib.studies.attention.axes import AXES
from blockshock_lib.studies.attention.methods import METHODS

KEYS = ["k_len", "shape", "block", "dtype"]
"""Cases alike in these differ in their pattern alone."""
DENSE = next(name for name, method in METHODS.items() if method.dense)
NEVER = Interval(np.nan, np.nan, np.nan)


class Law(NamedTuple):
    """Of one method at one length: ms, at full density and at none; and d*, where it takes as long as dense."""

    slope: float
    overhead: float
    worst: float  # of the relative deviations from the law
    even: Interval  # d*, 99%; NaN where some group of processes has none above 0


def sparse(frame: pd.DataFrame) -> list[str]:
    """The methods that take the lists, in table order."""
    return [name for name in AXES.ordered(frame["method"]) if not METHODS[name].dense]


def densities(frame: pd.DataFrame) -> pd.Series:
    """Case -> the share of its blocks that is visited, as measured."""
    rows = frames.valid(frames.complete(frame, AXES))
    return rows[rows["metric"].eq("block_density")].groupby("case")["value"].first()


def cells(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Of whole blocks at random: a row a (case, method), smallest density first within KEYS, with `density`, `median`
    and `logs`, (run, group) -> log of its median ms.
    """
    frame = frames.complete(frame, AXES)
    frame = frame[frame["pattern"].astype(str).str.startswith("blocks")]
    table = frames.summary(frame, AXES, metric)
    rows = {key: part for key, part in frames.samples(frame, metric).groupby(["case", "method"])}
    table["density"] = table["case"].map(densities(frame)).astype(float)
    table["logs"] = [_logs(rows[key]) for key in zip(table["case"], table["method"], strict=True)]
    return table.dropna(subset="density").sort_values([*KEYS, "density"], kind="stable")


def _logs(rows: pd.DataFrame) -> dict[tuple, float]:
    groups = frames.groups(rows)
    return dict(zip(groups, map(float, log_medians(groups.values())), strict=True))


def line(density: np.ndarray, ms: np.ndarray) -> tuple[float, float]:
    """(slope, overhead) with the least squared relative deviations."""
    slope, overhead = np.linalg.lstsq(np.stack([density, np.ones_like(density)], 1) / ms[:, None], np.ones(len(ms)))[0]
    return float(slope), float(overhead)


def laws(frame: pd.DataFrame, work: str = "forward") -> pd.DataFrame:
    """A row a (KEYS, method), shortest first: `law`, `dense` (ms of the best dense kernel) and `densities`, how many
    tell. The interval of d* is over runs, of a single one over its fresh groups of processes, each with a law of its
    own: the time of the dense kernel less the overhead, over the slope.
    """
    table = cells(frame, frames.time_metric(frame, f"{work}_kernel"))
    found = []
    for place, part in table.groupby(KEYS, sort=True):
        dense = part[part["method"].eq(DENSE)]
        for method in sparse(part):
            own = part[part["method"].eq(method)]
            if own["density"].nunique() > 1 and len(dense):
                law, evens = _law(own, dense)
                about = dict(zip(KEYS, place, strict=True)) | {"method": method, "device": own["device"].iloc[0]}
                about |= {"emulated": own["emulated"].iloc[0], "dense": _mean(dense), "densities": len(own)}
                found.append(about | {"law": law, "evens": evens})
    known = [row for row in found if row["evens"]]
    for row, both in zip(known, interval.intervals([row["evens"] for row in known]), strict=True):
        row["law"] = row["law"]._replace(even=both.mean)
    columns = [*KEYS, "method", "device", "emulated", "dense", "densities", "law"]
    return pd.DataFrame(found, columns=columns)


def _mean(part: pd.DataFrame) -> float:
    # Dense takes as long in each case of a length.
    return float(np.exp(np.log(part["median"].astype(float)).mean()))


def _law(own: pd.DataFrame, dense: pd.DataFrame) -> tuple[Law, Mapping[str, np.ndarray]]:
    density, ms = own["density"].to_numpy(float), own["median"].to_numpy(float)
    slope, overhead = line(density, ms)
    worst = float(np.abs((slope * density + overhead) / ms - 1).max())
    shared = set.intersection(*(set(logs) for logs in [*own["logs"], *dense["logs"]]))
    evens = {}
    for key in sorted(shared):
        a, b = line(density, np.exp([logs[key] for logs in own["logs"]]))
        evens[key] = (np.exp(np.mean([logs[key] for logs in dense["logs"]])) - b) / a
    real = bool(evens) and min(evens.values()) > 0
    logs = interval.by_run(evens, np.log([*evens.values()])) if real else {}
    return Law(slope, overhead, worst, NEVER), logs


def proportional(frame: pd.DataFrame, down_to: float, work: str = "forward") -> pd.DataFrame:
    """How much of a proportional speed-up is left: t(1) d / t(d), of a density d within a quarter of `down_to`. A row a
    (KEYS, method): `density`, and `ratio`, `low`, `high`.
    """
    table, found, logs = cells(frame, frames.time_metric(frame, f"{work}_kernel")), [], []
    for _, part in table.groupby(KEYS, sort=True):
        for method in sparse(part):
            own = part[part["method"].eq(method)]
            near = own[own["density"].between(0.75 * down_to, 1.25 * down_to)]
            full = own[own["density"].ge(0.999)]
            if len(near) and len(full):
                few, all_ = near.iloc[0], full.iloc[0]
                keys = sorted(few["logs"].keys() & all_["logs"].keys())  # groups of processes that measured both
                each = np.array([all_["logs"][key] - few["logs"][key] for key in keys])
                about = few[[*KEYS, "method", "device", "emulated", "density"]].to_dict()
                found.append(about)
                logs.append(interval.by_run(keys, each + np.log(few["density"] / all_["density"])))
    both = interval.intervals(logs)
    rows = [about | one.mean._asdict() for about, one in zip(found, both, strict=True)]
    return pd.DataFrame(rows, columns=[*KEYS, "method", "device", "emulated", "density", "ratio", "low", "high"])


def fastest(table: pd.DataFrame) -> pd.DataFrame:
    """Of `laws` the method of each KEYS with the largest break-even: the kernel that decides there."""
    even = table["law"].map(lambda law: law.even.ratio).astype(float).fillna(0.0)
    return table.loc[even.groupby([table[name] for name in KEYS]).idxmax()] if len(table) else table
