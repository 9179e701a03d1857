"""The findings: every record that there is, read and weighed, and the notebook that answers the question from them.

Nothing is measured here. Runs of different machines, as far as their cards tell them apart, or of different settings
are never put together.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import pandas as pd

from blockshock_lib import custodian, machine, manifest, ownership, records, workbook
from blockshock_lib.engine.phases import PHASES
from blockshock_lib.errors import ParamsError, RecordError, first_line
from blockshock_lib.manifest import ROOT, shown
from blockshock_lib.predict import scaling
from blockshock_lib.predict.earlier import REFERENCE
from blockshock_lib.report import cells
from blockshock_lib.report.findings import tables
from blockshock_lib.run import OUTPUTS, new_folder, now

NOTEBOOK = "findings.ipynb"
Which = Literal["all", "reference"]
COUNTS, POOLED = "counts", "counts, put together with the newest"


@dataclass(frozen=True)
class Source:
    """A run's folder, its manifest and, of its records, the frame; `use` is COUNTS, POOLED, or why it is left out."""

    folder: Path
    manifest: dict
    use: str
    frame: pd.DataFrame | None = None

    @property
    def setting(self) -> str:
        """Machine as far as its card tells it, ranks, dtype, mask and input. What differs in one of them is never put
        together; two machines with the same card cannot be told apart.
        """
        asked, card = self.manifest["params"], self.manifest["machine"]
        hardware = asked["hardware"]
        ranks = f"{hardware['world_size']} ranks" + " played by one GPU" * hardware["emulated"]
        mask, workload = (asked[name]["name"] for name in ("mask", "workload"))
        return f"{_machine(card)}, {ranks}, {asked['dtype']}, {mask} mask, {workload} input"

    @property
    def counts(self) -> bool:
        return self.use in (COUNTS, POOLED)


def _machine(card: dict) -> str:
    # A CPU's title names it already.
    gpus = card.get("gpus") or []
    if not gpus:
        return card["title"]
    watts = dict.fromkeys(gpu["power_limit_w"] for gpu in gpus if gpu.get("power_limit_w"))
    limits = f"{' and '.join(f'{limit:g}' for limit in watts)} W" if watts else ""
    driver = f"driver {card['driver']}" if card.get("driver") else ""
    known = ", ".join(filter(None, (limits, driver, (card.get("cpu") or {}).get("model"))))
    return f"{card['title']} ({known})" if known else card["title"]


class Findings:
    """All records weighed, and the folder that the answer goes to.

    Attributes:
        folder: findings.ipynb, its page and manifest.json are written there and nowhere else.
        which: "all": the runs under `out` and the shipped references; "reference": the latter alone.
    """

    def __init__(self, folder: Path, which: Which, out: Path):
        self.folder, self.which, self.out = folder, which, out

    @cached_property
    def sources(self) -> list[Source]:
        """Every run, by path, and whether it counts."""
        places = (REFERENCE,) if self.which == "reference" else (REFERENCE, self.out)
        return weigh(places)

    @cached_property
    def frames(self) -> dict[str, pd.DataFrame]:
        """Setting -> the rows of all its runs that count; GPUs first, then emulated ones, then CPUs."""
        found: dict[str, list[pd.DataFrame]] = {}
        for source in self.sources:
            if source.counts:
                found.setdefault(source.setting, []).append(source.frame)
        frames = {setting: pd.concat(parts, ignore_index=True) for setting, parts in found.items()}
        return dict(sorted(frames.items(), key=lambda item: (_rank(item[1]), -len(item[1]), item[0])))

    @property
    def setting(self) -> str:
        """The setting that the answer rests on: the first of `frames`. RecordError without any."""
        for setting in self.frames:
            return setting
        raise RecordError("no run with whole records to read: make phase1, or restore outputs/reference")

    @property
    def main(self) -> pd.DataFrame:
        """The rows of `setting`."""
        return self.frames[self.setting]

    def plan(self) -> scaling.Plan:
        """The model fitted to `main` and asked about larger machines."""
        title = next(s.manifest["machine"]["title"] for s in self.sources if s.counts and s.setting == self.setting)
        return scaling.plan(self.main, title)

    def runs_table(self) -> pd.DataFrame:
        """A row a run: folder, phase, machine, when, code, versions, and whether it counts."""
        return pd.DataFrame([_row(source) for source in self.sources])

    def conclude(self) -> str:
        """Writes what the answer rests on, the verdict and the end into the manifest; returns the verdict's line."""
        line = tables.one_line(self.frames)
        rests_on = [
            {
                "run": shown(source.folder),
                "setting": source.setting,
                "use": source.use,
                "code": source.manifest.get("code", {}),
                "manifest": hashlib.sha256((source.folder / manifest.FILE).read_bytes()).hexdigest(),
            }
            for source in self.sources
            if source.counts
        ]
        titles = dict.fromkeys(source.manifest["machine"]["title"] for source in self.sources if source.counts)
        facts = {"verdict": line, "rests_on": rests_on, "machine": {"title": f"records of {' and of '.join(titles)}"}}
        facts |= {"left_out": {shown(s.folder): s.use for s in self.sources if not s.counts}}
        manifest.note(self.folder, **facts, ended=now(), files=manifest.digests(self.folder))
        if not ownership.borrowed(self.folder):
            manifest.note(self.folder, status="completed", reason="")
            ownership.release(self.folder)
        return line


