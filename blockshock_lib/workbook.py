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

from blockshock_lib import custodian, manifest, ownership, params, records
from blockshock_lib.errors import first_line
from blockshock_lib.manifest import ROOT, shown
from blockshock_lib.report import verdicts
from blockshock_lib.run import OUTPUTS, Run, now, open_run

__all__ = ["NOTEBOOKS", "OUTPUTS", "ROOT", "Outcome", "Run", "draw", "execute", "open_run", "runs"]

NOTEBOOKS = {
    "phase0": "phase0_correctness.ipynb",
    "phase1": "phase1_forward.ipynb",
    "phase2": "phase2_backward.ipynb",
    "phase3": "phase3_training.ipynb",
}


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
    resume: str = "",
    out: Path = OUTPUTS,
    root: Path = params.PARAMS,
) -> Outcome:
    """Runs a phase's notebook by papermill into a dated folder, or, to resume a run, into that run's own; never raises
    for what the notebook does. Arguments and refusals are those of `open_run`.

    The manifest's status is ours: `completed`, `failed` or `interrupted`. papermill calls every cell completed even
    when its kernel died.
    """
    run = open_run(phase, hardware=hardware, settings=settings, redraw=redraw, resume=resume, out=out, root=root)
    if run.resumes:
        return _finish(run, resume=run.name)
    source = shown(run.source) if run.redrawn else ""
    return _finish(run, hardware=hardware, settings=dict(settings or {}), run_dir=run.name, redraw=source)


def draw(run: Run) -> Outcome:
    """Runs the notebook of a run that this process has measured, into the run's own folder, and concludes the run."""
    return _finish(run, run_dir=run.name, redraw=run.name)


def _finish(run: Run, **asked: object) -> Outcome:
    """Executes the run's notebook, asked for with these parameters, makes its page and writes how the run ended."""
    phase = run.params.phase
    target = run.folder / Path(NOTEBOOKS[phase]).name
    given = dict(hardware="auto", settings={}, run_dir="", redraw="", resume="") | asked
    with _terminal_progress(run):
        status, reason = run_notebook(run.folder, NOTEBOOKS[phase], target, given)
    noted = manifest.read(run.folder)
    if noted["status"] != "running":  # the kernel knew it first, and better
        status, reason = noted["status"], noted["reason"]
    verdict = f"{phase} {status}: {reason}"
    if status != "completed":
        # Before the page is made: whoever looks now, or kills this process too, finds the truth.
        custodian.tidy(run.folder)
        manifest.note(run.folder, status=status, reason=reason, verdict=verdict, ended=now())
    html = make_page(target) if target.exists() else None
    passed = failed = 0
    if status == "completed":
        passed, failed, _, _ = verdicts.check_verdict(run.frame)
        verdict = run.conclude()
    else:
        manifest.note(run.folder, ended=now(), files=manifest.digests(run.folder))
        ownership.release(run.folder)
    ok = status == "completed" and passed > 0 and not failed and not run.lost()
    return Outcome(status, verdict, target, html, ok)


def run_notebook(folder: Path, name: str, target: Path, given: dict) -> tuple[str, str]:
    """Executes the notebook for the run in `folder` into `target`; how it went, completed, failed or interrupted, and
    why. No process is left.

    Should this process be killed, the kernel's connection file is left: it is put where it will be swept.
    """
    import papermill
    from traitlets.config import Config

    try:
        with ownership.scratch(**{ownership.RUN: str(folder.resolve())}) as scratch:
            try:
                papermill.execute_notebook(
                    _literal(ROOT / "notebooks" / name),
                    _literal(scratch / target.name),
                    parameters=given,
                    cwd=ROOT / "notebooks",
                    kernel_name="python3",
                    progress_bar=False,
                    # ipykernel warns at each start that its loopback sockets are not encrypted; that is no news.
                    extra_arguments=["--log-level=40"],
                    # A kernel that is busy measuring would be waited for; past its last cell it has nothing left to do.
                    shutdown_kernel="immediate",
                    config=Config(KernelManager={"connection_file": str(scratch / "kernel.json")}),
                )
            finally:
                _keep(scratch / target.name, target)
    except KeyboardInterrupt:
        return "interrupted", "interrupted by the user"
    except papermill.PapermillExecutionError as error:
        stopped = error.ename in ("KeyboardInterrupt", "Interrupted")
        said = f"{error.ename}: {first_line(error.evalue)}" if error.evalue else error.ename
        return "interrupted" if stopped else "failed", said
    except Exception as error:
        # nbclient has more than one class for it.
        died = "kernel died" in str(error).lower()
        return ("interrupted", "the notebook's kernel died") if died else ("failed", first_line(error))
    return "completed", ""


def runs(out: Path = OUTPUTS) -> pd.DataFrame:
    """Every run under `out`, newest first: when, phase, machine, status, verdict, folder."""
    rows = []
    for folder, m in manifest.every(out):
        rows.append(
            {
                "started": m["started"],
                "phase": m["phase"],
                "machine": m["machine"]["title"],
                "status": m["status"],
                "verdict": m.get("verdict", ""),
                "folder": shown(folder),
            }
        )
    columns = ["started", "phase", "machine", "status", "verdict", "folder"]
    return pd.DataFrame(rows, columns=columns).sort_values(["started", "folder"], ascending=False, ignore_index=True)


def make_page(notebook: Path) -> Path | None:
    """The notebook's page; None, with a warning, where it cannot be made: the run and its records are worth more."""
    from blockshock_lib.report.pages import page  # a kernel, which makes none, starts in half the time without it

    try:
        return page.write_html(notebook)
    except Exception as error:
        warnings.warn(f"no HTML page for {shown(notebook)}: {str(error).splitlines()[0]}", stacklevel=2)
        return None


def _literal(path: Path) -> str:
    """A path as papermill takes it, which calls `format` on it."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _keep(draft: Path, target: Path) -> None:
    """What was executed so far, whole, in the run's folder; without this machine's paths, which papermill notes."""
    try:
        content = json.loads(draft.read_text())
    except (OSError, ValueError):
        return  # it could not be written: the error that says so is on its way
    content["metadata"].pop("papermill", None)
    records.write_atomic(target, json.dumps(content, indent=1) + "\n")


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
