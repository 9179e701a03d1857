"""Records: the only truth of a run. One file a case and group, written whole or not at all, with its digest inside.

A file is JSON with one row a line. Its bytes are a function of its content, so that `read` can refuse every file that
is not byte for byte what was written: cut, altered, or with a key given twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from blockshock_lib.errors import RecordError

if TYPE_CHECKING:
    from blockshock_lib.plan import Case

SCHEMA = 1
STATUSES = ("ok", "failed", "oom", "timeout", "unsupported")

FLOORS = (
    *("floor_compute", "floor_reduce", "floor_forward", "floor_dx", "floor_reduce_dx", "floor_dw", "floor_optimizer"),
    *("floor_remask", "floor_compress", "floor_refresh", "floor_pass", "floor_step"),
)
HELD = ("weights_bytes_held", "copies_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")
METRICS = {
    "check": "bool",
    # Relative to a product of the same precision and sharding; both against the float64 truth.
    "error_max_ratio": "x",
    "error_rms_ratio": "x",
    # Relative to the RMS of the truth.
    "error_max": "1",
    "error_rms": "1",
    **dict.fromkeys(("forward_call", "forward_kernel", "compute_kernel", "reduce_kernel", "kernel_time"), "ms"),
    # Backward: the gradient of the input alone, its collective, with it; of the weight by the chosen and by each way.
    **dict.fromkeys(("dx_kernel", "reduce_dx_kernel", "backward_kernel", "pass_kernel", "pass_call"), "ms"),
    **dict.fromkeys(("dw_kernel", "dw_strategy_kernel", "backward_order_kernel"), "ms"),
    # A training step and what follows the gradients in it.
    **dict.fromkeys(("optimizer_kernel", "remask_kernel", "compress_kernel", "refresh_kernel"), "ms"),
    **dict.fromkeys(("step_kernel", "step_call"), "ms"),
    # Each way of a piece of the forward, named by the detail: backends of the product, the reduction and the
    # compression, pieces that the batch is cut into; the forward through a layer's own CUDA graph.
    **dict.fromkeys(("product_by_kernel", "reduce_by_kernel", "compress_by_kernel", "forward_chunks_kernel"), "ms"),
    "forward_graph_call": "ms",
    # What the host does in one eager call of a product, the device idle before it.
    "host_us": "us",
    **dict.fromkeys(FLOORS, "ms"),
    "flops": "FLOP",
    **dict.fromkeys(("bytes_read", "bytes_written", "bytes_sent"), "B"),
    **dict.fromkeys(("weight_bytes", "weight_bytes_formula", "peak_bytes", "peak_bytes_formula"), "B"),
    **{f"{part}{end}": "B" for part in HELD for end in ("", "_formula")},
    # Mean squared error; `repeat` is the step.
    "loss": "1",
    # The largest square weight, a multiple of 4096, whose training fits.
    "largest_n": "1",
    "copy_bandwidth": "GB/s",
    "gemm_rate": "TFLOP/s",
    "allreduce_bandwidth": "GB/s",
    "power": "W",
    "sm_clock": "MHz",
    "throttle": "bool",
    # Symmetric memory that a rank's sums hold, for all methods: in no peak.
    "shared_bytes": "B",
}
# Every other time that is there took time; the floor of a collective is there only where something is sent.
MAY_BE_ZERO_MS = tuple(floor for floor in FLOORS if "reduce" not in floor)

ROW_COLUMNS = ("method", "metric", "unit", "value", "repeat", "rank", "status", "reason", "detail")
CASE_COLUMNS = (
    *("run", "phase", "case", "group", "in_features", "out_features", "n", "shape", "batch", "dtype"),
    *("mask", "workload", "world_size", "emulated", "device", "seed", "optimizer", "code"),
)
KEYS = ("schema", "run", "phase", "id", "case", "group", "context", "rows", "digest")
CONTEXT_KEYS = ("code", "machine", "libraries", "emulated")


def row(
    method: str,
    metric: str,
    value: float,
    *,
    repeat: int = 0,
    rank: int = -1,
    status: str = "ok",
    reason: str = "",
    detail: str = "",
) -> dict[str, Any]:
    """One measurement. The unit is the metric's own (METRICS); rank -1 is the slowest of, or all, ranks."""
    return {
        "method": method,
        "metric": metric,
        "unit": METRICS[metric],
        "value": float(value),
        "repeat": repeat,
        "rank": rank,
        "status": status,
        "reason": reason,
        "detail": detail,
    }


