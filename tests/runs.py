"""Small runs for the tests: one case, and records written without measuring."""

from __future__ import annotations

import math
from pathlib import Path

from blockshock_lib import records, workbook

TINY = {
    "sweep.n": [128],
    "sweep.masks": ["checkerboard"],
    "sweep.workloads": ["gaussian"],
    "timing.groups": 1,
}


def written(out: Path, *, failed: str = "") -> workbook.Run:
    """A phase 0 run of one case; its records hold a passed check of every method but `failed`. Nothing was measured."""
    run = workbook.open_run("phase0", hardware="cpu", settings=TINY, out=out)
    (case,) = run.cases
    rows = [
        records.row(method, "check", math.nan, status="failed", reason="planted")
        if method == failed
        else records.row(method, "check", 1.0)
        for method in case.methods
    ]
    records.write(run.folder, run=run.name, case=case, group=0, rows=rows, context=run.context)
    return run
