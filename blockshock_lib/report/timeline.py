"""Where the time of the profiled calls went: torch.profiler's Chrome traces of a run in, a table and the timeline out.

A file may come from a stranger: it is read within limits, its events are checked, and nothing of it is more than text
and numbers.
"""

import gzip
import json
import re
import warnings
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib.axes
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from blockshock_lib.errors import RecordError
from blockshock_lib.report import figures, frames
from blockshock_lib.report.axes import Axes
from blockshock_lib.report.figures import FAINT, MUTED
from blockshock_lib.report.tables import rounded

NAME = re.compile(r"(?P<case>[0-9a-f]+)-(?P<method>\w+)-rank(?P<rank>\d{1,5})\.json\.gz")
MOST_BYTES = 64 * 2**20  # of one trace unpacked; a real one of three calls has a tenth of a MiB
COMPUTE, COMMUNICATION, EXPOSED, IDLE = "compute", "communication", "exposed", "idle"
COLUMNS = ["case", "method", "rank", "kind", "name", "start_ms", "duration_ms"]

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# NCCL's kernels, ours and torch's in symmetric memory (one_shot, multimem_...), and copies between two GPUs.
_SENDS = re.compile(
    r"nccl|nvshmem|multimem|symm_?mem|(one|two)_shot|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|memcpy ptop",
    re.IGNORECASE,
)


def document(path: Path) -> dict[str, Any]:
    """A trace file as it was written, checked: the JSON object form of the Trace Event Format (Chromium's document), a
    list `traceEvents` of objects, each with a phase `ph`. A complete event (`ph` "X") has a name, a finite `ts` and a
    finite `dur` from 0 up, both in us, and `pid` and `tid`, numbers or text.

    Raises:
        RecordError: the file is missing, too large, damaged, or no trace.
    """
    try:
        with gzip.open(path) as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise RecordError(f"trace {path.name} holds more than {MOST_BYTES >> 20} MiB and is not read")
        found = json.loads(data, parse_constant=int)  # NaN and Infinity are no JSON: int refuses them
    except OSError as error:  # gzip.BadGzipFile is one
        raise RecordError(f"trace {path.name} could not be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise RecordError(f"trace {path.name} is damaged: {error}") from error
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list) or not all(map(_whole, events)):
        raise RecordError(f"trace {path.name} is no Chrome trace: it lacks whole events")
    return found


def _whole(event: Any) -> bool:
    if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
        return False
    start, took, *ids = (event.get(key) for key in ("ts", "dur", "pid", "tid"))
    timed = all(type(value) in (int, float) and abs(value) < 1e18 for value in (start, took)) and took >= 0
    named = isinstance(event.get("name"), str) and all(type(one) in (int, str) for one in ids)
    return event["ph"] != "X" or (timed and named)


def read(folder: Path, axes: Axes) -> pd.DataFrame:
    """What every GPU did in the profiled calls (traces/ of a run's folder): COLUMNS, a row a kernel, copy or memset;
    nothing of a run on a CPU. `start_ms`: from the method's first; the ranks' clocks are set by the end of their first
    collective, which none leaves much before the others. `attrs["damaged"]`: the files that `document` refused, with a
    warning.
    """
    parts, damaged = [], []
    for path in sorted(folder.glob("traces/*.json.gz")):
        named = NAME.fullmatch(path.name)
        if named is None or not path.is_file():
            continue
        try:
            work = _work(document(path)["traceEvents"])
        except RecordError as error:
            damaged.append(path.name)
            warnings.warn(f"skipped: {error}", stacklevel=2)
            continue
        if len(work):
            sent = work[work["kind"].eq(COMMUNICATION)]
            zero = (sent["ts"] + sent["dur"]).iloc[0] if len(sent) else work["ts"].min()
            parts.append(work.assign(**named.groupdict() | {"rank": int(named["rank"])}, ts=work["ts"] - zero))
    table = pd.concat(parts) if parts else pd.DataFrame(columns=["ts", "dur", *COLUMNS])
    order = axes.place_of(table["method"])
    place = lambda column: column.map(order) if column.name == "method" else column  # noqa: E731
    table = table.sort_values(["case", "method", "rank"], key=place, ignore_index=True)  # several: a stable sort
    zero = table.groupby(["case", "method"])["ts"].transform("min")
    table["start_ms"], table["duration_ms"] = (table["ts"] - zero) / 1e3, table["dur"] / 1e3
    table = table[COLUMNS].astype({"rank": int, "start_ms": float, "duration_ms": float})
    table.attrs = {"damaged": damaged}
    return table


def _work(events: Iterable[dict[str, Any]]) -> pd.DataFrame:
    rows = [
        (event["ts"], event["dur"], COMMUNICATION if _SENDS.search(event["name"]) else COMPUTE, event["name"])
        for event in events
        if event["ph"] == "X" and event.get("cat") in _DEVICE
    ]
    table = pd.DataFrame(rows, columns=["ts", "dur", "kind", "name"])
    return table.astype({"ts": float, "dur": float}).sort_values("ts", kind="stable", ignore_index=True)


