"""A run: its parameters, its cases, the folder that its records go to, and what is said of it in the end."""

import contextlib
import datetime as dt
import itertools
import os
import re
import warnings
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import HTML
from tqdm.auto import tqdm

from blockshock_lib import params
from blockshock_lib.engine.study import Study
from blockshock_lib.errors import Interrupted, ParamsError, RecordError, first_line
from blockshock_lib.files import ROOT, shown
from blockshock_lib.report import answer, figures, tables, verdicts
from blockshock_lib.runs import code, lock, machine, manifest, measure, record, records, reference, rules
from blockshock_lib.runs.manifest import OUTPUTS, REFERENCE  # noqa: F401 - for those who open runs

CACHE = ROOT / ".cache" / "blockshock"


class Run:
    """One run of one phase, which writes to `folder` alone; one that redraws measures nothing and reads `source`."""

    def __init__(self, study: Study, folder: Path, effective: params.RunParams, card: dict, source: Path | None = None):
        self.study, self.folder, self.params, self.card = study, folder, effective, card
        self.source, self.redrawn = source or folder, source is not None
        self.cases = study.expand(effective)
        self.resumes = False  # whether it goes on with a run that was stopped
        self.stopped = ""  # "interrupted" or "failed" once `measure` was; then it goes on from there
        self.measured = False  # whether `measure` came to its end
        # What a notebook has to say before it is measured, and to do once it was concluded.
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        self._drawn: dict[str, figures.Figure] = {}

    @property
    def name(self) -> str:
        return shown(self.folder)

    @property
    def context(self) -> dict:
        portable = self.study.phases[self.params.phase].portable
        made = {"code": code.version(self.study), "machine": machine.fingerprint(self.card, portable)}
        return made | {"libraries": self.card["libraries"], "emulated": self.params.hardware.emulated}

    def measure(self, progress: bool = True, on_event: Callable[[dict], None] | None = None, **how: object) -> "Run":
        """Measures every case and writes its record; a case that fails becomes rows that say so. A resumed run, or one
        whose measuring was stopped, goes on: what is finished is not repeated. `on_event` hears of measure.run's
        events, and raises Interrupted to stop the run.

        Raises: LaunchError: the processes cannot be started, or another process runs this run. RecordError: it is
            measured already. ParamsError: what is asked for was edited since the run was opened.
        """
        if self.redrawn:
            return self
        self.before()
        if self.measured:
            raise RecordError(
                f"{self.name} is measured already: run the cell with open_run again, for a run of its own"
            )
        machine.admit(self.params, self.card)
        lock.hold(self.folder)
        try:
            self._measure(progress, on_event or (lambda event: None), how)
        except (KeyboardInterrupt, Interrupted) as stop:
            self._stop("interrupted", str(stop) or "interrupted by the user")
            # The frames below only say where the ranks were waited for.
            told = KeyboardInterrupt("run this cell again to go on") if isinstance(stop, KeyboardInterrupt) else stop
            raise told.with_traceback(None) from None
        except Exception as error:
            self._stop("failed", first_line(error))
            raise
        return self

    def _measure(self, progress: bool, heard: Callable[[dict], None], how: dict) -> None:
        # The workers inherit it: tuned algorithms are kept with the project, whatever folder the kernel runs in.
        os.environ.setdefault("BLOCKSHOCK_CACHE", str(CACHE))
        manifest.note(self.folder, status="running", reason=None, ended=None)
        goes_on, context = self.resumes or bool(self.stopped), self.context
        code.warn_if_stale(context["code"], self.study)
        finished = self.finished() if goes_on else frozenset()
        for name in ("own", "frame", "_each"):
            self.__dict__.pop(name, None)
        with tqdm(total=len(self._wanted), initial=len(finished), disable=not progress, leave=False) as bar:

            def show(event: dict) -> None:
                bar.n = event["done"]
                bar.set_postfix_str(event["case"])
                if event["status"] == "running" and code.digest(self.study) != context["code"]["sources"]:
                    context["code"] = code.version(self.study)  # edited while it ran: the next records say so
                    code.warn_if_stale(context["code"], self.study)
                heard(event)

            # Each run of a reference searches its kernels anew: what an earlier search chose is a part of its effect.
            fresh = manifest.read(self.folder).get("reference")
            with (
                lock.scratch() as place,
                lock.scratch(**{"BLOCKSHOCK_CACHE": f"{place / self.folder.name}"} if fresh else {}),
            ):
                asked = dict(study=self.study, run_name=self.name, context=context, on_event=show, finished=finished)
                measure.run(self.params, self.cases, self.folder, **asked, **how)
        self.stopped, self.measured = "", True

    @property
    def _wanted(self) -> list[tuple[str, int]]:
        return [(case.id, group) for group in range(self.params.timing.groups) for case in self.cases]

    def finished(self) -> set[tuple[str, int]]:
        return set(self._wanted) - self.unfinished().keys()

    def unfinished(self) -> dict[tuple[str, int], str]:
        """(case id, group) -> why: what stands is whole, of this machine and code, and of no stale kernel."""
        whole, damaged = records.scan(self.folder)
        known, current = {(one["id"], one["group"]): one for one in whole}, self.context
        again = {}
        for case, group in self._wanted:
            torn = {f"{case}-{group}.json", records.PARQUET} & damaged.keys()
            made = known.get((case, group))
            again[case, group] = _why(made, current) if made else "damaged" if torn else "missing"
            if made and record.path_of(self.folder, case, group).with_suffix(".state").exists():
                again[case, group] = "cut off"
        return {wanted: why for wanted, why in again.items() if why}

    def _stop(self, status: str, reason: str) -> None:
        self.stopped = status
        verdict = f"{self.params.phase} {status}: {reason}"
        manifest.note(self.folder, status=status, reason=reason, verdict=verdict, ended=now())
        lock.release(self.folder)

    @cached_property
    def own(self) -> pd.DataFrame:
        return records.load(self.source)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The records of this run and of the others of its reference: what tables, figures and verdicts weigh."""
        return pd.concat([*self._each.values()], ignore_index=True) if len(self._each) > 1 else self.own

    @cached_property
    def _each(self) -> dict[Path, pd.DataFrame]:
        return {self.source: self.own} | {folder: records.load(folder) for folder in self.others()}

    def others(self) -> list[Path]:
        return reference.others(self.source, manifest.read(self.source))

    def alone(self) -> str:
        """That fewer runs are weighed than its reference has, as of a copy that lies elsewhere, like `lost`."""
        about, here = manifest.read(self.source), 1 + len(self.others())
        told = re.findall(r" (\d+) runs: ", about.get("verdict", ""))
        first = reference.name_of({name: about[name] for name in ("run", "started")})  # of which no other need be there
        known = max(map(int, [*told, 1 + ((about.get("reference") or first) != first)]))
        lead = f" · weighs {here} of the {known} runs of its reference: the others are not found, or not whole, from "
        return f"{lead}where it lies" if here < known else ""

    def table(self, name: str, *more: object) -> pd.DataFrame:
        return self._named("table", self.study.tables, name)(self.frame, *more)

    def figure(self, name: str, *more: object) -> HTML:
        """The study's figure of that name; `conclude` keeps it in the run's folder."""
        drawn = self._named("figure", self.study.figures, name)(self.frame, *more)
        self._drawn[name] = drawn
        return figures.show(drawn)

    @property
    def sentence(self) -> str:
        """The phase's answer in words, between what failed and what is missing."""
        phase, study = self.study.phases[self.params.phase], self.study
        speed = partial(answer.speed, axes=study.axes, metric=phase.metric)
        said = study.answers.get(phase.name) or (speed if phase.metric else answer.checked)
        return answer.sentence(self.frame, said, self.lost() + self.alone(), self.own)

    def answer(self) -> HTML:
        """How a notebook begins: `sentence`, the phase's first figure, the checks, the hypotheses in words."""
        first = self.study.phases[self.params.phase].figures[:1]
        picture = "".join(self.figure(name).data for name in first)
        return HTML(answer.html(self.sentence, self.frame, self.study.hypotheses, picture, self.own))

    def _named(self, what: str, known: Mapping[str, Callable], name: str) -> Callable:
        if name not in known:
            raise ParamsError(f"{name!r} is no {what} of the study {self.study.name}; it has {', '.join(known)}")
        return known[name]

    def plan_table(self) -> pd.DataFrame:
        axes = self.study.axes
        lines, joined = self.study.plan or ({axes.x: axes.header(axes.x)}, {axes.y: axes.header(axes.y)})
        names = lines | joined
        cases = [case.as_dict() for case in self.cases]
        rows = pd.DataFrame([case | self.study.columns(case) for case in cases])[list(names)].rename(columns=names)
        asked = rows[[name for name in rows if name in lines.values() or rows[name].ne("").any()]]
        grouped = asked.groupby(list(lines.values()), sort=False)
        return grouped.agg(lambda values: ", ".join(map(str, dict.fromkeys(values)))).reset_index()

    def card_table(self) -> pd.DataFrame:
        facts = {"machine": self.card["title"], "driver": self.card.get("driver") or "none"}
        facts |= {name: version for name, version in self.card["libraries"].items() if version}
        facts |= {f"cannot run {what}": why for what, why in self.card.get("unsupported", {}).items()}
        return pd.DataFrame({"value": facts.values()}, index=pd.Index(facts, name="fact"))

    def lost(self) -> str:
        """What is missing from the records, as the end of a verdict's line."""
        wanted, missing = len(self._wanted), self._missing()
        whole = len(list(self.source.glob("records/*.json"))) <= wanted - missing
        why = "not measured" if whole else "damaged or missing"
        return f" · {missing} of {wanted} records {why}" if missing > 0 else ""

    def _missing(self) -> int:
        return len(self._wanted) - len(self.own[["case", "group"]].drop_duplicates())

    def conclude(self) -> str:
        """Notes verdict, figures, end and digests; a whole run of ours is completed and packed. The verdict's line."""
        study, lost, wanted, known = self.study, self.lost(), len(self._wanted), manifest.read(self.folder)
        facts = {"ended": now(), "figures": self._save_figures()}
        # A command's kernel that came to its end has weighed these records: the command does not weigh them again.
        if self.measured or self.redrawn or known["status"] != "running" or not known.get("ended"):
            seen = tables.machine_table(self.own)
            state = f"INCOMPLETE {wanted - self._missing()} of {wanted}" if lost else "PASS"
            about = study.axes, study.hypotheses, study.summary
            line = verdicts.one_line(self.frame, *about, good=state, own=self.own) + lost + self.alone()
            line = manifest.placed(line, {name: place for place, one in self._each.items() for name in set(one["run"])})
            other = rules.changed(manifest.read(self.source), study, self.frame)
            line += "".join(f" · {one}" for one in (answer.failure(self.own, study.axes), other) if one)
            judged = verdicts.hypotheses(self.frame, study.hypotheses)
            facts |= {} if other else {"verdicts": {one.name: one.verdict for one in judged}}
            facts |= {"verdict": line, "claims": {one.name: one.hypothesis for one in judged}, "answer": self.sentence}
            facts["weighed"] = [shown(folder) for folder in self.others()] or None
            facts["seen"] = seen.to_dict("records") if "power median (W)" in seen else []  # of each GPU; none of a CPU
            taken = self.own.drop_duplicates(["case", "group"]).groupby("case")["seconds"].median().dropna()
            facts["seconds"] = taken.to_dict()  # a dry run of another plan is scaled by them
        done = not self.stopped and not lock.borrowed(self.folder)
        if done:
            why = "no record was written: nothing was measured" if self.own.empty else ""
            left = len(list(self.folder.glob("records/*.state")))
            # A signal from outside ended their ranks: nothing was found to be wrong, unless it fell on one method.
            killed = self.own["reason"].astype(str).str.match(r"rank \d+: SIG(KILL|TERM|INT): (?!.*begun anew)")
            killed &= not self.redrawn
            if left:
                why = f"{left} of {wanted} records were cut off: --resume goes on with them"
            elif left := len(self.own.loc[killed, ["case", "group"]].drop_duplicates()):
                why = f"{left} of {wanted} records are of a killed rank: --resume measures them again"
            facts |= {"status": "failed" if why else "completed", "reason": why}
        manifest.note(self.folder, **facts)
        try:
            if done and not self.redrawn and not lost and not left:
                records.pack(self.folder)
        except RecordError as error:  # the records stand as files of their own
            warnings.warn(first_line(error), stacklevel=2)
        manifest.note(self.folder, files=manifest.digests(self.folder))
        lock.release(self.folder)
        self.after()
        return (known | facts)["verdict"]

    def _save_figures(self) -> list[dict[str, str]]:
        before = manifest.read(self.folder).get("figures", [])
        headlines = self.study.phases[self.params.phase].figures
        if not self._drawn and not before and not self.frame.empty:
            for name in headlines:
                try:
                    self.figure(name)
                except Exception as error:  # the run and its records are worth more than a figure
                    warnings.warn(f"no figure {name!r} is kept: {first_line(error)}", stacklevel=3)
        first = sorted(self._drawn, key=lambda name: name not in headlines)
        return figures.save(self.folder, {name: self._drawn[name] for name in first}) or before


def _why(record: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    made = record["context"]
    if any(re.match(r"rank \d+: (SIG\w+|Exit): ", row["reason"]) for row in record["rows"]):
        return "of a killed rank"
    if made["machine"] != now["machine"]:
        return "of another machine"
    sources = made["code"]["sources"]
    if not sources or sources != now["code"]["sources"]:
        return "of other code"
    return "" if made["code"].get("imported") == sources else "of a stale kernel"


def new_folder(out: Path, *words: str) -> Path:
    """<out>/<date>/<time>-<study>-<phase>-<hardware>, made; numbered when two runs start in the same second."""
    name = re.sub(r"[^\w.-]+", "-", "-".join(words))  # one component, whatever the words hold
    if file := next((place for place in (Path(out), *Path(out).parents) if place.is_file()), None):
        raise ParamsError(f"{shown(file)} is a file: name a folder for the runs, which is made where it is not there")
    base = Path(out) / f"{dt.datetime.now():%Y-%m-%d/%H%M%S}-{name}"
    for number in itertools.count(1):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