def validate(rows: list[dict[str, Any]]) -> None:
    """Raise RecordError at the first row that breaks the schema; a time of zero, or none, is such a row."""
    if not isinstance(rows, list) or not rows:
        raise RecordError("a case gave no rows: nothing was measured")
    for place, one in enumerate(rows):
        fault = _fault(one)
        if fault:
            raise RecordError(f"row {place}: {fault}")


def _fault(one: Any) -> str:
    if not isinstance(one, dict) or set(one) != set(ROW_COLUMNS):
        return f"a row has exactly the keys {', '.join(ROW_COLUMNS)}"
    name = f"{one['method']} {one['metric']}"
    if not all(isinstance(one[key], str) for key in ("method", "metric", "unit", "status", "reason", "detail")):
        return f"{name}: method, metric, unit, status, reason and detail are text"
    if not one["method"] or METRICS.get(one["metric"]) != one["unit"]:
        known = METRICS.get(one["metric"], "unknown metric")
        return f"{name}: unit is {one['unit']!r}, should be {known!r}"
    if type(one["repeat"]) is not int or one["repeat"] < 0 or type(one["rank"]) is not int or one["rank"] < -1:
        return f"{name}: repeat is a count from 0, rank one from -1"
    if one["status"] not in STATUSES:
        return f"{name}: status {one['status']!r} is none of {', '.join(STATUSES)}"
    value = one["value"]
    if one["status"] != "ok":
        if not one["reason"]:
            return f"{name}: {one['status']} without a reason"
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        return "" if missing else f"{name}: {one['status']}, so it can have no value"
    if not isinstance(value, float | int) or not math.isfinite(value) or value < 0:
        return f"{name}: {value!r} is no finite value from 0 up"
    if one["unit"] in ("ms", "us") and value == 0 and one["metric"] not in MAY_BE_ZERO_MS:
        return f"{name}: a time of zero was not measured"
    if one["unit"] == "bool" and value not in (0, 1):
        return f"{name}: {value!r} is neither 0 nor 1"
    return ""


def write(
    folder: Path | str, *, run: str, case: Case, group: int, rows: list[dict[str, Any]], context: dict[str, Any]
) -> Path:
    """Write `folder`/records/<case id>-<group>.json and return its path. An existing file is replaced, or kept whole.

    Args:
        context: code (commit, dirty, sources), machine (fingerprint), libraries, emulated.

    Raises:
        RecordError: a row or the context breaks the schema, or the file could not be written; nothing is left behind.
    """
    validate(rows)
    plain = [one | {"value": float(one["value"]) if one["status"] == "ok" else None} for one in rows]
    document = {
        "schema": SCHEMA,
        "run": run,
        "phase": case.phase,
        "id": case.id,
        "case": case.as_dict(),
        "group": group,
        "context": context,
        "rows": plain,
    }
    path = Path(folder) / "records" / f"{case.id}-{group}.json"
    try:
        data = _encode(document | {"digest": _digest(document)})
    except (TypeError, ValueError) as error:
        raise RecordError(f"record {path.name} cannot be written as JSON: {error}") from error
    _check_shape(json.loads(data))
    write_atomic(path, data)
    return path


