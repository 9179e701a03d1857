"""Small runs for the tests: one case, and records written without measuring."""

import math
import shutil
from pathlib import Path

from blockshock_lib.notebook import workbook
from blockshock_lib.runs import manifest, records
from tests.cases import row, write

TINY = {"sweep.n": [128], "sweep.masks": ["checkerboard"], "sweep.workloads": ["gaussian"], "timing.groups": 1}


def written(out: Path, *, failed: str = "") -> workbook.Run:
    """A phase 0 run of one case; its records hold a passed check of every method but `failed`. Nothing was measured."""
    run = workbook.open_run("phase0", hardware="cpu", settings=TINY, out=out)
    (case,) = run.cases
    rows = [row(method, "check", 1.0) for method in case.methods if method != failed]
    rows += [row(failed, "check", math.nan, status="failed", reason="planted")] if failed else []
    write(run.folder, run=run.name, case=case, group=0, rows=rows, context=run.context)
    return run


def copied(source: Path, target: Path) -> Path:
    """Manifest and records of a run, packed or not, as files that a test may change."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (manifest.FILE, records.PARQUET):
        if (source / name).is_file():
            shutil.copy(source / name, target)
    if (source / "records").is_dir():
        shutil.copytree(source / "records", target / "records")
    records.unpack(target)
    return target