def stretches(work: pd.DataFrame) -> pd.DataFrame:
    """Rows of `read` as the time of each rank, split: case, method, rank, kind, start_ms, end_ms, counted.
    Kinds: "compute", "communication" (each merged where rows overlap), "exposed" (communication without compute) and
    "idle". The span: while every rank that meets others was in its profiled calls. `counted` is False before the end
    of the first collective, where another follows: there a rank waits for others' profilers.
    """
    parts = []
    for (case, method), ranks in work.groupby(["case", "method"], sort=False):
        for rank, (begin, met, end) in _spans(ranks).items():
            rows = ranks[ranks["rank"].eq(rank)]
            for counted, span in ((False, (begin, met)), (True, (met, end))):
                for kind, edges in _split(rows, span).items():
                    parts += [(case, method, rank, kind, *stretch, counted) for stretch in edges]
    columns = ["case", "method", "rank", "kind", "start_ms", "end_ms", "counted"]
    return pd.DataFrame(parts, columns=columns).astype({"counted": bool})


def _spans(ranks: pd.DataFrame) -> dict[int, tuple[float, float, float]]:
    """Rank -> begin of its span, end of its first collective (or begin, where none follows it), end of its span; ms."""
    own, met, meets = {}, {}, True
    for rank, rows in ranks.groupby("rank"):
        ends = rows["start_ms"] + rows["duration_ms"]
        own[rank], sent = (rows["start_ms"].min(), ends.max()), ends[rows["kind"].eq(COMMUNICATION)]
        met[rank], meets = sent.iloc[0] if len(sent) > 1 else own[rank][0], meets and len(sent) > 0
    common = max(begin for begin, _ in own.values()), min(end for _, end in own.values())
    if meets and common[0] < common[1]:
        own = dict.fromkeys(own, common)
    return {rank: (begin, min(max(met[rank], begin), end), end) for rank, (begin, end) in own.items()}


def _split(rows: pd.DataFrame, span: tuple[float, float]) -> dict[str, np.ndarray]:
    """Kind -> stretches (start, end) of one rank within the span, (count, 2), merged where they touch; ms."""
    if not span[0] < span[1]:
        return {}
    times = np.column_stack([rows["start_ms"], rows["start_ms"] + rows["duration_ms"]])
    edges = np.unique(np.clip([*times.ravel(), *span], *span))
    busy = {kind: _running(times[rows["kind"].eq(kind)], edges) for kind in (COMPUTE, COMMUNICATION)}
    busy[EXPOSED] = busy[COMMUNICATION] & ~busy[COMPUTE]
    busy[IDLE] = ~busy[COMMUNICATION] & ~busy[COMPUTE]
    turns = {kind: np.diff(np.r_[0, on.astype(int), 0]) for kind, on in busy.items()}
    return {kind: np.column_stack([edges[turn > 0], edges[turn < 0]]) for kind, turn in turns.items()}


