"""The notebook of a run: papermill, an honest status, the HTML page; and the list of runs."""

import contextlib
import copy
import functools
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from blockshock_lib import files
from blockshock_lib.errors import ParamsError, RecordError, first_line
from blockshock_lib.files import ROOT, shown
from blockshock_lib.notebook import terminal
from blockshock_lib.ranks.torchrun import Job
from blockshock_lib.report import verdicts
from blockshock_lib.runs import code, lock, machine, manifest, measure
from blockshock_lib.runs import open as opening
from blockshock_lib.runs.run import CACHE, OUTPUTS, Run, now

MEET_SECONDS = 300
DRAW = "import sys; from blockshock_lib.notebook import workbook; sys.exit(workbook.draw(sys.argv[1]) or None)"


def open_run(phase: str, **asked) -> Run:
    """`runs.open.open_run`. In a notebook that no command executes it says where the run is kept; `conclude` then has
    notebook and page made there, and `measure` refuses where what was asked for has been edited since.
    """
    run = opening.open_run(phase, **asked)
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if hasattr(shell, "kernel") and not lock.borrowed(run.folder):
        now = shell.user_ns
        then = {name: copy.deepcopy(value) for name, value in asked.items() if name in now and now[name] == value}

        def before() -> None:
            if edited := [name for name, value in then.items() if now.get(name) != value]:
                why = f"{', '.join(edited)}: edited since this run was opened"
                raise ParamsError(f"{why}; run the cell with open_run again, for a run of its own")

        run.before = before
        if not OUTPUTS.is_relative_to(ROOT / ".cache"):  # there a test compares what the cells of a notebook print
            kind = shell.display_formatter.formatters["text/html"]  # as on a page: no running index and no NaN
            kind.for_type(pd.DataFrame, lambda t: t.to_html(index=t.index.names != [None], na_rep="–", notebook=True))
            print(f"run: {run.name}")
            run.after = run.after if run.redrawn else functools.partial(_say_drawn, run.folder)
    return run


def _say_drawn(folder: Path) -> None:
    print(f"drawing notebook and page in {shown(folder)} ...", flush=True)
    try:
        print(f"page: {shown(draw_apart(folder))}")
    except RecordError as error:
        warnings.warn(str(error), stacklevel=3)


def draw_apart(folder: Path) -> Path:
    """`draw` in a process of its own; the page. RecordError where the notebook failed, or no page was made."""
    asked = dict(env=os.environ | {"PYTHONPATH": _path()}, cwd=ROOT, text=True)
    piped = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", DRAW, str(folder.resolve())], **asked, **piped) as drawing:
        why = "no page was made"
        try:
            for line in drawing.stderr:  # one every few seconds
                terminal.say(line := line.rstrip())
                why = line or why
        except BaseException:
            drawing.kill()
            raise
    pages = sorted(folder.glob("*.html"))
    if drawing.returncode or not pages:
        raise RecordError(f"notebook and page of {shown(folder)} are not whole: {why}")
    return pages[0]


def draw(folder: Path | str) -> str:
    """Makes the notebook and the page of a run that was measured already, in its own folder; "" or why it failed."""
    run = opening.in_place(Path(folder))
    outcome = _finish(run, run_dir=run.name, redraw=run.name)
    return "" if outcome.status == "completed" else outcome.verdict


def _path() -> str:
    # What is started imports this library, whatever the environment's own is.
    return os.pathsep.join(filter(None, (str(code.HERE), os.environ.get("PYTHONPATH"))))


@dataclass(frozen=True)
class Outcome:
    status: str
    verdict: str
    notebook: Path
    html: Path | None
    ok: bool
    answer: str = ""
    claims: tuple[tuple[str, str], ...] = ()  # name and sentence of each hypothesis

    def text(self) -> str:
        """The answer, then a fact a line: those of the verdict, where notebook and page are."""
        lines = self.verdict.split(" · ")
        for name, claim in self.claims:
            lines = [re.sub(rf"^{re.escape(name)} ", lambda _: f"{claim.rstrip('.')}: ", line) for line in lines]  # noqa: B023
        page = [f"page     {self.html.absolute().as_uri()}"] if self.html else []
        return "\n".join([*filter(None, [self.answer]), *lines, f"notebook {self.notebook.absolute()}", *page])