def open_findings(runs: Which = "all", *, run_dir: str = "", out: Path = OUTPUTS) -> Findings:
    """New findings in `run_dir`, or in a new dated folder under `out`; nothing is read before it is asked for.

    Raises: ParamsError: `runs` is neither "all" nor "reference".
    """
    if runs not in get_args(Which):
        raise ParamsError(f"runs: {runs!r}; allowed: {', '.join(map(repr, get_args(Which)))}")
    pd.set_option("display.max_colwidth", None, "display.max_rows", None)
    folder = ROOT / run_dir if run_dir else new_folder(out, "findings")
    folder.mkdir(parents=True, exist_ok=True)
    ownership.hold(folder)
    manifest.note(
        folder,
        run=shown(folder),
        phase="findings",
        status="running",
        params={"runs": runs},
        code=machine.code_version(),
        machine={"title": "records"},
        started=now(),
    )
    return Findings(folder, runs, Path(out))


def execute(runs: Which = "all", out: Path = OUTPUTS) -> workbook.Outcome:
    """Runs the notebook into a dated folder, with its page; never raises for what the notebook does.

    Raises: ParamsError as `open_findings`.
    """
    found = open_findings(runs, out=out)
    target = found.folder / NOTEBOOK
    given = {"runs": runs, "run_dir": shown(found.folder)}
    status, reason = workbook.run_notebook(found.folder, NOTEBOOK, target, given)
    verdict = manifest.read(found.folder).get("verdict", "")
    if status == "completed" and not verdict:
        status, reason = "failed", "the notebook did not conclude"
    if status != "completed":
        custodian.tidy(found.folder)
        verdict = f"findings {status}: {reason}"
        manifest.note(found.folder, status=status, reason=reason, verdict=verdict, ended=now())
    html = workbook.make_page(target) if target.exists() else None
    facts = {"status": status, "reason": reason, "ended": now(), "files": manifest.digests(found.folder)}
    manifest.note(found.folder, **facts)
    ownership.release(found.folder)
    return workbook.Outcome(status, verdict, target, html, status == "completed")


def weigh(places: tuple[Path, ...]) -> list[Source]:
    """Every run under `places`, by path, and whether it counts.

    Of the runs of one setting and phase the one with the most cases counts, the newest of those with equally many.
    Others count with it only if their cases, code and libraries are the same.
    """
    seen: dict[Path, Source] = {}
    for place in places:
        for source in _found(place):
            seen.setdefault(source.folder.resolve(), source)
    done: dict[Path, Source] = {folder: source for folder, source in seen.items() if source.use}
    rivals: dict[tuple[str, str], list[Source]] = {}
    for source in seen.values():
        if source.use:
            continue
        read = _read(source)
        if read.use:
            done[source.folder.resolve()] = read
        else:
            rivals.setdefault((read.setting, read.manifest["phase"]), []).append(read)
    for same in rivals.values():
        same.sort(key=lambda one: (one.frame["case"].nunique(), one.manifest["started"]), reverse=True)
        best = same[0]
        for one in same:
            done[one.folder.resolve()] = Source(one.folder, one.manifest, _use(one, best), one.frame)
    return [done[folder] for folder in sorted(done)]


