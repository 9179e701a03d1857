"""torch.profiler's Chrome traces of a run in, what each rank did and when out.

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

import numpy as np
import pandas as pd

from blockshock_lib.errors import RecordError
from blockshock_lib.report.axes import Axes

NAME = re.compile(r"(?P<case>[0-9a-f]+)-(?P<method>\w+)-rank(?P<rank>\d{1,5})\.json\.gz")
MOST_BYTES = 64 * 2**20  # of one trace unpacked; a real one of three calls has a tenth of a MiB
COMPUTE, COMMUNICATION = "compute", "communication"
COLUMNS = ["case", "method", "rank", "device", "kind", "name", "start_ms", "duration_ms"]
TOGETHER_US = 20.0  # by so much may a collective seem to end on one rank before another has begun it

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# NCCL's kernels, ours and torch's in symmetric memory (one_shot, multimem_...), and copies between two GPUs.
_SENDS = re.compile(
    r"nccl|nvshmem|multimem|symm_?mem|(one|two)_shot|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|memcpy ptop",
    re.IGNORECASE,
)
# On a CPU: what hands a collective over (c10d::, record_param_comms), and gloo's own thread that carries it out.
_COLLECTIVE = ("c10d::", "record_param_comms", "gloo:", "nccl:", "mpi:")
_CARRIED = ("gloo:", "mpi:")


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
    """What every rank did in the profiled calls (traces/ of a run's folder): COLUMNS, a row a kernel, copy or memset of
    a GPU; on a CPU a collective, or a stretch of a thread in operators alone. `start_ms`: from the method's first.

    `attrs["clock"]`, of each (case, method): "shared"; "own" where each rank counts from its own first row, for the
    files name no common base or several hosts, or a collective would have ended on one rank before another began it;
    or "one rank". `attrs["damaged"]`: the files that `document` refused, with a warning.
    """
    # Of each rank's file: the time that its `ts` count from (ns), its host, and rows of `_work`.
    traces: dict[tuple[str, str], dict[int, tuple[int | None, str, pd.DataFrame]]] = {}
    damaged: list[str] = []
    for path in sorted(folder.glob("traces/*.json.gz")):
        named = NAME.fullmatch(path.name)
        if named is None or not path.is_file():
            continue
        try:
            trace = document(path)
        except RecordError as error:
            damaged.append(path.name)
            warnings.warn(f"skipped: {error}", stacklevel=2)
            continue
        base, work = trace.get("baseTimeNanoseconds"), _work(trace["traceEvents"])
        if len(work):
            base = base if type(base) is int and 0 < base < 2**63 else None
            rank = base, str(trace.get("host_name", "")), work
            traces.setdefault((named["case"], named["method"]), {})[int(named["rank"])] = rank
    order = axes.place_of(method for _, method in traces)
    parts, clocks = [], {}
    for case, method in sorted(traces, key=lambda key: (key[0], order.get(key[1], len(order)), key[1])):
        ranks = dict(sorted(traces[case, method].items()))
        shared = _one_clock(ranks.values())
        clocks[case, method] = clock = "one rank" if len(ranks) < 2 else "shared" if shared else "own"
        first = min(base or 0 for base, _, _ in ranks.values())
        for number, (base, _, work) in ranks.items():
            shift = (base - first) / 1e3 if clock == "shared" else -work["ts"].min()
            parts.append(work.assign(case=case, method=method, rank=number, ts=work["ts"] + shift))
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["ts", "dur", *COLUMNS])
    zero = table.groupby(["case", "method"])["ts"].transform("min")
    table["start_ms"], table["duration_ms"] = (table["ts"] - zero) / 1e3, table["dur"] / 1e3
    table = table[COLUMNS].astype({"rank": int, "start_ms": float, "duration_ms": float})
    table.attrs = {"clock": clocks, "damaged": damaged}
    return table


def _work(events: Iterable[dict[str, Any]]) -> pd.DataFrame:
    events = [event for event in events if event["ph"] == "X"]
    rows = [
        (event["ts"], event["dur"], "cuda", COMMUNICATION if _SENDS.search(event["name"]) else COMPUTE, event["name"])
        for event in events
        if event.get("cat") in _DEVICE
    ] or _on_cpu(events)
    table = pd.DataFrame(rows, columns=["ts", "dur", "device", "kind", "name"])
    return table.astype({"ts": float, "dur": float}).sort_values("ts", kind="stable", ignore_index=True)


def _on_cpu(events: list[dict[str, Any]]) -> list[tuple[float, float, str, str, str]]:
    threads: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for event in events:
        carried = event.get("cat") == "user_annotation" and event["name"].startswith(_COLLECTIVE)
        if (event.get("cat") == "cpu_op" or carried) and event["dur"] > 0:
            call = event["ts"], event["ts"] + event["dur"], event["name"]
            threads.setdefault((str(event["pid"]), str(event["tid"])), []).append(call)
    rows = []
    for calls in threads.values():
        sends = [call for call in calls if call[2].startswith(_COLLECTIVE)]
        others = [call for call in calls if not call[2].startswith(_COLLECTIVE)]
        edges = np.unique([edge for start, end, _ in calls for edge in (start, end)])
        computes = running(others, edges) & ~running(sends, edges)
        rows += [(start, end - start, "cpu", COMMUNICATION, name) for start, end, name in sends]
        rows += [(start, end - start, "cpu", COMPUTE, "operators") for start, end in merged(computes, edges)]
    return rows


def running(stretches: Iterable[tuple], edges: np.ndarray) -> np.ndarray:
    """Whether one of (start, end, ...) runs between each two neighbouring edges, where none begins or ends."""
    starts, ends = np.array([one[:2] for one in stretches], float).reshape(-1, 2).T
    middles = (edges[1:] + edges[:-1]) / 2
    return np.searchsorted(np.sort(starts), middles) > np.searchsorted(np.sort(ends), middles)


def merged(on: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """(start, end) of each unbroken run of `on` between the edges, (count, 2)."""
    turn = np.diff(np.r_[0, on.astype(int), 0])
    return np.column_stack([edges[turn > 0], edges[turn < 0]])


def _one_clock(ranks: Iterable[tuple[int | None, str, pd.DataFrame]]) -> bool:
    bases, hosts, works = zip(*ranks, strict=True)
    sent = [collectives(work) for work in works]
    if None in bases or len(set(hosts)) > 1 or len(set(map(len, sent))) > 1:
        return False
    begun = [part["ts"].to_numpy() + (base - min(bases)) / 1e3 for base, part in zip(bases, sent, strict=True)]
    ended = [start + part["dur"].to_numpy() for start, part in zip(begun, sent, strict=True)]
    return bool((np.max(begun, axis=0) <= np.min(ended, axis=0) + TOGETHER_US).all())


def collectives(work: pd.DataFrame) -> pd.DataFrame:
    """The communication among rows, without what hands it over to another thread."""
    carried = ~work["device"].eq("cpu") | work["name"].str.startswith(_CARRIED)
    return work[work["kind"].eq(COMMUNICATION) & carried]
