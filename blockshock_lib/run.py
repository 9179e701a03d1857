"""A run: its parameters, its cases, the folder that its records go to, and what is said of it in the end."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

import pandas as pd
from tqdm.auto import tqdm

from blockshock_lib import launch, machine, manifest, ownership, params, plan, records, resume, sources
from blockshock_lib.errors import Interrupted, ParamsError, RecordError, first_line
from blockshock_lib.manifest import ROOT, shown
from blockshock_lib.report import tables, verdicts

# Where dated folders go. The environment variable lets a test re-run notebooks without a trace under outputs/.
OUTPUTS = ROOT / os.environ.get("BLOCKSHOCK_OUTPUTS", "outputs")
CACHE = ROOT / ".cache" / "blockshock"


class Run:
    """One run of one phase: its parameters, its cases, and the folder that its records go to.

    Attributes:
        folder: the run's folder; records/, logs/, traces/ and manifest.json are written there and nowhere else.
        params: the effective parameters.
        cases: what the parameters expand to.
        card: the machine card (see machine.probe).
        source: the folder the records are read from: `folder`, or an earlier run's when this one redraws it.
        redrawn: whether the records were there before: then nothing is measured.
        stopped: "interrupted" or "failed" once `measure` was; then what is measured next goes on from there.
        resumes: whether it goes on with a run that was stopped.
    """

    def __init__(self, folder: Path, effective: params.Params, card: dict, source: Path | None = None):
        self.folder, self.params, self.card = folder, effective, card
        self.source, self.redrawn = source or folder, source is not None
        self.cases = plan.expand(effective)
        self.stopped, self.resumes = "", False

    @property
    def name(self) -> str:
        return shown(self.folder)

    @property
    def context(self) -> dict:
        """What every record carries beside its case: code, machine and libraries."""
        return {
            "code": machine.code_version(),
            "machine": machine.fingerprint(self.card),
            "libraries": self.card["libraries"],
            "emulated": self.params.hardware.emulated,
        }

    def measure(self, progress: bool = True, on_event: Callable[[dict], None] | None = None, **how: object) -> Run:
        """Measures every case and writes its record; a no-op when the run redraws an earlier one. A resumed run, or one
        whose measuring was stopped, goes on: what is finished is not repeated.

        Args:
            progress: show a bar.
            on_event: called with each of launch.run's events. To stop the run, it raises Interrupted.
            how: what else launch.run takes, such as the ranks of a job on several machines.

        Raises: LaunchError when the processes cannot be started, or another process runs this run. Interrupted and
            KeyboardInterrupt when it is stopped; no process is left then. A case that fails becomes rows that say so.
        """
        if self.redrawn:
            return self
        machine.admit(self.params, self.card)
        ownership.hold(self.folder)
        try:
            self._measure(progress, on_event or (lambda event: None), how)
        except (KeyboardInterrupt, Interrupted) as stop:
            self._stop("interrupted", str(stop) or "interrupted by the user")
            raise stop.with_traceback(None) from None  # the frames below only say where the ranks were waited for
        except Exception as error:
            self._stop("failed", first_line(error))
            raise
        return self

    def _measure(self, progress: bool, heard: Callable[[dict], None], how: dict) -> None:
        # The workers inherit it: tuned algorithms are kept with the project, whatever folder the kernel runs in.
        os.environ.setdefault("BLOCKSHOCK_CACHE", str(CACHE))
        manifest.note(self.folder, status="running", reason=None, ended=None)
        goes_on, context = self.resumes or bool(self.stopped), self.context
        sources.warn_if_stale(context["code"])
        finished = self.finished() if goes_on else frozenset()
        self.__dict__.pop("frame", None)
        with tqdm(total=len(self.cases) * self.params.timing.groups, disable=not progress, leave=False) as bar:

            def show(event: dict) -> None:
                bar.n = event["done"]
                bar.set_postfix_str(event["case"])
                if event["status"] == "running" and sources.digest() != context["code"]["sources"]:
                    context["code"] = machine.code_version()  # edited while it ran: the next records say so
                    sources.warn_if_stale(context["code"])
                heard(event)

            with ownership.scratch():
                asked = dict(run_name=self.name, context=context, on_event=show, finished=finished)
                launch.run(self.params, self.cases, self.folder, **asked, **how)
        self.stopped = ""

    def finished(self) -> set[tuple[str, int]]:
        """The (case id, group) whose record stands: whole, and made by this code on this machine. Reads files only."""
        again = self._unfinished()
        every = {(case.id, group) for case in self.cases for group in range(self.params.timing.groups)}
        return every - again.keys()

    def _unfinished(self) -> dict[tuple[str, int], str]:
        return resume.unfinished(self.folder, self.cases, self.params.timing.groups, self.context)

    def _stop(self, status: str, reason: str) -> None:
        self.stopped = status
        verdict = f"{self.params.phase} {status}: {reason}"
        manifest.note(self.folder, status=status, reason=reason, verdict=verdict, ended=now())
        ownership.release(self.folder)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The records, one row a measurement."""
        return records.load(self.source)

    def plan_table(self) -> pd.DataFrame:
        """What is asked, a row a (workload, dtype, size): the masks and batches it is run with. Nothing was
        measured.
        """
        rows = [
            {
                "workload": c.workload.name,
                "dtype": c.dtype,
                "size (out x in)": f"{c.out_features}x{c.in_features}",
                "B": c.batch,
                "mask": c.mask.name,
            }
            | ({"optimizer": c.optimizer} if c.optimizer else {})
            for c in self.cases
        ]
        grouped = pd.DataFrame(rows).groupby(["workload", "dtype", "size (out x in)"], sort=False)
        return grouped.agg(lambda values: ", ".join(map(str, dict.fromkeys(values)))).reset_index()

    def card_table(self) -> pd.DataFrame:
        """The machine that measured, a line a fact."""
        libraries = {f"{name}": version for name, version in self.card["libraries"].items() if version}
        facts = {"machine": self.card["title"], "driver": self.card.get("driver") or "none", **libraries}
        facts |= {f"cannot run {what}": why for what, why in self.card.get("unsupported", {}).items()}
        return pd.DataFrame({"value": facts.values()}, index=pd.Index(facts, name="fact"))

    def lost(self) -> str:
        """What is missing from the records, as the end of a verdict's line; "" when all cases of all groups
        are there.
        """
        wanted = len(self.cases) * self.params.timing.groups
        found = self.frame[["case", "group"]].drop_duplicates().shape[0]
        return f" · {wanted - found} of {wanted} records damaged or missing" if found < wanted else ""

    def conclude(self) -> str:
        """Writes verdict, clocks and power seen, end and digests into the manifest; returns the verdict as one line.

        The run is then completed, unless measuring it was stopped; the kernel of a command leaves that to the command.
        """
        line, files = verdicts.one_line(self.frame) + self.lost(), manifest.digests(self.folder)
        facts = {"verdict": line, "seen": _seen(self.frame), "ended": now(), "files": files}
        if not self.stopped and not ownership.borrowed(self.folder):
            facts |= {"status": "completed", "reason": ""}
        manifest.note(self.folder, **facts)
        ownership.release(self.folder)
        return line


