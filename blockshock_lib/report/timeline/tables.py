"""Where the time of the profiled calls went: rows of `traces.read` in, stretches and tables out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from blockshock_lib.report import labels
from blockshock_lib.report.tables import plain_kernel, rounded
from blockshock_lib.report.timeline.traces import COMMUNICATION, COMPUTE, collectives

EXPOSED, IDLE = "exposed", "idle"


def _merged(work: pd.DataFrame) -> np.ndarray:
    """The union of the rows as disjoint stretches in order, (count, 2) of start and end, ms."""
    begin = work["start_ms"].to_numpy(dtype=float)
    edges = np.column_stack([begin, begin + work["duration_ms"].to_numpy(dtype=float)])
    edges = edges[np.argsort(edges[:, 0], kind="stable")]
    if not len(edges):
        return edges.reshape(0, 2)
    until = np.maximum.accumulate(edges[:, 1])
    new = np.r_[True, edges[1:, 0] > until[:-1]]
    return np.column_stack([edges[new, 0], until[np.r_[np.flatnonzero(new)[1:] - 1, len(edges) - 1]]])


def _minus(stretches: np.ndarray, covers: np.ndarray) -> np.ndarray:
    """The parts of disjoint, ordered `stretches` outside disjoint, ordered `covers`."""
    found = []
    firsts = np.searchsorted(covers[:, 1], stretches[:, 0], "right")
    lasts = np.searchsorted(covers[:, 0], stretches[:, 1], "left")
    for (begin, end), first, last in zip(stretches, firsts, lasts, strict=True):
        for low, high in covers[first:last]:
            if low > begin:
                found.append((begin, low))
            begin = high
        if end > begin:
            found.append((begin, end))
    return np.array(found, dtype=float).reshape(-1, 2)


def stretches(work: pd.DataFrame) -> pd.DataFrame:
    """Rows of `read` as the time of each rank, split: case, method, rank, kind, start_ms, end_ms, counted.

    The kinds are "compute" and "communication" (either merged where its rows overlap), "exposed" (communication under
    which that rank computed nothing) and "idle" (neither). With a shared clock the span is the time in which every rank
    was in its profiled calls, else each rank's own from its first row to its last.

    `counted` is False before the end of the first collective, where another follows: until the ranks have met there,
    one seems to communicate while it waits for the others' profilers to start. A stretch across that end is cut in two.
    """
    found = []
    for (case, method), ranks in work.groupby(["case", "method"], sort=False):
        shared = work.attrs.get("clock", {}).get((case, method)) == "shared"
        for rank, (begin, met, end) in _spans(ranks, shared).items():
            rows = ranks[ranks["rank"].eq(rank)]
            for counted, span in ((False, (begin, met)), (True, (met, end))):
                found += [
                    (case, method, rank, kind, *edges, counted)
                    for kind, parts in _split(rows, span).items()
                    for edges in parts
                ]
    columns = ["case", "method", "rank", "kind", "start_ms", "end_ms", "counted"]
    return pd.DataFrame(found, columns=columns).astype({"counted": bool})


def _spans(ranks: pd.DataFrame, shared: bool) -> dict[int, tuple[float, float, float]]:
    """Rank -> begin of its span, end of its first collective (or begin, where none follows it), end of its span; ms."""
    own, met = {}, {}
    for rank, rows in ranks.groupby("rank"):
        ends = rows["start_ms"] + rows["duration_ms"]
        own[rank] = rows["start_ms"].min(), ends.max()
        sent = ends[collectives(rows).index]
        met[rank] = sent.iloc[0] if len(sent) > 1 else own[rank][0]
    common = max(begin for begin, _ in own.values()), min(end for _, end in own.values())
    if shared and common[0] < common[1]:
        own, met = dict.fromkeys(own, common), dict.fromkeys(met, max(met.values()))
    return {rank: (begin, min(max(met[rank], begin), end), end) for rank, (begin, end) in own.items()}


def _split(rows: pd.DataFrame, span: tuple[float, float]) -> dict[str, np.ndarray]:
    """Kind -> stretches (start, end) of one rank within the span."""
    if not span[0] < span[1]:
        return {}
    inside = {}
    for kind in (COMPUTE, COMMUNICATION):
        whole = _merged(rows[rows["kind"].eq(kind)])
        inside[kind] = np.clip(whole[(whole[:, 1] > span[0]) & (whole[:, 0] < span[1])], *span)
    inside[EXPOSED] = _minus(inside[COMMUNICATION], inside[COMPUTE])
    inside[IDLE] = _minus(_minus(np.array([span]), inside[COMPUTE]), inside[COMMUNICATION])
    return inside


def exposed(work: pd.DataFrame) -> pd.DataFrame:
    """Where the time of the profiled calls went, a row a (method, rank): the counted span (ms; see `stretches`), and of
    it compute, communication, exposed communication and idle in ms and %.

    Communication under compute counts in both; compute, exposed and idle add up to the span. `clock` is as in `read`.
    """
    parts = stretches(work)
    rows = []
    for (case, method, rank), own in parts[parts["counted"]].groupby(["case", "method", "rank"], sort=False):
        took = (own["end_ms"] - own["start_ms"]).groupby(own["kind"]).sum()
        span = own["end_ms"].max() - own["start_ms"].min()
        row: dict[str, Any] = {"case": case, "method": labels.label(method), "rank": rank, "span (ms)": span}
        for kind in (COMPUTE, COMMUNICATION, EXPOSED, IDLE):
            row[f"{kind} (ms)"] = took.get(kind, 0.0)
            row[f"{kind} (%)"] = 100 * took.get(kind, 0.0) / span
        rows.append(row | {"clock": work.attrs.get("clock", {}).get((case, method), "own")})
    shares = [f"{kind} (%)" for kind in (COMPUTE, COMMUNICATION, EXPOSED, IDLE)]
    columns = [name for share in shares for name in (share.replace("%", "ms"), share)]
    table = pd.DataFrame(rows, columns=["case", "method", "rank", "span (ms)", *columns, "clock"])
    table = rounded(table).round(dict.fromkeys(shares, 1))
    return table if table["case"].nunique() > 1 else table.drop(columns="case")


def top_kernels(work: pd.DataFrame, method: str, rank: int = 0, count: int = 8) -> pd.DataFrame:
    """The names that took most of one rank's time in `method`'s profiled calls: kind, calls, time (ms), share (%)."""
    rows = work[work["method"].eq(method) & work["rank"].eq(rank)]
    table = rows.groupby(["name", "kind"], sort=False)["duration_ms"].agg(["size", "sum"]).reset_index()
    table.columns = ["kernel", "kind", "stretches", "time (ms)"]
    table["share (%)"] = (100 * table["time (ms)"] / table["time (ms)"].sum()).round(1)
    table = table.sort_values("time (ms)", ascending=False, kind="stable").head(count).reset_index(drop=True)
    return rounded(table.assign(kernel=table["kernel"].map(plain_kernel)))
