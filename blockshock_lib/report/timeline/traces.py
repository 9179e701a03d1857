"""Chrome traces of a run in, what each rank did and when out: compute, communication, or neither.

torch.profiler writes the Trace Event Format, which Perfetto opens as it is. A file may come from a stranger: it is read
within limits, its events are checked, and nothing of it is more than text and numbers.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import warnings
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from blockshock_lib.errors import RecordError
from blockshock_lib.report import labels

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


def document(path: Path | str) -> dict[str, Any]:
    """A trace file as it was written, checked for what Perfetto and this report need of it.

    Raises:
        RecordError: the file is missing, too large, damaged, or no trace; see `faults`.
    """
    path = Path(path)
    try:
        with gzip.open(path) as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise RecordError(f"trace {path.name} holds more than {MOST_BYTES >> 20} MiB and is not read")
        found = json.loads(data, parse_constant=_no_number)
    except OSError as error:  # gzip.BadGzipFile is one
        raise RecordError(f"trace {path.name} could not be read: {error.strerror or error}") from error
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise RecordError(f"trace {path.name} is damaged: {error}") from error
    wrong = faults(found)
    if wrong:
        raise RecordError(f"trace {path.name} is no Chrome trace: {wrong}")
    return found


def faults(found: Any) -> str:
    """The first breach of the Trace Event Format's JSON object form, or "".

    An object with a list `traceEvents` of objects, each with a phase `ph`. A complete event (`ph` "X") has a name, a
    finite `ts` and a finite `dur` from 0 up, both in us, and `pid` and `tid`, numbers or text.
    Source: the Trace Event Format document of Chromium, as Perfetto's JSON importer reads it.
    """
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        return "it is no object with a list traceEvents"
    for place, event in enumerate(found["traceEvents"]):
        if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
            return f"event {place} has no phase"
        if event["ph"] != "X":
            continue
        if not isinstance(event.get("name"), str):
            return f"event {place} has no name"
        for key in ("ts", "dur"):
            value = event.get(key)
            if type(value) not in (int, float) or not abs(value) < 1e18 or (key == "dur" and value < 0):
                return f"event {place} has {key} {value!r:.40}"
        if not all(type(event.get(key)) in (int, str) for key in ("pid", "tid")):
            return f"event {place} lacks pid or tid"
    return ""


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number in JSON")


def read(folder: Path | str, *, strict: bool = False) -> pd.DataFrame:
    """What every rank did in the profiled calls: COLUMNS, an uninterrupted stretch of work a row, in order of start.

    On a GPU a row is a kernel, a copy or a memset; on a CPU it is a collective, or a stretch of an operator outside the
    operators that it calls, so that the rows of a thread add up to the time that it was busy. `start_ms` counts from
    the first row of the method.

    `attrs["clock"]` says for each (case, method) whether its ranks share one clock ("shared"), or each counts from its
    own first row ("own"): where the files name no common base or several hosts, or a collective would have ended on one
    rank before another began it. It is "one rank" where there is no other. `attrs["damaged"]` lists the files that were
    skipped with a warning.

    Args:
        folder: of a run, or its traces/. A run that was not profiled gives no rows.

    Raises:
        RecordError: with `strict`, at the first file that `document` refuses.
    """
    folder = Path(folder)
    place = folder if folder.name == "traces" else folder / "traces"
    found: dict[tuple[str, str], dict[int, tuple[int | None, str, pd.DataFrame]]] = {}
    damaged: list[str] = []
    for path in sorted(place.glob("*.json.gz")):
        named = NAME.fullmatch(path.name)
        if named is None or not path.is_file():
            continue
        try:
            trace = document(path)
        except RecordError as error:
            if strict:
                raise
            damaged.append(path.name)
            warnings.warn(f"skipped: {error}", stacklevel=2)
            continue
        base = trace.get("baseTimeNanoseconds")
        found.setdefault((named["case"], named["method"]), {})[int(named["rank"])] = (
            base if type(base) is int and 0 < base < 2**63 else None,
            str(trace.get("host_name", "")),
            _work(trace["traceEvents"]),
        )
    parts, clocks = [], {}
    order = {name: i for i, name in enumerate(labels.methods_in(method for _, method in found))}
    for case, method in sorted(found, key=lambda key: (key[0], order.get(key[1], len(order)), key[1])):
        ranks = {rank: part for rank, part in sorted(found[case, method].items()) if len(part[2])}
        clocks[case, method] = clock = "one rank" if len(ranks) < 2 else "shared" if _one_clock(ranks) else "own"
        first = min((base or 0 for base, _, _ in ranks.values()), default=0)
        for rank, (base, _, work) in ranks.items():
            shift = (base - first) / 1e3 if clock == "shared" else -work["ts"].min()
            parts.append(work.assign(case=case, method=method, rank=rank, ts=work["ts"] + shift))
    if not parts:
        table = pd.DataFrame(columns=COLUMNS).astype({"rank": int, "start_ms": float, "duration_ms": float})
    else:
        table = pd.concat(parts, ignore_index=True)
        zero = table.groupby(["case", "method"])["ts"].transform("min")
        table["start_ms"], table["duration_ms"] = (table["ts"] - zero) / 1e3, table["dur"] / 1e3
    table = table[COLUMNS]
    table.attrs = {"clock": clocks, "damaged": damaged}
    return table


def _work(events: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """ts and dur (us), device, kind and name of what one rank did."""
    events = [event for event in events if event["ph"] == "X"]
    on_gpu = [event for event in events if event.get("cat") in _DEVICE]
    if on_gpu:
        rows = [
            (
                event["ts"],
                event["dur"],
                "cuda",
                COMMUNICATION if _SENDS.search(event["name"]) else COMPUTE,
                event["name"],
            )
            for event in on_gpu
        ]
    else:
        rows = [(ts, end - ts, "cpu", kind, name) for ts, end, kind, name in _own_stretches(events)]
    table = pd.DataFrame(rows, columns=["ts", "dur", "device", "kind", "name"])
    return table.astype({"ts": float, "dur": float}).sort_values("ts", kind="stable", ignore_index=True)


def _own_stretches(events: list[dict[str, Any]]) -> list[tuple[float, float, str, str]]:
    """(start, end, kind, name) of each collective, and of each stretch that an operator spent outside the operators
    and collectives that it called. What runs inside a collective is part of it.
    """
    threads: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in events:
        carried = event.get("cat") == "user_annotation" and event["name"].startswith(_COLLECTIVE)
        if (event.get("cat") == "cpu_op" or carried) and event["dur"] > 0:
            threads.setdefault((str(event["pid"]), str(event["tid"])), []).append(event)
    found: list[tuple[float, float, str, str]] = []
    for thread in threads.values():
        calls: list[_Call] = []  # those that are going on, the innermost last
        for event in sorted(thread, key=lambda one: (one["ts"], -one["dur"])):
            start, end = float(event["ts"]), float(event["ts"] + event["dur"])
            _close(calls, start, found)
            if calls and calls[-1].kind == COMMUNICATION:
                continue
            if calls:
                calls[-1].stretch(start, found)
                end = min(end, calls[-1].end)  # a clock's last digit may put the end of a call after its caller's
            kind = COMMUNICATION if event["name"].startswith(_COLLECTIVE) else COMPUTE
            calls.append(_Call(end, kind, event["name"], start))
        _close(calls, math.inf, found)
    return found


@dataclass
class _Call:
    end: float
    kind: str
    name: str
    since: float  # the start of its current stretch

    def stretch(self, until: float, found: list) -> None:
        if until > self.since:
            found.append((self.since, until, self.kind, self.name))


def _close(calls: list[_Call], until: float, found: list) -> None:
    """Ends the calls that are over by `until`; each one's caller goes on from there."""
    while calls and calls[-1].end <= until:
        call = calls.pop()
        call.stretch(call.end, found)
        if calls:
            calls[-1].since = call.end


def _one_clock(ranks: dict[int, tuple[int | None, str, pd.DataFrame]]) -> bool:
    """Whether the ranks' times can be laid side by side."""
    bases, hosts = [base for base, _, _ in ranks.values()], {host for _, host, _ in ranks.values()}
    if None in bases or len(hosts) > 1:
        return False
    first = min(base for base in bases if base is not None)
    sent = []
    for base, _, work in ranks.values():
        part = collectives(work)
        start = part["ts"].to_numpy() + ((base or 0) - first) / 1e3
        sent.append((start, start + part["dur"].to_numpy()))
    if len({len(start) for start, _ in sent}) > 1:
        return False
    begun, ended = np.max([start for start, _ in sent], axis=0), np.min([end for _, end in sent], axis=0)
    return bool((begun <= ended + TOGETHER_US).all())


def collectives(work: pd.DataFrame) -> pd.DataFrame:
    """The communication among rows, without what only hands a collective over to the thread that does it."""
    carried = ~work["device"].eq("cpu") | work["name"].str.startswith(_CARRIED)
    return work[work["kind"].eq(COMMUNICATION) & carried]
