"""Small runs for the tests: one case, and records written without measuring."""

import math
import random
import shutil
from functools import lru_cache
from pathlib import Path

from blockshock_lib import files
from blockshock_lib.notebook import workbook
from blockshock_lib.runs import manifest, record, records
from tests.cases import row, write

TINY = {"sweep.n": [128], "sweep.masks": ["checkerboard"], "sweep.workloads": ["gaussian"], "timing.groups": 1}
# A run's whole records, read once; `seal`: their digest, or a new object where they are files, which may change.
_scanned = lru_cache(1)(lambda source, seal: records.scan(source)[0])


def written(out: Path, *, failed: str = "", groups: int = 1) -> workbook.Run:
    """A phase 0 run of one case; its record, the first of `groups`, holds a passed check of every method but `failed`.
    Nothing was measured.
    """
    run = workbook.open_run("phase0", hardware="cpu", settings=TINY | {"timing.groups": groups}, out=out)
    (case,) = run.cases
    rows = [row(method, "check", 1.0) for method in case.methods if method != failed]
    rows += [row(failed, "check", math.nan, status="failed", reason="planted")] if failed else []
    write(run.folder, run=run.name, case=case, group=0, rows=rows, context=run.context)
    return run


def measured(params, cases, folder, *, run_name, context, on_event, finished, **_):
    """In place of measure.run: writes a record of passed checks of each case that is not finished."""
    done = 0
    for group in range(params.timing.groups):
        for case in cases:
            event = {"total": len(cases) * params.timing.groups, "case": case.label, "group": group}
            if (case.id, group) not in finished:
                on_event(event | {"done": done, "status": "running"})
                rows = [row(method, "check", 1.0) for method in case.methods]
                write(folder, run=run_name, case=case, group=group, rows=rows, context=context)
                record.path_of(folder, case.id, group).with_suffix(".state").unlink(missing_ok=True)
            done += 1
            on_event(event | {"done": done, "status": "ok"})


def copied(source: Path, target: Path, cases: int | None = None, **facts: object) -> Path:
    """A run's records as files that a test may change, of its first `cases` cases; its manifest with `facts`."""
    target.mkdir(parents=True)
    shutil.copy(source / manifest.FILE, target)
    whole = _scanned(source, records.find(source) or object())
    kept = sorted({one["id"] for one in whole})[:cases]
    for one in (one for one in whole if one["id"] in kept):
        files.write_atomic(record.path_of(target, one["id"], one["group"]), record.encode(one))
    manifest.note(target, **{"cases": len(kept), "files": manifest.digests(target)} | facts)
    return target


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def flip(data: bytes, draw: random.Random) -> bytes:
    at, bit = draw.randrange(len(data)), draw.randrange(8)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