def write_atomic(path: Path, data: str | bytes) -> None:
    """Give `path` this content, whole or not at all; its folder is made where it is missing.

    Raises:
        RecordError: it could not be written; an older file is as it was, and no temporary one is left.
    """
    # In the same folder, for os.replace is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise RecordError(f"{path.name} could not be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def read(path: Path | str) -> dict[str, Any]:
    """A record as it was written; the value of a row that is not ok is None.

    Raises:
        RecordError: the file is missing, cut, altered, of another schema, or breaks the schema.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        document = json.loads(data.decode("utf-8"))
        _check_shape(document)
        digest = document.pop("digest")
        if digest != _digest(document) or _encode(document | {"digest": digest}) != data:
            raise RecordError("its content does not match its digest")
        validate(document["rows"])
    except OSError as error:
        raise RecordError(f"record {path.name} could not be read: {error.strerror or error}") from error
    except RecordError as error:
        raise RecordError(f"record {path.name} is damaged: {error}") from error
    except (ValueError, TypeError, RecursionError) as error:  # not UTF-8, not JSON, not a number
        raise RecordError(f"record {path.name} is damaged: {error}") from error
    return document | {"digest": digest}


def load(*folders: Path | str, strict: bool = False) -> pd.DataFrame:
    """The rows of all records in the runs' folders as a tidy frame, one row a measurement (CASE_COLUMNS, ROW_COLUMNS).

    `n` is in_features where the weight is square, else <NA>; `shape` is out x in, as in "4096x4096"; `value` is NaN in
    rows that are not ok; `code` is the commit and the digest of the sources that measured it. A damaged file is skipped
    with a warning that names it; `frame.attrs["damaged"]` lists them.

    Raises:
        RecordError: no such folder; with `strict`, also at the first damaged file.
    """
    found: list[dict[str, Any]] = []
    damaged: list[str] = []
    for path in _files(folders):
        try:
            record = read(path)
            case = _case_columns(record)
        except (RecordError, KeyError, TypeError) as error:
            if strict:
                raise RecordError(str(error)) from error
            damaged.append(path.name)
            warnings.warn(f"skipped: {error}", stacklevel=2)
            continue
        found += [case | one for one in record["rows"]]
    frame = pd.DataFrame(found, columns=[*CASE_COLUMNS, *ROW_COLUMNS])
    frame = frame.astype({"n": "Int64", "value": "float64"})
    frame.attrs["damaged"] = damaged
    return frame


def _files(folders: Iterable[Path | str]) -> list[Path]:
    files: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise RecordError(f"{folder} is no folder of a run")
        place = folder if folder.name == "records" else folder / "records"
        files |= {path.resolve(): path for path in sorted(place.glob("*.json"))}
    return list(files.values())


def _case_columns(record: dict[str, Any]) -> dict[str, Any]:
    case = record["case"]
    inputs, outputs = case["in_features"], case["out_features"]
    return {
        "run": record["run"],
        "phase": record["phase"],
        "case": record["id"],
        "group": record["group"],
        "in_features": inputs,
        "out_features": outputs,
        "n": inputs if inputs == outputs else pd.NA,
        "shape": f"{outputs}x{inputs}",
        "batch": case["batch"],
        "dtype": case["dtype"],
        "mask": case["mask"]["name"],
        "workload": case["workload"]["name"],
        "world_size": case["world_size"],
        "emulated": case["emulated"],
        "device": case["device"],
        "seed": case["seed"],
        "optimizer": case.get("optimizer", ""),
        "code": _code(record["context"]["code"]),
    }


def _code(found: dict[str, Any]) -> str:
    """What measured a case: the commit's first digits and, behind a slash, the sources' digest; as far as known."""
    return "/".join(filter(None, (str(found.get("commit") or "")[:7], str(found.get("sources") or ""))))


def _check_shape(document: Any) -> None:
    if not isinstance(document, dict):
        raise RecordError("it is no record")
    if document.get("schema") != SCHEMA:
        raise RecordError(f"schema {document.get('schema')!r} is unknown; this code reads {SCHEMA}")
    if set(document) != set(KEYS):
        raise RecordError(f"a record has exactly the keys {', '.join(KEYS)}")
    if not isinstance(document["context"], dict) or set(document["context"]) != set(CONTEXT_KEYS):
        raise RecordError(f"a record's context has exactly the keys {', '.join(CONTEXT_KEYS)}")
    if not isinstance(document["case"], dict):
        raise RecordError("a record's case is a mapping")


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(document: dict[str, Any]) -> str:
    return hashlib.sha256(_json(document).encode()).hexdigest()


def _encode(document: dict[str, Any]) -> bytes:
    rows = "[\n" + ",\n".join(_json(one) for one in document["rows"]) + "\n]"
    parts = (f"{_json(key)}:{rows if key == 'rows' else _json(value)}" for key, value in sorted(document.items()))
    return ("{" + ",\n".join(parts) + "}\n").encode()
