"""One record: what was measured of one case by one fresh group of processes.

A record is a file of JSON, `records/<case>-<group>.json`, its digest inside; its bytes are a function of its content,
so that `read` can refuse what is not byte for byte as it was written. Rows of one quantity whose `repeat` grows are one
series of arrays. Schema 1 has rows only, no study and no seconds.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import pandas as pd

from blockshock_lib import files, studies
from blockshock_lib.engine.study import ROW_COLUMNS, STATUSES, Case, Metric, Study
from blockshock_lib.errors import RecordError

SCHEMA = 2
RUN_COLUMNS = ("run", "study", "phase", "case", "group")
CASE_COLUMNS = ("dtype", "world_size", "emulated", "device", "seed", "seconds", "code")
NEW = {"study": "linear", "seconds": None}  # what the first schema does not have
KEYS = {"schema", "run", "phase", "id", "case", "group", "context", "rows", *NEW}
CONTEXT_KEYS = {"code", "machine", "libraries", "emulated"}
_TEXTS = ("method", "metric", "unit", "status", "reason", "detail")
_ALIKE = (*_TEXTS, "rank")  # rows of a series share these


class NewerError(RecordError):
    """Of a schema that only a later version reads: nothing of its run is shown, and nothing overwritten."""


def study_of(name: Any) -> Study:
    if name not in (known := studies.names()):
        raise RecordError(f"it is of the study {name!r}, which is not known here; known: {', '.join(known)}")
    return studies.load(name)


def validate(rows: Any, metrics: Mapping[str, Metric]) -> None:
    """Raises RecordError at the first row that breaks the schema, such as a time of zero, or where there is no row."""
    if not isinstance(rows, list) or not rows:
        raise RecordError("a case gave no rows: nothing was measured")
    for place, row in enumerate(rows):
        if fault := _fault(row, metrics):
            raise RecordError(f"row {place}: {fault}")


def _fault(row: Any, metrics: Mapping[str, Metric]) -> str:
    if not isinstance(row, dict) or row.keys() != set(ROW_COLUMNS):
        return f"a row has exactly the keys {', '.join(ROW_COLUMNS)}"
    name, texts = f"{row['method']} {row['metric']}", [row[key] for key in _TEXTS]
    if not all(isinstance(text, str) and (text.isascii() or _encodable(text) == text) for text in texts):
        return f"{name}: {', '.join(_TEXTS)} are text"
    metric, value = metrics.get(row["metric"]), row["value"]
    if not row["method"] or metric is None or metric.unit != row["unit"]:
        return f"{name}: unit is {row['unit']!r}, should be {metric.unit if metric else 'unknown metric'!r}"
    if not _whole(row["repeat"], 0) or not _whole(row["rank"], -1):
        return f"{name}: repeat is a count from 0, rank one from -1"
    if row["status"] not in STATUSES:
        return f"{name}: status {row['status']!r} is none of {', '.join(STATUSES)}"
    if row["status"] != "ok":
        if not row["reason"]:
            return f"{name}: {row['status']} without a reason"
        missing = value is None or (isinstance(value, float) and math.isnan(value))
        return "" if missing else f"{name}: {row['status']}, so it can have no value"
    if not isinstance(value, float | int) or not math.isfinite(value) or (value < 0 and not metric.negative):
        return f"{name}: {value!r} is no finite value{'' if metric.negative else ' from 0 up'}"
    if value == 0 and not metric.zero:
        return f"{name}: a {'time' if metric.unit in ('ms', 'us') else 'value'} of zero was not measured"
    return f"{name}: {value!r} is neither 0 nor 1" if metric.unit == "bool" and value not in (0, 1) else ""


def _whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 1 << 63


def _fit(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value and _encodable(value) == value


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def path_of(folder: Path, case_id: str, group: int) -> Path:
    return folder / "records" / f"{case_id}-{group}.json"


def write(
    folder: Path, *, study: Study, run: str, case: Case, group: int, rows: list[dict], context: dict, seconds=None
) -> Path:
    """The path of the record. RecordError: rows or context break the schema, or no write: an older file stays."""
    rows = [row | {key: _encodable(row[key]) for key in ("reason", "detail") if row.get(key)} for row in rows]
    validate(rows, study.metrics)
    record = {"schema": SCHEMA, "study": study.name, "run": run, "phase": case.phase, "id": case.id, "group": group}
    record |= {"case": case.as_dict(), "seconds": seconds, "context": context}
    record["rows"] = [row | {"value": float(row["value"]) if row["status"] == "ok" else None} for row in rows]
    path = path_of(folder, case.id, group)
    try:
        data = encode(record)
        parse(json.loads(data))
    except (TypeError, ValueError) as error:
        raise RecordError(f"record {path.name} cannot be written as JSON: {error}") from error
    files.write_atomic(path, data)
    return path


def read(path: Path) -> dict[str, Any]:
    """A record of either schema; a row that is not ok has None. RecordError: missing, damaged, of a newer schema."""
    try:
        data = path.read_bytes()
        record = parse(json.loads(data.decode("utf-8")))
        if encode(record) != data:
            raise RecordError("its content does not match its digest")
        if path.name != f"{record['id']}-{record['group']}.json":
            raise RecordError("it is of another case")
    except OSError as error:
        raise RecordError(f"record {path.name} could not be read: {error.strerror or error}") from error
    except NewerError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, RecordError) as error:  # not UTF-8, not JSON, no number
        raise RecordError(f"record {path.name} is damaged: {error}") from error
    return record


def encode(record: Mapping[str, Any]) -> bytes:
    """The bytes of a record's file, in its own schema: a row or series a line, with the digest of all."""
    document = {key: value for key, value in record.items() if record["schema"] > 1 or key not in NEW}
    if record["schema"] > 1:
        document["rows"], document["series"] = _fold(record["rows"])
    document["digest"] = files.sha256(files.canonical(document))
    texts = {key: files.canonical(value) for key, value in document.items() if key not in ("rows", "series")}
    for key in {"rows", "series"} & document.keys():
        texts[key] = "[\n" + ",\n".join(map(files.canonical, document[key])) + "\n]"
    return ("{" + ",\n".join(f'"{key}":{texts[key]}' for key in sorted(texts)) + "}\n").encode()