def open_run(
    phase: str,
    *,
    hardware: str = "auto",
    settings: Mapping[str, object] | None = None,
    run_dir: str = "",
    redraw: str = "",
    resume: str = "",
    out: Path = OUTPUTS,
    root: Path = params.PARAMS,
    card: dict | None = None,
) -> Run:
    """A new run, validated before anything starts; or, with `redraw`, the records of an earlier one to look at again;
    or, with `resume`, an earlier one that was stopped, in its own folder with its own parameters.

    This process then owns the run, until `conclude`. Should it end before, the manifest says `interrupted`.

    Args:
        phase: "phase0" to "phase3".
        hardware: "auto", or the name of a file in params/hardware.
        settings: dotted key -> value, as `--set` on the command line takes them.
        run_dir: the folder made for the run; empty: a new dated one under `out`.
        redraw: the folder of an earlier run, relative to the project; nothing is measured then.
        resume: the folder of a run that was stopped, relative to the project, or "latest": the newest under `out`.
        card: the machine card, where it is not this machine's alone.

    Raises: ParamsError for a bad parameter; RecordError when `redraw` or `resume` holds no run of this phase, or there
        is nothing to resume; LaunchError when the run to resume is still going on.
    """
    # A reason is worth its whole sentence, and a table all its rows: a page cannot be scrolled for what is not in it.
    pd.set_option("display.max_colwidth", None, "display.max_rows", None)
    folder = _place(run_dir) if run_dir else None
    if settings is not None and not isinstance(settings, Mapping):
        raise ParamsError(f"settings: {settings!r}; allowed: a mapping of dotted keys, as in {{'sweep.n': [4096]}}")
    if redraw and (settings or hardware != "auto"):
        raise ParamsError("redraw: an earlier run is drawn as it was measured; leave hardware and settings out")
    if resume:
        if settings or hardware != "auto" or redraw or run_dir:
            raise ParamsError("resume: a run goes on as it was begun; leave hardware, settings, run_dir and redraw out")
        return _resumed(phase, resume, out, card)
    if redraw and run_dir == redraw and ownership.borrowed(folder):  # the command that measured has its notebook made
        return Run(folder, (found := _earlier(phase, redraw))[2], found[1]["machine"], folder)
    if folder is not None and list(folder.glob("records/*.json")):
        raise ParamsError(f"run_dir: {run_dir} holds the records of a run; name another folder, or redraw that one")
    if redraw:
        source, earlier, effective = _earlier(phase, redraw)
        name = f"{effective.hardware.name}-redrawn"
        run = Run(folder or new_folder(out, phase, name), effective, earlier["machine"], source)
    else:
        chosen = {} if hardware == "auto" else {"hardware": hardware}
        effective, card = params.load(phase, settings, choose=chosen, root=root), card or machine.probe()
        machine.admit(effective, card)
        run = Run(folder or new_folder(out, phase, effective.hardware.name), effective, card)
    run.folder.mkdir(parents=True, exist_ok=True)
    ownership.hold(run.folder)
    code = machine.code_version()
    manifest.note(
        run.folder,
        run=run.name,
        phase=phase,
        status="running",
        redrawn_from=shown(run.source) if run.redrawn else "",
        params=effective.model_dump(mode="json"),
        cases=len(run.cases),
        code=code,
        machine=run.card,
        started=now(),
    )
    sources.warn_if_stale(code)
    return run