def _running(times: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Whether one of (start, end), (count, 2), runs between each two neighbouring edges, where none begins or ends."""
    middles = (edges[1:] + edges[:-1]) / 2
    return np.searchsorted(np.sort(times[:, 0]), middles) > np.searchsorted(np.sort(times[:, 1]), middles)


def exposed(_: pd.DataFrame, axes: Axes, folder: Path) -> pd.DataFrame:
    """`spent` in the profiled calls of the run in `folder`."""
    return spent(read(folder, axes), axes)


def spent(work: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    """Where the time of the profiled calls went, a row a (method, rank): the counted span (ms; see `stretches`), and of
    it compute, communication, exposed communication and idle in ms and %; compute, exposed and idle add up to it.
    """
    parts, kinds = stretches(work), (COMPUTE, COMMUNICATION, EXPOSED, IDLE)
    rows, columns = [], [f"{kind} ({unit})" for kind in kinds for unit in ("ms", "%")]
    for (case, method, rank), own in parts[parts["counted"]].groupby(["case", "method", "rank"], sort=False):
        took = (own["end_ms"] - own["start_ms"]).groupby(own["kind"]).sum().reindex(kinds, fill_value=0.0)
        span = own["end_ms"].max() - own["start_ms"].min()
        times = (amount for time in took for amount in (time, 100 * time / span))
        rows.append([case, axes.label(method), rank, span, *times])
    table = pd.DataFrame(rows, columns=["case", "method", "rank", "span (ms)", *columns])
    table = rounded(table).round(dict.fromkeys((f"{kind} (%)" for kind in kinds), 1))
    return table if table["case"].nunique() > 1 else table.drop(columns="case")


# Lane of a rank's line (from, height), face, hatch and words. Told apart without colour by lane and hatch.
_LOOKS = {
    IDLE: (-0.4, 0.8, "#F0F0F0", "....", "idle"),
    COMPUTE: (0.02, 0.38, "#0072B2", "", "compute (lower lane)"),
    COMMUNICATION: (-0.4, 0.38, "#F5D48A", "", "communication under compute"),
    EXPOSED: (-0.4, 0.38, "#E69F00", "/////", "communication, exposed"),
}
_SHARES = {EXPOSED: "exposed communication", IDLE: "idle"}
_NOTE = (
    "Drawn from the end of the first collective, by which the ranks' clocks are set, until each method has "
    "communicated once more; a share is of all that is counted, which goes on. Communication holds the time that a "
    "rank waits for another to arrive. "
)


def timeline(frame: pd.DataFrame, axes: Axes, folder: Path) -> Figure:
    """Time of every rank in the longest case that is traced in a run's `folder`, a panel a method: of what is counted,
    as much as shows each of them communicate.
    """
    work = read(folder, axes)
    damaged = work.attrs["damaged"]
    if work.empty:
        why = f"all {len(damaged)} traces are damaged" if damaged else "this run holds no traces of a GPU"
        return figures.empty("Timeline of the profiled calls", why)
    took = work.groupby("case", sort=False)["duration_ms"].sum()
    case, others = took.idxmax(), len(took) - 1
    about = frames.complete(frame)
    about, work = about[about["case"].eq(case)].head(1), work[work["case"].eq(case)]
    parts, table = stretches(work), spent(work, axes)
    of = table.groupby("method").sum(numeric_only=True)
    shares = of[[f"{kind} (ms)" for kind in _SHARES]].div(of["span (ms)"] / 100, axis=0)
    methods = list(dict.fromkeys(work["method"]))
    ranks = {name: sorted(parts.loc[parts["method"].eq(name), "rank"].unique()) for name in methods}
    skipped = f"{len(damaged)} damaged trace{'s' * (len(damaged) > 1)} left out." if damaged else ""
    lead, drawn = axes.label(axes.under if axes.under in methods else methods[0]), parts[parts["counted"]]
    start = drawn.groupby("method")["start_ms"].min()
    sent = drawn[drawn["kind"].eq(COMMUNICATION)].drop_duplicates(["method", "rank"])  # the first of each rank
    until = ((sent if len(sent) else drawn).set_index("method")["end_ms"] - start).max()
    drawn = drawn[drawn["start_ms"] < drawn["method"].map(start) + 1.03 * until]
    row = "{method} rank {rank}: {span (ms):.3g} ms, compute {compute (%):.0f}%, "
    row += "exposed communication {exposed (%):.0f}%, idle {idle (%):.0f}%."
    with figures.drawing(
        9.6,
        0.75 + 0.38 * len(methods) + 0.3 * sum(map(len, ranks.values())),
        f"{lead}: {shares.loc[lead, 'exposed (ms)']:.0f}% of the time is exposed communication",
        frames.no_claim(about),
        *(text for one in about.to_dict("records") for text in (axes.case(one), frames.setting(one, axes))),
        f"{others} other case{'s' * (others > 1)} not drawn" if others else "",
        alt=" ".join(["Bars along time, a line a rank.", *(row.format_map(one) for one in table.to_dict("records"))]),
        note=_NOTE * bool(work["kind"].eq(COMMUNICATION).any()) + skipped,
        rows=len(methods),
        sharex=True,
        gridspec_kw={"height_ratios": [len(each) for each in ranks.values()]},
    ) as (fig, grid):
        for ax, name in zip(grid[:, 0], methods, strict=True):
            _panel(ax, drawn[drawn["method"].eq(name)], start[name], ranks[name])
            said = zip(_SHARES.values(), shares.loc[axes.label(name)], strict=True)
            said = ", ".join(f"{words} {share:.0f}%" for words, share in said)
            ax.set_title(f"{axes.label(name)}: {said}", fontsize=9)
        grid[-1, 0].set_xlabel("time (ms)")
        grid[-1, 0].set_xlim(0, 1.03 * until)
        kinds, hidden = set(drawn["kind"]), table["communication (ms)"].gt(table["exposed (ms)"]).any()
        handles = [
            Patch(facecolor=_LOOKS[kind][2], hatch=_LOOKS[kind][3], label=_LOOKS[kind][4], edgecolor="#555555", lw=0.3)
            for kind in (COMPUTE, EXPOSED, COMMUNICATION, IDLE)
            if kind in kinds and (kind != COMMUNICATION or hidden)
        ]
        fig.legend(handles=handles, loc="outside right center", fontsize=8)
    return fig


def _panel(ax: matplotlib.axes.Axes, parts: pd.DataFrame, zero: float, ranks: list[int]) -> None:
    for kind, (below, height, face, hatch, _) in _LOOKS.items():
        for rank, rows in parts[parts["kind"].eq(kind)].groupby("rank"):
            bars = list(zip(rows["start_ms"] - zero, rows["end_ms"] - rows["start_ms"], strict=True))
            look = dict(facecolor=face, hatch=hatch, edgecolor="#7A5200" if kind == EXPOSED else FAINT, linewidth=0)
            ax.broken_barh(bars, (ranks.index(rank) + below, height), **look)
    figures.lines(ax, [f"rank {rank}" for rank in ranks])
    ax.set_ylim(len(ranks) - 0.5, -0.5)
    ax.tick_params(axis="y", labelsize=8)
    ax.tick_params(axis="x", colors=MUTED)