def parse(document: Any) -> dict[str, Any]:
    """A record of its JSON, series as rows; `read` checks the digest. RecordError: schema broken, study unknown."""
    schema = document.get("schema") if isinstance(document, dict) else None
    if type(schema) is int and schema > SCHEMA:
        raise NewerError(f"schema {schema} is newer than this version, which reads 1 and {SCHEMA}: update it")
    if type(schema) is not int or schema < 1:
        raise RecordError(f"schema {schema!r} is unknown; this version reads 1 and {SCHEMA}")
    record = NEW | document
    record.pop("digest", None)
    series = record.pop("series", [])
    for what, found, keys in (("record", record, KEYS), ("record's context", record.get("context"), CONTEXT_KEYS)):
        if not isinstance(found, dict) or set(found) != keys:
            raise RecordError(f"a {what} has exactly the keys {', '.join(sorted(keys))}")
    record["rows"] = [*record["rows"]]
    for one in series:
        if not isinstance(one, dict) or set(one) != {*_ALIKE, "repeat", "value"}:
            raise RecordError(f"a series has exactly the keys {', '.join(_ALIKE)}, repeat and value")
        pairs = zip(one["repeat"], one["value"], strict=True)
        record["rows"] += [one | {"repeat": repeat, "value": value} for repeat, value in pairs]
    for name, right in _head(record):  # what follows is looked at only where this is right
        if not right:
            raise RecordError(f"its {name} cannot be so")
    validate(record["rows"], study_of(record["study"]).metrics)
    return record


def _head(record: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Each key, and whether a run writes such a value; what stands in a frame's columns must be fit for tables."""
    context, case, seconds = record["context"], record["case"], record["seconds"]
    for key, kind in (("code", dict), ("machine", str), ("libraries", dict), ("emulated", bool)):
        yield f"context.{key}", isinstance(context[key], kind)
    for key in ("run", "phase", "id"):
        yield key, _fit(record[key])
    yield "group", _whole(record["group"], 0)
    yield "seconds", seconds is None or (type(seconds) in (int, float) and 0 <= seconds < math.inf)
    yield "case", isinstance(case, dict)
    for name, kind in get_type_hints(study_of(record["study"]).case).items():
        if name in case and kind in (int, str, bool):
            yield f"case.{name}", type(case[name]) is kind and (kind is not int or _whole(case[name], 0))
    for name, value in case_columns(record).items():
        yield name, _fit(value) or isinstance(value, int | float | None)


def _fold(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]]]:
    alike: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        alike.setdefault(tuple(row[key] for key in _ALIKE), []).append(row)
    series, inside = [], set()
    for same in alike.values():
        repeats = [row["repeat"] for row in same]
        if len(same) > 1 and same[0]["status"] == "ok" and all(before < after for before, after in pairwise(repeats)):
            values = {"repeat": repeats, "value": [row["value"] for row in same]}
            series.append({key: same[0][key] for key in _ALIKE} | values)
            inside |= set(map(id, same))
    return [row for row in rows if id(row) not in inside], series


def frame_of(records: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    cases = [case_columns(record) for record in records]
    names = dict.fromkeys([*RUN_COLUMNS, *(name for case in cases for name in case if name not in CASE_COLUMNS)])
    table = pd.DataFrame(cases, columns=[*names, *CASE_COLUMNS])
    # A whole number that some cases do not have: None in the study's columns.
    gaps = [name for name in table if table[name].dtype == object and table[name].isna().any()]
    for name in dict.fromkeys(["seconds", *gaps]):
        table[name] = table[name].astype("float64" if name == "seconds" else "Int64")
    rows = pd.DataFrame([row for record in records for row in record["rows"]], columns=list(ROW_COLUMNS))
    rows["value"] = rows["value"].astype("float64")
    wide = table.loc[table.index.repeat([len(record["rows"]) for record in records])].reset_index(drop=True)
    return pd.concat([wide, rows], axis=1)


def case_columns(record: Mapping[str, Any]) -> dict[str, Any]:
    case, made = record["case"], record["context"]["code"]
    code = "/".join(filter(None, (str(made.get("commit") or "")[:7], str(made.get("sources") or ""))))
    own = study_of(record["study"]).columns(case)
    own |= {name: case[name] for name in CASE_COLUMNS[:5]} | {"seconds": record["seconds"], "code": code}
    return {name: record["id" if name == "case" else name] for name in RUN_COLUMNS} | own
