"""Which of the runs that there are count: every one is read, and weighed beside its like.

Nothing is measured here. Runs of different machines, as their cards tell them, or settings are never put together.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from blockshock_lib.engine.study import Study
from blockshock_lib.errors import RecordError, first_line
from blockshock_lib.files import shown
from blockshock_lib.report import frames
from blockshock_lib.runs import manifest, records, reference

COUNTS, LINKED = "counts", "counts, as a further run of what counts"


@dataclass(eq=False)
class Source:
    """A run; `use` is COUNTS, LINKED, or why it is left out. Only what counts has a `setting` and a `frame`."""

    folder: Path
    manifest: dict
    use: str = ""
    setting: str = ""
    frame: pd.DataFrame | None = None

    @property
    def counts(self) -> bool:
        return self.use in (COUNTS, LINKED)

    def row(self) -> dict[str, str]:
        facts = self.manifest
        made, card = facts.get("code") or {}, facts.get("machine") or {}
        libraries = card.get("libraries") or {}
        commit = str(made.get("commit") or "unknown")[:7] + ", uncommitted changes" * bool(made.get("dirty"))
        versions = [f"{name} {libraries[name]}" for name in ("torch", "cusparselt", "nccl") if libraries.get(name)]
        return {
            "run": shown(self.folder),
            "phase": facts.get("phase", ""),
            "machine": card.get("title", ""),
            "started": str(facts.get("started", ""))[:16].replace("T", " "),
            "code": commit if facts else "",
            "versions": ", ".join(versions),
            "use": self.use,
        }


def weigh(places: tuple[Path, ...], study: Study) -> list[Source]:
    """Every run of the study under `places`, by path. Of those of one setting and phase the one with the most cases
    counts, the newest of equals, but no <name>-before beside a <name>; so do the other runs of its reference, and those
    that hold cases which it lacks.
    """
    folders = {folder.resolve(): folder for place in places for folder in manifest.folders(place)}
    sources = [_source(folders[path], study) for path in sorted(folders)]
    sources = [one for one in sources if one.manifest.get("study", study.name) == study.name]
    whole, taken = [source for source in sources if not source.use], {}
    firsts = {reference.name_of(one.manifest): one.setting for one in whole if not one.manifest.get("again")}
    found = {one.folder.resolve(): one for one in whole}
    whole.sort(key=lambda one: (one.frame["case"].nunique(), one.manifest["started"]), reverse=True)
    for one in sorted(whole, key=lambda one: bool(one.manifest.get("again"))):
        if one.manifest.get("again"):  # another machine of the kind: the reference is of the first one's setting
            one.setting = firsts.get(reference.name_of(one.manifest), one.setting)
        best = taken.setdefault((one.setting, one.manifest["phase"]), one) if not one.manifest.get("received") else None
        more = best and reference.linked(best.manifest, one.manifest) and not set(best.frame.case) & set(one.frame.case)
        left_out = f"left out: {shown(best.folder)} counts" if best else "left out: a colleague's"
        one.use = one.use or (COUNTS if one is best or more else left_out)
        if one is best:
            for other in filter(None, map(found.get, map(Path.resolve, reference.others(one.folder, one.manifest)))):
                other.use, other.setting = LINKED, one.setting
    return [source for source in sources if source.manifest.get("phase") != "findings"]


def join(sources: list[Source], study: Study) -> None:
    """Gives one setting to what counts and to other runs whose cases no one, or their own reference, has already; cases
    of a portable phase stand by themselves, and a case that a run could not make is another's that could."""
    owners: dict[str, Source] = {}
    passed = [set(frames.checks(one.frame).query("outcome == 'passed'")["case"]) for one in sources]
    for one, own in zip(sources, passed, strict=True):
        one.frame = one.frame[~one.frame["case"].isin(set().union(*passed) - own)]
    for one in sorted(sources, key=lambda one: (one.counts, one.frame["case"].nunique()), reverse=True):
        known = {case: owners[case] for case in one.frame["case"].unique() if case in owners}
        name = reference.name_of(one.manifest)
        alike = lambda own: reference.name_of(own.manifest) == name or (one.counts and own.setting == one.setting)  # noqa: B023,E731
        strange = [case for case, own in known.items() if not alike(own)]
        if strange and not (study.phases[one.manifest["phase"]].portable and strange != [*one.frame["case"].unique()]):
            one.use = f"left out: cases of it count as {known[strange[0]].setting} measured them"
            continue
        one.frame = one.frame[~one.frame["case"].isin(strange)]
        one.use = one.use if one.counts else LINKED if len(known) > len(strange) else COUNTS
        owners |= dict.fromkeys(one.frame["case"].unique(), one) | known
    title = " and of ".join(dict.fromkeys(one.setting for one in sources if one.counts))
    for one in sources:
        one.setting = title


def _source(folder: Path, study: Study) -> Source:
    facts: dict = {}
    try:
        facts = manifest.read(folder)
        status = ": ".join(filter(None, (facts["status"], facts.get("reason"))))
        newer = folder.with_name(folder.name.removesuffix("-before"))
        faults = {
            f"{shown(newer)} has taken its place": newer != folder and newer.is_dir(),
            f"{facts['phase']} is no phase that this version knows": facts["phase"] not in study.phases,
            f"its status is {status}": facts["status"] != "completed",
            f"it only redraws {facts.get('redrawn_from')}": facts.get("redrawn_from"),
        }
        for fault in (fault for fault, here in faults.items() if here):
            raise RecordError(fault)
        return Source(folder, facts, "", _setting(facts, study), _records(folder, facts))
    except RecordError as error:
        return Source(folder, facts, f"left out: {first_line(error)}")
    except (AttributeError, KeyError, TypeError, ValueError):
        return Source(folder, facts, "left out: its manifest does not say what was asked")


def _setting(facts: dict, study: Study) -> str:
    asked, card, hardware = facts["params"], facts["machine"], facts["params"]["hardware"]
    machine = card["title"]  # a CPU's names it already
    if gpus := card.get("gpus"):
        watts = " and ".join(dict.fromkeys(f"{gpu['power_limit_w']:g}" for gpu in gpus if gpu.get("power_limit_w")))
        driver = f"driver {card['driver']}" if card.get("driver") else ""
        known = ", ".join(filter(None, (watts and f"{watts} W", driver, (card.get("cpu") or {}).get("model"))))
        machine += f" ({known})" if known else ""
    ranks = f"{hardware['world_size']} ranks" + " played by one GPU" * hardware["emulated"]
    own = {name: asked[name] for name in study.axes.settings if name in asked and name != "layers"}  # files, not a size
    own = {name: value["name"] if isinstance(value, dict) else value for name, value in own.items()}
    return ", ".join(filter(None, [machine, ranks, asked["dtype"], study.axes.setting(own)]))


def _records(folder: Path, facts: dict) -> pd.DataFrame:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a damaged record is said in the run's own line
        frame = records.load(folder)
    if damaged := frame.attrs["damaged"]:
        raise RecordError(f"{len(damaged)} records are damaged, {damaged[0]} first")
    there, wanted = manifest.digests(folder), facts.get("files") or {}
    for name in sorted(name for name in wanted if name.startswith("records") and wanted[name] != there.get(name)):
        raise RecordError(f"{name} is {'not as the run left it' if name in there else 'missing'}")
    if frame.empty:
        raise RecordError("it holds no records")
    frame.attrs = {}
    return frame
