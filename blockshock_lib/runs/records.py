"""The records of a run: the only truth of it. docs/records.md has the columns of `load`.

A run that lives has one file a case and group (`runs.record`), a finished one one table; what else a record holds lies
in its metadata. The table's digest, in the manifest, is checked first: one flipped bit can end a process in pyarrow.
"""

import contextlib
import io
import json
import warnings
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from blockshock_lib import files
from blockshock_lib.engine.study import ROW_COLUMNS
from blockshock_lib.errors import RecordError
from blockshock_lib.files import shown
from blockshock_lib.runs import manifest, record

pd.set_option("mode.string_storage", "python")  # Arrow takes half as long again to filter rows, as is done all the time

PARQUET = "records.parquet"
_KEY = b"blockshock"
MAX_BYTES, MAX_ROWS = 512 * 2**20, 5_000_000  # of a table as it is unpacked: a stranger's may be a bomb


def load(*folders: Path | str, strict: bool = False) -> pd.DataFrame:
    """The rows of all records in the runs' folders, one a measurement, without torch. A damaged file is skipped with a
    warning and listed in `frame.attrs["damaged"]`. RecordError: no run's, a newer schema; with `strict` the first one.
    """
    whole, damaged = [], {}
    for folder in {Path(folder).resolve(): folder for folder in folders}.values():
        found, faults = scan(folder)
        whole, damaged = whole + found, damaged | faults
    for error in damaged.values():
        if strict:
            raise error
        warnings.warn(f"skipped: {error}", stacklevel=2)
    frame = record.frame_of(whole)
    frame.attrs["damaged"] = list(damaged)
    return frame


def scan(folder: Path | str) -> tuple[list[dict[str, Any]], dict[str, RecordError]]:
    """Every whole record of a run, and what is damaged: the file's name -> why. RecordError: no run's folder."""
    folder = Path(folder)
    seal = find(folder)
    if seal is None and not any((folder / name).exists() for name in (manifest.FILE, "records")):
        raise RecordError(f"{folder} is no folder of a run{manifest.near(folder)}")
    found, damaged = [], {}
    for path in sorted((folder / "records").glob("*.json")) if seal is None else [folder / PARQUET]:
        try:
            found += [record.read(path)] if seal is None else read_table(path, seal)
        except record.NewerError:
            raise
        except RecordError as error:
            damaged[path.name] = error
    return found, damaged


def find(folder: Path) -> str | None:
    """The SHA-256 of a run's table, "" if unsealed; None while files hold the records, also beside a table."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return json.loads((folder / manifest.FILE).read_text())["files"][PARQUET]
    return "" if (folder / PARQUET).is_file() and not (folder / "records").is_dir() else None


def any_in(folder: Path) -> bool:
    return find(folder) is not None or any((folder / "records").glob("*.json"))


def read_table(path: Path, seal: str) -> list[dict[str, Any]]:
    try:
        data = path.read_bytes()
        if files.sha256(data) != seal:
            why = "its content does not match its digest" if seal else "it has no digest"
            raise RecordError(f"{why} in the run's {manifest.FILE}")
        return _decode(data)
    except record.NewerError:
        raise
    except OSError as error:
        raise RecordError(f"{shown(path)} could not be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, EOFError, RecordError) as error:
        raise RecordError(f"{shown(path)} is damaged: {error}") from error


def pack(folder: Path) -> Path | None:
    """Puts a run's records into one table, seals it in the manifest and removes the files, read back byte for byte.
    None where they are packed already, one is damaged or none is there. RecordError: no write, or not what they hold.
    """
    whole, damaged = scan(folder)
    if damaged or not whole or find(folder) is not None:
        return None
    table, data = folder / PARQUET, _parquet(whole)
    seal = files.sha256(data)
    files.write_atomic(table, data)
    paths = [record.path_of(folder, one["id"], one["group"]) for one in whole]
    if list(map(record.encode, read_table(table, seal))) != [path.read_bytes() for path in paths]:
        table.unlink()
        raise RecordError(f"{shown(table)} did not hold what the records do, and was removed: they stand")
    # Sealed before the files go, so that at every moment one of the two is the run's records.
    sealed = manifest.read(folder).get("files", {}) | {PARQUET: seal}
    kept = {file: digest for file, digest in sorted(sealed.items()) if not file.startswith("records/")}
    manifest.note(folder, files=kept)
    for path in (*paths, *(folder / "records").glob("*.part")):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / "records").rmdir()
    return table


def _parquet(whole: Sequence[dict[str, Any]]) -> bytes:
    contexts: list[Any] = []  # few, and long: each stands once
    heads = []
    for one in whole:
        if one["context"] not in contexts:
            contexts.append(one["context"])
        heads.append(one | {"rows": len(one["rows"]), "context": contexts.index(one["context"])})
    table = pa.Table.from_pandas(record.frame_of(whole), preserve_index=False)
    about = files.canonical({"contexts": contexts, "records": heads}).encode()
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, _KEY: about}), sink, compression="zstd")
    return sink.getvalue()


def _decode(data: bytes) -> list[dict[str, Any]]:
    file = pq.ParquetFile(io.BytesIO(data))
    sizes = [file.metadata.row_group(place).total_byte_size for place in range(file.metadata.num_row_groups)]
    if file.metadata.num_rows > MAX_ROWS or sum(sizes) > MAX_BYTES:
        raise RecordError(f"it unpacks to more than {MAX_ROWS} rows or {MAX_BYTES} bytes")
    table = file.read()
    about = json.loads(table.schema.metadata[_KEY])
    heads, contexts = about["records"], about["contexts"]
    if sum(head["rows"] for head in heads) != table.num_rows:
        raise RecordError("it does not hold the rows that its records have")
    rows = iter(table.select(list(ROW_COLUMNS)).to_pylist())
    own = ({"rows": list(islice(rows, head["rows"])), "context": contexts[head["context"]]} for head in heads)
    return [record.parse(head | more) for head, more in zip(heads, own, strict=True)]