def execute(phase: str, **asked) -> Outcome:
    """Runs a phase's notebook by papermill into a dated folder, or that of the run to resume; never raises for what
    the notebook does. Arguments and refusals are those of `open_run`.
    """
    run = opening.open_run(phase, **asked)
    if run.resumes:
        for had in manifest.read(run.folder).get("resumed", [])[-1:]:  # a further run of a reference has none
            left = ", ".join(f"{count} {why}" for why, count in had["again"].items())
            terminal.say(f"resume   {run.name}: records that stand: {had['finished']}; to measure: {left or 'none'}")
        return _finish(run, resume=run.name)
    given = {name: asked[name] for name in ("hardware", "settings") if asked.get(name)}
    return _finish(run, run_dir=run.name, redraw=shown(run.source) if run.redrawn else "", **given)


def execute_job(phase: str, job: Job, *, hardware="auto", settings=None, resume="", **asked) -> Outcome | None:
    """A run under torchrun, called by every rank: rank 0 opens it, has all of them measure it, draws its notebook and
    gets the outcome, the others None. A rank that fails in a case ends the job; started anew, it goes on with its run.
    """
    os.environ.setdefault("BLOCKSHOCK_CACHE", str(CACHE))
    given = bool(settings) or hardware != "auto"
    if hardware == "auto":
        hardware = "cuda" if machine.probe()["gpus"] else "cpu"
    job.device = "cpu" if hardware.startswith("cpu") else "cuda"
    with lock.scratch():
        with job:
            if job.rank:
                return job.follow()
            card = machine.joined(job.call(machine.describe, seconds=MEET_SECONDS))
            if job.restarts and not resume:
                with contextlib.suppress(RecordError):  # it was ended before it had opened a run
                    resume = shown(opening.latest(asked.get("out", OUTPUTS), phase, job.name))
            if given or not resume:
                asked |= dict(hardware=hardware, settings={**(settings or {}), "hardware.world_size": job.size})
            run = opening.open_run(phase, **asked, resume=resume, card=card)
            manifest.note(run.folder, job=job.name)
            with terminal.working(run.params.phase, _measured(run), run.study.phases[run.params.phase].unit):
                run.measure(progress=False, group=job.group, gives_up=job.restarts > 0)
        return _finish(run, run_dir=run.name, redraw=run.name)


def _finish(run: Run, **asked: object) -> Outcome:
    def conclude() -> tuple[str, bool]:
        passed, failed, *_ = verdicts.check_verdict(run.own)
        return run.conclude(), passed > 0 and not failed and not run.lost()

    phase = run.params.phase
    source = ROOT / "notebooks" / run.study.phases[phase].notebook
    given = dict(hardware="auto", settings={}, run_dir="", redraw="", resume="") | asked
    with terminal.working(run.params.phase, _measured(run), run.study.phases[run.params.phase].unit):
        return finish(run.folder, phase, source, given, conclude)


def finish(folder: Path, phase: str, source: Path, given: dict, conclude: Callable[[], tuple[str, bool]]) -> Outcome:
    """Executes the notebook `source` with the parameters `given` in a run's folder, makes its page and notes how the
    run ended. `conclude`, called where the notebook went well, gives the verdict and whether all is well.
    """
    target, ok, told = folder / source.name, False, ()
    over = manifest.read(folder)["status"] != "running"  # it is only drawn: its notebook may fail, the run did not
    status, reason = run_notebook(folder, source, target, given)
    noted = manifest.read(folder)
    if noted["status"] != "running" and not over:  # the kernel knew it first, and better
        status, reason = noted["status"], noted["reason"]
    verdict = f"{phase} {status}: {reason}"
    if status != "completed" and not over:
        # Before the page is made: whoever looks now, or kills this process too, finds the truth.
        lock.tidy(folder)
        manifest.note(folder, status=status, reason=reason, verdict=verdict, ended=now())
    html = None
    if target.exists():
        terminal.note("making the page")
        from blockshock_lib.notebook.pages import page  # a kernel, which makes none, starts in half the time without it

        try:
            html = page.write_html(target)
        except Exception as error:  # the run and its records are worth more
            warnings.warn(f"no HTML page for {shown(target)}: {first_line(error)}", stacklevel=2)
    if status == "completed" and not over:
        verdict, ok = conclude()
        noted = manifest.read(folder)
        status, told = noted["status"], (noted.get("answer") or "", (*noted.get("claims", {}).items(),))
    else:
        manifest.note(folder, **{} if over else {"ended": now()}, files=manifest.digests(folder))
        lock.release(folder)
    if html is not None and folder.is_relative_to(OUTPUTS):
        from blockshock_lib.notebook import share

        with contextlib.suppress(RecordError):  # the page links to the list of runs
            share.write_index(OUTPUTS)
    return Outcome(status, verdict, target, html, ok, *told)


