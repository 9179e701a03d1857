"""Two runs compared, case by case: did a change of code or libraries make anything wrong, slower or larger?"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from blockshock_lib.engine.study import Study
from blockshock_lib.errors import CompareError, RecordError
from blockshock_lib.files import ROOT, shown
from blockshock_lib.report import changes, frames, interval, reruns
from blockshock_lib.runs import manifest, record, records, reference

# No case is measured otherwise for these.
_SWEPT = {"study", "phase", "methods", "layers", "sweep", "limits", "profile"}


@dataclass(frozen=True)
class Side:
    name: str
    study: Study
    about: Mapping[str, Any]  # its manifest
    frame: pd.DataFrame
    codes: tuple[Mapping[str, Any], ...]  # of each record the code that made it
    machines: frozenset[str]

    @cached_property
    def lost(self) -> int:
        """How many of the records that the run was to have are damaged or missing."""
        counts = self.about.get("cases"), self.about["params"].get("timing", {}).get("groups")
        return max(0, counts[0] * counts[1] - len(self.codes)) if all(type(one) is int for one in counts) else 0

    @cached_property
    def facts(self) -> dict[str, str]:
        """What may differ between the runs and is then told: code, libraries, driver, how it was measured."""
        card, columns = self.about["machine"], self.study.axes.case_columns
        commits = sorted({f"{str(code.get('commit'))[:7]}/{code.get('sources')}" for code in self.codes})
        facts = {"code": ", ".join(commits)}
        facts |= {name: version or "none" for name, version in card.get("libraries", {}).items()}
        facts["driver"] = card.get("driver") or "none"
        for key, value in self.about["params"].items():
            if key not in _SWEPT and key not in columns and key.removesuffix("s") not in columns:
                inner = value.items() if isinstance(value, Mapping) else ()
                facts |= {f"{key}.{name}": str(one) for name, one in inner} or {key: str(value)}
        return facts

    @cached_property
    def hardware(self) -> dict[str, str]:
        """What of the machine card must be equal, in words; libraries and driver may differ."""
        card = self.about["machine"]
        gpus = ("{name} ({memory_bytes} B, limit {power_limit_w} W)".format_map(gpu) for gpu in card["gpus"])
        words = {"ranks on a": "+".join(sorted(set(frames.kind(self.frame).unique()))) or "none"}
        for name, found in (("GPUs:", gpus), ("links:", (link["kind"] for link in card["links"]))):
            words[name] = ", ".join(f"{count}x {one}" for one, count in sorted(Counter(found).items())) or "none"
        return words | {"CPU:": "{model}, {cores} cores".format_map(card["cpu"])}

    @property
    def dirty(self) -> str:
        """Why nobody can name the code that made its records; "" where one can."""
        noted = self.about.get("code")
        codes = [*self.codes, noted] if isinstance(noted, Mapping) else self.codes
        made = {(code.get("commit"), code.get("sources")) for code in self.codes}
        stale = any("imported" in code and code["imported"] != code.get("sources") for code in codes)
        why = ["had uncommitted changes"] if any(code.get("dirty") for code in codes) else []
        why += ["ran code that was edited after its import"] if stale else []
        why += [f"holds records made by {len(made)} versions of the code"] if len(made) > 1 else []
        return f"{self.name} {' and '.join(why)}" if why else ""


class Comparison:
    """What changed from run `a` to run `b`: `rows` as numbers (see report.changes.compare), `table` to be read, its
    `regressions`, and `notes`: other libraries or parameters, what only one run has, no claim.
    """

    def __init__(self, a: Side, b: Side, found: changes.Compared, notes: tuple[str, ...]):
        self.several = a.frame["run"].nunique() > 1
        self.a, self.b, self.found, self.notes = a.name, b.name, found, notes
        self.rows, self.axes = found.rows, b.study.axes
        self.table = changes.readable(found.rows, self.axes)
        self.regressions = self.table[found.rows["outcome"].eq(changes.REGRESSION)]

    @property
    def ok(self) -> bool:
        return self.regressions.empty

    def caption(self) -> str:
        """How the ratios are to be read, and at which level the intervals hold."""
        count, each = self.found.intervals, self.found.each
        level = (
            f"The {count} intervals of times hold at {interval.LEVEL:.0%} together (Bonferroni: {100 * each:.4f}% "
            "each): an unchanged library raises an alarm in at most 1 of 100 comparisons. "
        )
        shared = "What all groups of a run share (another day, its heat, its neighbours) is in no interval. "
        level += "They predict a further run of a's reference. " if self.several else shared
        memory = "Memory is counted, not sampled: more than 0.1% is a regression."
        return f"Ratio: b / a, above 1 where b takes more. {level if count else ''}{memory}"

    def line(self) -> str:
        """One line: what was found, the worst of it by name, and what is not compared."""
        count, bad = Counter(self.rows["outcome"]), len(self.regressions)
        found = f"{bad or 'no'} regression{'s' * (bad > 1)} in {len(self.rows)} comparisons"
        found += f", first {changes.sentence(self.rows.iloc[0], self.axes)}" if bad else ""
        parts = [f"compare {self.a} with {self.b}: {found}"]
        parts += [f"{count[name]} {name}" for name in (changes.IMPROVED, changes.UNDECIDED) if count[name]]
        if lone := count[changes.NO_INTERVAL]:
            parts.append(f"{lone} times without an interval (one group), so without a claim")
        return " · ".join([*parts, *self.notes])

    def text(self) -> str:
        told = self.rows["outcome"].isin([changes.REGRESSION, changes.IMPROVED])
        rest = Counter(self.rows["outcome"][~told])
        kinds = [f"{count} {name}" for name, count in rest.items() if name != changes.UNDECIDED]
        more = [f"not listed: {', '.join(kinds)}"] if kinds else []
        shown = [self.table[told].to_string(index=False), self.caption()] if told.any() else []
        return "\n".join([*shown, *self.line().split(" · "), *more])


def compare(a: object, b: object, *, allow: Collection[str] = ()) -> Comparison:
    """Compares run `b` with run `a`, the older one: folders, or open runs (`run.Run`).
    Where `a` has further runs (see `runs.reference`) all of them but `b` stand for `a`.

    `allow`: what may differ all the same: "hardware" (machine, or emulated ranks), "dtype" (a case finds its like in
    another) and "dirty" (uncommitted changes, code edited after its import, or records of one run by different code).

    Raises:
        CompareError: no such run, another study, a difference that is not allowed, or no case in common.
        RecordError: a folder holds no readable manifest.
    """
    allow = (allow,) if isinstance(allow, str) else tuple(allow)
    sides = one, other = _read(a), _read(b)
    more = [_read(folder) for folder in reference.others(_folder(a), one.about)]
    more = [side for side in more if side.about["run"] != other.about["run"]]
    names, axes = f"a = {one.name} and b = {other.name}", one.study.axes
    if one.study is not other.study:
        raise CompareError(f"{names} share no case: they are of {one.study.name} and {other.study.name}")
    known = [found.set_index("case", drop=False) for found in changes.cases([side.frame for side in sides], axes)]
    phases = [set(found["phase"]) for found in known]
    if not phases[0] & phases[1]:
        raise CompareError(f"{names} share no case: they are of {' and '.join(sorted(phases[0] | phases[1]))}")
    alike = changes.pairs(*known, changes.LOOSE["dtype"])
    dtypes = Counter((known[0].loc[mine, "dtype"], known[1].loc[theirs, "dtype"]) for theirs, mine in alike.items())
    parts = ((part, text, other.hardware[part]) for part, text in one.hardware.items())
    mixed = [name for name, side in zip("ab", sides, strict=True) if len(side.machines) > 1]
    faults = {
        "hardware": [f"{part} a {x}, b {y}" for part, x, y in parts if x != y]
        + [f"the records of {name} come from several machines" for name in mixed],
        "dtype": [f"{count} cases are {x} in a and {y} in b" for (x, y), count in dtypes.items() if x != y],
        "dirty": [side.dirty for side in (*sides, *more) if side.dirty],
    }
    if unknown := set(allow) - set(faults):
        raise CompareError(f"allow: {', '.join(sorted(map(repr, unknown)))}; allowed: {', '.join(faults)}")
    if refused := {kind: "; ".join(found) for kind, found in faults.items() if found and kind not in allow}:
        why = "; ".join(f"{kind}: {text}" for kind, text in refused.items())
        raise CompareError(f"{names} are not compared unless told (--allow {','.join(refused)}, ALLOW= of make): {why}")
    loose = [name for kind in allow for name in changes.LOOSE.get(kind, ())]
    if not changes.pairs(*known, loose):
        raise CompareError(f"{names} share no case")
    if more:
        one = dataclasses.replace(one, frame=pd.concat([side.frame for side in (one, *more)], ignore_index=True))
    found = changes.compare(one.frame, other.frame, axes, loose=loose, b_short=bool(other.lost))
    allowed = [f"allowed all the same, {kind}: {'; '.join(faults[kind])}" for kind in allow if faults[kind]]
    return Comparison(one, other, found, (*allowed, *_notes(one, other, found)))


def _read(run: object) -> Side:
    folder = _folder(run)
    about = manifest.read(folder)
    whole, _ = records.scan(folder)
    if not whole:
        raise CompareError(f"{shown(folder)} holds no whole record to compare")
    codes, machines = zip(*((one["context"]["code"], one["context"]["machine"]) for one in whole), strict=True)
    study, frame = record.study_of(about["study"]), record.frame_of(whole)
    side = Side(shown(folder), study, about, frame, codes, frozenset(machines))
    try:  # a manifest may come from a stranger
        _ = side.lost, side.facts, side.hardware
    except (AttributeError, KeyError, TypeError):
        raise RecordError(f"{side.name} holds no readable {manifest.FILE}: params or machine") from None
    return side


def _folder(run: object) -> Path:
    if hasattr(run, "source"):
        return Path(run.source)
    places = [Path(str(run)), ROOT / str(run)]
    if found := [place for place in places if (place / manifest.FILE).is_file()]:
        return found[0]
    raise CompareError(f"{run} is no folder of a run{manifest.near(places[0])}")


def _notes(a: Side, b: Side, found: changes.Compared) -> list[str]:
    axes, sides = a.study.axes, {"a": a, "b": b}
    claims = {"cpu": "a CPU: no claim about GPUs", "emulated": frames.NO_CLAIM["emulated"]}
    kinds = {*frames.kind(a.frame).unique(), *frames.kind(b.frame).unique()}
    notes = [text for kind, text in claims.items() if kind in kinds]
    inside, asked = reruns.foretold(a.frame, b.frame, axes)
    runs = a.frame["run"].nunique()
    words = f"{runs} runs" if runs > 1 else "the single run"
    notes += [f"{words} of a foretold {inside} of b's {asked} speeds over {axes.short(axes.over)}"] if asked else []
    notes += [f"{name}: {side.lost} records damaged or missing" for name, side in sides.items() if side.lost]
    ended = ((name, side.about["status"]) for name, side in sides.items())
    notes += [f"{name} is a run that ended {status}" for name, status in ended if status != "completed"]
    outside = [n for n, side in sides.items() if any(code.get("dirty", False) is None for code in side.codes)]
    notes += [f"{' and '.join(outside)} ran outside git: uncommitted changes cannot be told"] if outside else []
    for run, part in found.only.groupby("run"):
        methods = ", ".join(axes.label(name) for name in axes.ordered(part["method"]))
        notes.append(f"only in {run}: {len(part)} cells ({methods})")
    facts = {name: (a.facts.get(name, "none"), b.facts.get(name, "none")) for name in a.facts | b.facts}
    return notes + [f"{name} {one} → {other}" for name, (one, other) in facts.items() if one != other]
