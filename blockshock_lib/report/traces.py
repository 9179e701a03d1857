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

import pandas as pd

from blockshock_lib.errors import RecordError
from blockshock_lib.report.axes import Axes

NAME = re.compile(r"(?P<case>[0-9a-f]+)-(?P<method>\w+)-rank(?P<rank>\d{1,5})\.json\.gz")
MOST_BYTES = 64 * 2**20  # of one trace unpacked; a real one of three calls has a tenth of a MiB
COMPUTE, COMMUNICATION = "compute", "communication"
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
    traces: dict[tuple[str, str], dict[int, pd.DataFrame]] = {}
    damaged: list[str] = []
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
            traces.setdefault((named["case"], named["method"]), {})[int(named["rank"])] = work
    order, parts = axes.place_of(method for _, method in traces), []
    for case, method in sorted(traces, key=lambda key: (key[0], order.get(key[1], len(order)), key[1])):
        for rank, work in sorted(traces[case, method].items()):
            sent = work[work["kind"].eq(COMMUNICATION)]
            zero = (sent["ts"] + sent["dur"]).iloc[0] if len(sent) else work["ts"].min()
            parts.append(work.assign(case=case, method=method, rank=rank, ts=work["ts"] - zero))
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["ts", "dur", *COLUMNS])
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
