"""The findings: the notebook that answers the question from all records that count. Nothing is measured here."""

from functools import cached_property, partial
from pathlib import Path
from typing import Literal, get_args

import pandas as pd
from IPython.display import HTML

from blockshock_lib import files, studies
from blockshock_lib.engine.study import Study
from blockshock_lib.errors import ParamsError, RecordError, allowed
from blockshock_lib.files import ROOT, shown
from blockshock_lib.notebook import workbook
from blockshock_lib.notebook.sources import Source, join, weigh
from blockshock_lib.report import answer, figures, frames, reruns, verdicts
from blockshock_lib.runs import code as this_code
from blockshock_lib.runs import lock, manifest
from blockshock_lib.runs.run import OUTPUTS, REFERENCE, new_folder, now

Which = Literal["all", "reference"]


class Findings:
    """A study's records weighed: the shipped ones and, if "all", the runs under `out`; `folder` takes the answer."""

    def __init__(self, folder: Path | None, which: Which, out: Path, study: Study):
        self.folder, self.which, self.out, self.study, self._drawn = folder, which, out, study, {}
        self._judged = partial(verdicts.judged, rules=study.hypotheses)

    @cached_property
    def sources(self) -> list[Source]:
        found = weigh((REFERENCE,) if self.which == "reference" else (REFERENCE, self.out), self.study)
        for kind in ("cuda", "cpu") if self.study.joined else ():
            ours = [one for one in found if one.frame is not None and not one.manifest.get("received")]
            join([one for one in ours if one.manifest["params"]["hardware"]["device"] == kind], self.study)
        return found

    @cached_property
    def frames(self) -> dict[str, pd.DataFrame]:
        """Setting -> the rows of all its runs that count; GPUs first, then emulated ones, then CPUs."""
        counting = [source for source in self.sources if source.counts]
        settings = dict.fromkeys(source.setting for source in counting)
        parts = {setting: [one.frame for one in counting if one.setting == setting] for setting in settings}
        found = {setting: pd.concat(some, ignore_index=True) for setting, some in parts.items()}
        order = ("gpu", "emulated", "cpu")
        rank = {setting: min(frames.kind(frame).map(order.index)) for setting, frame in found.items()}
        return dict(sorted(found.items(), key=lambda item: (rank[item[0]], -len(item[1]), item[0])))

    @property
    def setting(self) -> str:
        """The setting that the answer rests on: the first of `frames`. RecordError without any."""
        if not self.frames:
            first = next((name for name, phase in self.study.phases.items() if phase.timed), "a run")
            raise RecordError(f"no run with whole records to read: make {first}, or restore outputs/reference")
        return next(iter(self.frames))

    @property
    def main(self) -> pd.DataFrame:
        return self.frames[self.setting]

    @property
    def sentence(self) -> str:
        """The study's answer in words, of the setting that it rests on."""
        said = self.study.answers.get("") or partial(answer.speed, axes=self.study.axes)
        return answer.sentence(self.main, said)

    def answer(self) -> HTML:
        """How the notebook begins: `sentence`, a timed phase's first figure, which `conclude` keeps, checks, claims."""
        phase = next((one for one in self.study.phases.values() if one.timed and one.figures), None)
        for name in phase.figures[:1] if phase else ():
            self._drawn[name] = self.study.figures[name](self.main[self.main["phase"].eq(phase.name)])
        picture = "".join(figures.show(drawn).data for drawn in self._drawn.values())
        return HTML(answer.html(self.sentence, self.main, self.study.hypotheses, picture))

    def claims(self) -> pd.DataFrame:
        """A row a hypothesis with its rule, a column a setting of real GPUs with the verdict; no number, no CPU's."""
        claims = [(verdict.hypothesis, verdict.rule) for _, verdict, _ in self._judged(pd.DataFrame())]
        table = pd.DataFrame(claims, columns=["claim", "rule"])
        for setting, frame in self._real.items():
            table[setting] = [lacks or verdict.verdict for _, verdict, lacks in self._judged(frame)]
        return table.assign(**{"on a CPU, or emulated": "no claim"}).set_index("claim")

    def numbers(self) -> pd.DataFrame:
        """The answer in numbers: each ratio that a hypothesis asks for, by setting."""
        found = {setting: verdicts.numbers(frame, self.study.hypotheses) for setting, frame in self.frames.items()}
        return pd.concat(found, names=["setting"]).fillna("") if found else pd.DataFrame()

    def table(self, name: str) -> pd.DataFrame:
        return self.study.tables[name](self.main)

    def figure(self, name: str) -> HTML:
        return figures.show(self.study.figures[name](self.main))

    def runs_table(self) -> pd.DataFrame:
        return pd.DataFrame([source.row() for source in self.sources])

    @property
    def _real(self) -> dict[str, pd.DataFrame]:
        return {setting: frame for setting, frame in self.frames.items() if not frames.no_claim(frame)}

    def line(self) -> str:
        """The line of the manifest and the terminal: all checks, then the answer on each setting of real GPUs."""
        counts = [verdicts.check_verdict(frame)[:2] for frame in self.frames.values()]
        passed, failed = (sum(count) for count in zip(*counts, strict=True)) if counts else (0, 0)
        state = "NOTHING READ" if not counts else "FAIL" if failed else "PASS"
        parts = [f"findings: {state}", f"checks: {passed} passed, {failed} failed"]
        for setting, frame in self._real.items():
            judged = [f"{verdict.name} {lacks}" if lacks else verdict.line for _, verdict, lacks in self._judged(frame)]
            each = frame.groupby("phase")
            again = [f"{phase}: {said}" for phase, rows in each for said in reruns.sentences(rows, self.study.axes)]
            parts += [f"on {setting}", *judged, *again]
        others = "; ".join(setting for setting in self.frames if setting not in self._real)
        line = " · ".join(parts + [f"no claim about speed: {others}"] * bool(others))
        counting = [one for one in self.sources if one.counts]
        return manifest.placed(line, {name: one.folder for one in counting for name in set(one.frame["run"])})

    def conclude(self) -> str:
        """Writes what the answer rests on, the verdict and the end into the manifest; returns the verdict's line."""
        line, rests_on, counting = self.line(), [], [one for one in self.sources if one.counts]
        for one in counting:
            made = {"code": one.manifest.get("code", {}), "manifest": files.sha256(one.folder / manifest.FILE)}
            rests_on.append({"run": shown(one.folder), "setting": one.setting, "use": one.use} | made)
        titles = " and of ".join(dict.fromkeys(one.manifest["machine"]["title"] for one in counting))
        facts = {"verdict": line, "rests_on": rests_on, "machine": {"title": f"records of {titles}"}}
        facts |= {"left_out": {shown(one.folder): one.use for one in self.sources if not one.counts}}
        facts |= {"answer": self.sentence if self.frames else None, "figures": figures.save(self.folder, self._drawn)}
        facts["claims"] = {one.name: one.hypothesis for _, one, _ in self._judged(pd.DataFrame())}
        manifest.note(self.folder, **facts)
        return _ended(self.folder, line)