def _resumed(phase: str, text: str, out: Path, card: dict | None) -> Run:
    folder = resume.latest(out, phase) if text == "latest" else _place(text)
    folder, earlier, effective = _earlier(phase, shown(folder))
    if earlier.get("redrawn_from"):
        raise RecordError(f"{shown(folder)} redraws {earlier['redrawn_from']} and measures nothing: nothing to resume")
    card = card or machine.probe()
    machine.admit(effective, card)
    run = Run(folder, effective, card)
    run.resumes = True
    ownership.hold(folder)
    again = Counter(run._unfinished().values())
    if manifest.read(folder)["status"] == "completed" and not again["missing"] + again["damaged"]:
        ownership.release(folder)
        raise RecordError(f"{shown(folder)} is completed, and its records are whole: nothing to resume")
    facts = {"status": "running", "code": run.context["code"], "machine": card}
    if not ownership.borrowed(folder):
        count = len(run.cases) * effective.timing.groups - again.total()
        facts["resumed"] = [*earlier.get("resumed", []), {"at": now(), "finished": count, "again": dict(again)}]
    manifest.note(folder, **facts, reason=None, verdict=None, ended=None, files=None)
    sources.warn_if_stale(facts["code"])
    return run


def _earlier(phase: str, text: str) -> tuple[Path, dict, params.Params]:
    # Folder, manifest and parameters of an earlier run of this phase.
    folder = _place(text)
    earlier = manifest.read(folder)
    if earlier["phase"] != phase:
        raise RecordError(f"{text} is a run of {earlier['phase']}, not of {phase}")
    try:
        return folder, earlier, params.Params.model_validate(earlier["params"])
    except ValueError as error:
        raise RecordError(f"{text} has parameters that this version does not know: {error}") from None


def new_folder(out: Path, phase: str, hardware: str = "") -> Path:
    """<out>/<date>/<time>-<phase>[-<hardware>], made; numbered when two runs start in the same second."""
    now = dt.datetime.now()
    # A name may hold anything, a folder's stays one component.
    name = re.sub(r"[^\w.-]+", "-", "-".join(filter(None, (phase, hardware))))
    base = Path(out) / now.strftime("%Y-%m-%d") / f"{now.strftime('%H%M%S')}-{name}"
    for number in range(1, 1000):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise ParamsError(f"{shown(base)} and 998 more like it exist already")


def _place(text: str) -> Path:
    """The folder that a parameter names: relative ones are relative to the project, whatever the kernel's folder is."""
    return ROOT / text


def now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def _seen(frame: pd.DataFrame) -> list[dict]:
    """Clocks and power of each GPU during the run, for the manifest; nothing on a CPU."""
    seen = tables.machine_table(frame)
    return seen.to_dict("records") if "power median (W)" in seen else []