def run_notebook(folder: Path, source: Path, target: Path, given: dict) -> tuple[str, str]:
    """Executes `source` for the run in `folder` into `target`; "completed", "failed" or "interrupted", and why."""
    import papermill
    from traitlets.config import Config

    try:
        with lock.scratch(**{lock.RUN: str(folder.resolve()), "PYTHONPATH": _path()}) as scratch:
            draft = scratch / target.name
            try:
                papermill.execute_notebook(
                    *(str(path).replace("{", "{{").replace("}", "}}") for path in (source, draft)),  # it calls `format`
                    parameters=given,
                    cwd=ROOT / "notebooks",
                    kernel_name="python3",
                    progress_bar=False,
                    on_cell_start=_say_cell,
                    # ipykernel warns at each start that its loopback sockets are not encrypted; that is no news.
                    extra_arguments=["--log-level=40"],
                    # A kernel that is busy measuring would be waited for; past its last cell it has nothing left to do.
                    shutdown_kernel="immediate",
                    # Left where it will be swept, should this process be killed.
                    config=Config(KernelManager={"connection_file": str(scratch / "kernel.json")}),
                )
            finally:
                with contextlib.suppress(OSError, ValueError):  # not written: the error that says so is on its way
                    content = json.loads(draft.read_text())
                    content["metadata"].pop("papermill", None)  # it notes this machine's paths
                    files.write_atomic(target, json.dumps(content, indent=1) + "\n")
    except KeyboardInterrupt:
        return "interrupted", "interrupted by the user"
    except papermill.PapermillExecutionError as error:
        stopped = error.ename in ("KeyboardInterrupt", "Interrupted")
        said = f"{error.ename}: {first_line(error.evalue)}" if error.evalue else error.ename
        return "interrupted" if stopped else "failed", said
    except Exception as error:
        died = "kernel died" in str(error).lower()  # nbclient has more than one class for it
        return ("interrupted", "the notebook's kernel died") if died else ("failed", first_line(error))
    return "completed", ""


def _say_cell(cell: dict, cell_index: int) -> None:
    begun = [line for line in cell["source"].splitlines() if cell["cell_type"] == "code" and line[:1].isalpha()]
    terminal.note(f"notebook, cell {cell_index + 1}{f': {begun[-1]:.60}' if begun else ''}")


def _measured(run: Run) -> Callable[[], tuple[float, float, str]]:
    """How much of how much, in the phase's unit, is measured, and the cases that are in hand."""
    phase, most = run.study.phases[run.params.phase], 0.0
    cases = {} if run.redrawn else {case.id: case for case in run.cases}
    total = sum(map(phase.amount, cases.values())) * run.params.timing.groups
    again = {f"{case}-{group}.json" for case, group in run.unfinished()} if run.resumes else {}
    stale = {path: path.stat().st_mtime_ns for path in run.folder.glob("records/*.json") if path.name in again}

    def look() -> tuple[float, float, str]:
        nonlocal most
        paths = [path for path in run.folder.glob("records/*") if path.stem.partition("-")[0] in cases]
        of = {path: cases[path.stem.partition("-")[0]] for path in paths}
        whole = [path for path in paths if path.suffix == ".json" and path.stat().st_mtime_ns != stale.get(path)]
        begun = [path for path in paths if path.suffix == ".part" and path.with_suffix(".json") not in whole]
        done = sum(phase.amount(of[path]) for path in whole)
        for path in begun if phase.unit else ():
            rows = [row for message, *_ in measure.messages(path) for row in message.get("rows", ())]
            done += max((phase.reached(of[path], row) for row in rows), default=0)
        most = max(most, done)  # a finished run packs its records
        return most, total, " | ".join(of[path].label for path in begun)

    return look