def _ended(folder: Path, verdict: str) -> str:
    """Notes the end of findings; their status is the command's to say, where one started this kernel."""
    reason = "" if verdict else "the notebook did not conclude"
    facts = dict(verdict=verdict or f"findings failed: {reason}", ended=now(), files=manifest.digests(folder))
    facts |= {} if lock.borrowed(folder) else {"status": "failed" if reason else "completed", "reason": reason}
    manifest.note(folder, **facts)
    lock.release(folder)
    return facts["verdict"]


def open_findings(runs: Which = "all", *, study: str = "", run_dir: str = "", out: Path = OUTPUTS) -> Findings:
    """Findings in `run_dir`, or in a new dated folder under `out`; nothing is read yet. `study`: by default the only
    one that has a notebook of findings. ParamsError: other `runs`, no such study.
    """
    if runs not in get_args(Which):
        raise ParamsError(f"runs: {runs!r}; allowed: {', '.join(map(repr, get_args(Which)))}")
    known = {name: found for name in studies.names() if (found := studies.load(name)).findings}
    if study not in known and (study or len(known) != 1):
        raise ParamsError(f"study: {study!r} has no notebook of findings; {allowed(study, known)}")
    weighed = known[study or next(iter(known))]
    pd.set_option("display.max_colwidth", None, "display.max_rows", None)
    folder = ROOT / run_dir if run_dir else new_folder(out, weighed.name, "findings")
    folder.mkdir(parents=True, exist_ok=True)
    lock.hold(folder)
    asked = dict(run=shown(folder), study=weighed.name, phase="findings", status="running", params={"runs": runs})
    manifest.note(folder, **asked, code=this_code.version(), machine={"title": "records"}, started=now())
    return Findings(folder, runs, Path(out), weighed)


def execute(runs: Which = "all", study: str = "", out: Path = OUTPUTS) -> workbook.Outcome:
    """Runs the study's notebook into a dated folder, with its page; never raises for what the notebook does."""
    folder = (found := open_findings(runs, study=study, out=out)).folder

    def conclude() -> tuple[str, bool]:
        concluded = manifest.read(folder).get("verdict", "")
        return _ended(folder, concluded), bool(concluded)

    given = {"runs": runs, "run_dir": shown(folder)}
    return workbook.finish(folder, "findings", ROOT / "notebooks" / found.study.findings, given, conclude)
