"""The notebook of a run: papermill, an honest status, the HTML page; and the list of runs."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from blockshock_lib import manifest, params
from blockshock_lib.errors import RecordError
from blockshock_lib.manifest import ROOT, shown
from blockshock_lib.report import page, verdicts
from blockshock_lib.run import OUTPUTS, Run, now, open_run

__all__ = ["NOTEBOOKS", "OUTPUTS", "ROOT", "Outcome", "Run", "execute", "open_run", "runs"]

NOTEBOOKS = {"phase0": "phase0_correctness.ipynb", "phase1": "phase1_forward.ipynb"}


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its status and one-line verdict, its notebook and page, and whether all is well."""

    status: str
    verdict: str
    notebook: Path
    html: Path | None
    ok: bool

    def line(self) -> str:
        where = " · ".join(shown(path) for path in (self.notebook, self.html) if path is not None)
        return f"{self.verdict} · {where}"


def execute(
    phase: str,
    *,
    hardware: str = "auto",
    settings: Mapping[str, object] | None = None,
    redraw: str = "",
    out: Path = OUTPUTS,
    root: Path = params.PARAMS,
) -> Outcome:
    """Runs a phase's notebook by papermill into a dated folder; never raises for what the notebook does.

    The manifest's status is ours: `completed`, `failed` or `interrupted`. papermill calls every cell completed even
    when its kernel died.
    """
    import papermill

    run = open_run(phase, hardware=hardware, settings=settings, redraw=redraw, out=out, root=root)
    target = run.folder / Path(NOTEBOOKS[phase]).name
    status, reason = "completed", ""
    source = shown(run.source) if run.redrawn else ""
    given = dict(hardware=hardware, settings=dict(settings or {}), run_dir=run.name, redraw=source)
    try:
        with _terminal_progress(run):
            papermill.execute_notebook(
                ROOT / "notebooks" / NOTEBOOKS[phase],
                target,
                parameters=given,
                cwd=ROOT / "notebooks",
                kernel_name="python3",
                progress_bar=False,
                # ipykernel warns at each start that its loopback sockets are not encrypted; that is no news of a run's.
                extra_arguments=["--log-level=40"],
            )
    except KeyboardInterrupt:
        status, reason = "interrupted", "interrupted by the user"
    except Exception as error:
        status, reason = "failed", str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    html = None
    if target.exists():
        _forget_paths(target)
        html = _page(target)
    passed = failed = 0
    if status == "completed":
        passed, failed, _, _ = verdicts.check_verdict(run.frame)
        verdict = run.conclude()
    else:
        verdict = f"{phase} {status}: {reason}"
    manifest.note(
        run.folder, status=status, reason=reason, verdict=verdict, ended=now(), files=manifest.digests(run.folder)
    )
    ok = status == "completed" and passed > 0 and not failed and not run.lost()
    return Outcome(status, verdict, target, html, ok)


def runs(out: Path = OUTPUTS) -> pd.DataFrame:
    """Every run under `out`, newest first: when, phase, machine, status, verdict, folder."""
    rows = []
    for path in out.glob(f"**/{manifest.FILE}"):
        try:
            m = manifest.read(path.parent)
        except RecordError as error:
            warnings.warn(str(error), stacklevel=2)
            continue
        rows.append(
            {
                "started": m["started"],
                "phase": m["phase"],
                "machine": m["machine"]["title"],
                "status": m["status"],
                "verdict": m.get("verdict", ""),
                "folder": shown(path.parent),
            }
        )
    columns = ["started", "phase", "machine", "status", "verdict", "folder"]
    return pd.DataFrame(rows, columns=columns).sort_values(["started", "folder"], ascending=False, ignore_index=True)


def _page(notebook: Path) -> Path | None:
    """The notebook's page; None, with a warning, where it cannot be made: the run and its records are worth more."""
    try:
        return page.write_html(notebook)
    except Exception as error:
        warnings.warn(f"no HTML page for {shown(notebook)}: {str(error).splitlines()[0]}", stacklevel=2)
        return None


def _forget_paths(notebook: Path) -> None:
    """papermill writes this machine's paths into the metadata; a shared notebook should not carry them."""
    content = json.loads(notebook.read_text())
    content["metadata"].pop("papermill", None)
    notebook.write_text(json.dumps(content, indent=1) + "\n")


@contextlib.contextmanager
def _terminal_progress(run: Run) -> Iterator[None]:
    """A bar in the terminal while the notebook's kernel measures: it counts the records as they appear."""
    total = 0 if run.redrawn else len(run.cases) * run.params.timing.groups
    stop = threading.Event()

    def watch(bar: tqdm) -> None:
        while not stop.wait(0.3):
            bar.n = sum(1 for _ in (run.folder / "records").glob("*.json"))
            bar.refresh()

    with tqdm(total=total, desc=run.params.phase, disable=not sys.stderr.isatty(), leave=False) as bar:
        thread = threading.Thread(target=watch, args=(bar,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