def _found(place: Path) -> Iterator[Source]:
    """Runs that measured, with an empty `use`; those that cannot count say why. Findings are no runs."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = list(manifest.every(place))
    for warning in told:
        folder = place / str(warning.message).split(" holds no readable ")[0]
        yield Source(ROOT / folder, {}, f"left out: {first_line(str(warning.message))}")
    for folder, facts in found:
        if facts["phase"] == "findings":
            continue
        yield Source(folder, facts, _fault(facts))


def _fault(facts: dict) -> str:
    if facts["phase"] not in PHASES:
        return f"left out: {facts['phase']} is no phase that this version knows"
    if facts["status"] != "completed":
        return "left out: its status is " + ": ".join(filter(None, (facts["status"], facts.get("reason"))))
    if facts.get("redrawn_from"):
        return f"left out: it only redraws {facts['redrawn_from']}"
    if facts.get("received"):
        return "left out: a colleague's, measured elsewhere"
    try:
        Source(Path(), facts, "").setting  # noqa: B018
    except (KeyError, TypeError):
        return "left out: its manifest does not say what was asked"
    return ""


def _read(source: Source) -> Source:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a damaged record is said in the run's own line
        try:
            frame = records.load(source.folder)
        except RecordError as error:
            return Source(source.folder, source.manifest, f"left out: {first_line(error)}")
    if damaged := frame.attrs["damaged"]:
        return Source(
            source.folder, source.manifest, f"left out: {len(damaged)} records are damaged, {damaged[0]} first"
        )
    there, wanted = manifest.digests(source.folder), source.manifest.get("files") or {}
    for name in sorted(name for name in wanted if name.startswith("records/") and wanted[name] != there.get(name)):
        what = "is not as the run left it" if name in there else "is missing"
        return Source(source.folder, source.manifest, f"left out: {name} {what}")
    if frame.empty:
        return Source(source.folder, source.manifest, "left out: it holds no records")
    frame.attrs = {}
    return Source(source.folder, source.manifest, "", frame)


def _use(one: Source, best: Source) -> str:
    if one is best:
        return COUNTS
    mine, cases = set(one.frame["case"]), set(best.frame["case"])
    if len(mine) < len(cases):
        return f"left out: {len(mine)} cases, and {shown(best.folder)} has {len(cases)}"
    for what, same in (
        ("cases", mine == cases),
        ("code", _code(one) == _code(best)),
        ("libraries", one.manifest["machine"].get("libraries") == best.manifest["machine"].get("libraries")),
    ):
        if not same:
            return f"left out: other {what} than {shown(best.folder)}, which is newer"
    return POOLED


def _code(source: Source) -> str:
    return str((source.manifest.get("code") or {}).get("sources", ""))


def _rank(frame: pd.DataFrame) -> int:
    return min(cells.kind(frame).map({"gpu": 0, "emulated": 1, "cpu": 2}))


def _row(source: Source) -> dict[str, str]:
    facts = source.manifest
    code, libraries = facts.get("code") or {}, (facts.get("machine") or {}).get("libraries") or {}
    versions = ", ".join(f"{name} {libraries[name]}" for name in ("torch", "cusparselt", "nccl") if libraries.get(name))
    commit = str(code.get("commit") or "unknown")[:7]
    return {
        "run": shown(source.folder),
        "phase": facts.get("phase", ""),
        "machine": (facts.get("machine") or {}).get("title", ""),
        "started": str(facts.get("started", ""))[:16].replace("T", " "),
        "code": (f"{commit}, uncommitted changes" if code.get("dirty") else commit) if facts else "",
        "versions": versions,
        "use": source.use,
    }
