"""Two runs compared, case by case: did a change of code or libraries make anything wrong, slower or larger?"""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from blockshock_lib import manifest, records
from blockshock_lib.errors import CompareError, RecordError
from blockshock_lib.manifest import ROOT, shown
from blockshock_lib.report import cells, figures, labels
from blockshock_lib.report.compare import changes, plots, tables

ALLOW = ("hardware", "dtype", "dirty")
SHOWN = 20  # rows of the table that a page shows unfolded beside the regressions


@dataclass(frozen=True)
class Side:
    """One of the two runs: its name, manifest, records, and for each record the code and machine that made it."""

    name: str
    about: Mapping[str, Any]
    frame: pd.DataFrame
    codes: tuple[Mapping[str, Any], ...]
    machines: frozenset[str]

    @property
    def card(self) -> Mapping[str, Any]:
        return self.about["machine"]

    @property
    def lost(self) -> int:
        """How many of the records that the run was to have are damaged or missing."""
        counts = self.about.get("cases"), self.about["params"].get("timing", {}).get("groups")
        wanted = counts[0] * counts[1] if all(type(count) is int for count in counts) else 0
        return max(0, wanted - len(self.codes))


class Comparison:
    """What changed from run `a` to run `b`.

    Attributes:
        a, b: the runs' names.
        found: every row as numbers; see report.compare.changes.Compared.
        notes: what else a reader must know: other libraries, other parameters, what only one run has, no claim.
    """

    def __init__(self, a: Side, b: Side, found: changes.Compared, notes: tuple[str, ...]):
        self.a, self.b, self.found, self.notes = a.name, b.name, found, notes

    @property
    def rows(self) -> pd.DataFrame:
        return self.found.rows

    @cached_property
    def table(self) -> pd.DataFrame:
        """Every row to be read: regressions first, then the largest ratio b / a."""
        return tables.readable(self.rows)

    @property
    def regressions(self) -> pd.DataFrame:
        """The rows of `table` that are regressions."""
        return self.table[self.rows["outcome"].eq(changes.REGRESSION)]

    @property
    def ok(self) -> bool:
        """Whether there is no regression."""
        return self.regressions.empty

    def caption(self) -> str:
        """How the ratios are to be read, and at which level the intervals hold."""
        count, each = self.found.intervals, self.found.each
        text = "Ratio: b / a, above 1 where b takes more. "
        if count:
            level = f"{100 * each:.{2 if each < 0.999 else 4}f}"
            text += (
                f"The {count} intervals of times hold at {changes.LEVEL:.0%} together (Bonferroni: {level}% each): "
                "an unchanged library raises an alarm in at most 1 of 100 comparisons. What all groups of a run share "
                "(another day, its heat, its neighbours) is in no interval. "
            )
        return text + "Memory is counted, not sampled: more than 0.1% is a regression."

    def figure(self) -> Figure:
        """The ratios of times with their intervals, a panel a method; cells with a regression marked."""
        return plots.ratios(self.rows, self.a, self.b, self.caption())

    def line(self) -> str:
        """One line: what was found, the worst of it by name, and what is not compared."""
        count = Counter(self.rows["outcome"])
        bad, total = count[changes.REGRESSION], len(self.rows)
        parts = [f"{bad} regression{'s' * (bad != 1)} in {total} comparisons" if bad else f"no regression in {total}"]
        if bad:
            parts[0] += f", first {tables.told(self.rows.iloc[0])}"
        parts += [f"{count[name]} {name}" for name in (changes.IMPROVED, changes.UNDECIDED) if count[name]]
        if count[changes.NO_INTERVAL]:
            parts.append(f"{count[changes.NO_INTERVAL]} times without an interval (one group), so without a claim")
        return " · ".join([f"compare {self.a} with {self.b}: {parts[0]}", *parts[1:], *self.notes])

    def text(self, most: int = SHOWN) -> str:
        """For a terminal: the regressions and the first `most` other rows, the caption and the line."""
        bad = len(self.regressions)
        rest = len(self.table) - bad - most
        more = f"\n... and {rest} more rows" if rest > 0 else ""
        return f"{self.table.head(bad + most).to_string(index=False)}{more}\n{self.caption()}\n{self.line()}"

    def _repr_html_(self) -> str:
        first = self.rows["outcome"].isin([changes.REGRESSION, changes.IMPROVED])
        rest = self.table[~first]
        short, long = pd.concat([self.table[first], rest.head(SHOWN)]), rest.iloc[SHOWN:]
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        head = f"<p><b>{html.escape(self.line().split(' · ')[0])}</b></p><ul>{notes}</ul>"
        fold = f"<details><summary>{len(long)} more rows</summary>{tables.page(long)}</details>" if len(long) else ""
        image = figures.show(self.figure()).data
        return f"{head}{tables.page(short)}{fold}<p>{html.escape(self.caption())}</p>{image}"


def compare(a: object, b: object, *, allow: Collection[str] = ()) -> Comparison:
    """Compares run `b` with run `a`, the older one; nothing is measured.

    Args:
        a, b: folders, names of folders below outputs/, or open runs (`run.Run`).
        allow: what may differ all the same: "hardware" (another machine, or emulated ranks), "dtype" (a case is then
            compared with its like in another dtype) and "dirty" (uncommitted changes, code edited after its import, or
            records of one run made by different code).

    Raises:
        CompareError: no such run, a difference that is not allowed, or no case in common.
        RecordError: a folder holds no readable manifest.
    """
    allow = (allow,) if isinstance(allow, str) else tuple(allow)
    if unknown := set(allow) - set(ALLOW):
        raise CompareError(f"allow: {', '.join(sorted(map(repr, unknown)))}; allowed: {', '.join(ALLOW)}")
    sides = _read(a), _read(b)
    loose = [name for kind in allow for name in changes.LOOSE.get(kind, ())]
    known = [changes.cases(side.frame) for side in sides]
    faults = {"hardware": _hardware(*sides), "dtype": _dtypes(*known), "dirty": [*map(_dirty, sides)]}
    refused = {kind: "; ".join(filter(None, found)) for kind, found in faults.items() if kind not in allow}
    names = f"a = {sides[0].name} and b = {sides[1].name}"
    if any(refused.values()):
        said = "; ".join(f"{kind}: {text}" for kind, text in refused.items() if text)
        kinds = [kind for kind, text in refused.items() if text]
        raise CompareError(f"{names} are not compared unless told (allow {','.join(kinds)}): {said}")
    if not changes.pairs(*known, loose):
        raise CompareError(f"{names} share no case: {_what(known[0])} in a, {_what(known[1])} in b")
    found = changes.compare(sides[0].frame, sides[1].frame, loose=loose, b_short=bool(sides[1].lost))
    told = [f"allowed all the same, {kind}: {'; '.join(filter(None, faults[kind]))}" for kind in allow]
    return Comparison(*sides, found, tuple([*(note for note in told if note[-2:] != ": "), *_notes(*sides, found)]))


def _read(run: object) -> Side:
    folder = _folder(run)
    about = manifest.read(folder)
    if about.get("redrawn_from") and not list(folder.glob("records/*.json")):
        folder = ROOT / about["redrawn_from"]
        about = manifest.read(folder)
    if not _readable(about):
        raise RecordError(f"{shown(folder)} holds no readable {manifest.FILE}: its params or machine are not in order")
    frame = records.load(folder)
    if frame.empty:
        raise CompareError(f"{shown(folder)} holds no whole record to compare")
    damaged = set(frame.attrs["damaged"])
    paths = [path for path in sorted(folder.glob("records/*.json")) if path.name not in damaged]
    made = [json.loads(path.read_text())["context"] for path in paths]
    codes = tuple(one["code"] if isinstance(one["code"], Mapping) else {} for one in made)
    return Side(shown(folder), about, frame, codes, frozenset(str(one["machine"]) for one in made))


def _readable(about: Mapping[str, Any]) -> bool:
    """Whether what is used of a manifest has the right kind: it may come from a stranger."""
    inputs, card = about["params"], about["machine"]
    if not isinstance(inputs, Mapping) or not isinstance(inputs.get("timing", {}), Mapping):
        return False
    if not isinstance(card, Mapping) or not all(isinstance(card.get(key, {}), Mapping) for key in ("cpu", "libraries")):
        return False
    lists = [card.get("gpus", []), card.get("links", [])]
    return all(isinstance(part, list) and all(isinstance(one, Mapping) for one in part) for part in lists)


def _folder(run: object) -> Path:
    """The folder of a run: one that is open, a path (relative to here or to the project), or its name in outputs/."""
    from blockshock_lib.run import OUTPUTS

    if hasattr(run, "source"):
        return Path(run.source)
    places = [Path(str(run)), ROOT / str(run), OUTPUTS / str(run)]
    for place in places:
        if (place / manifest.FILE).is_file():
            return place
    named = [path.parent for path in OUTPUTS.glob(f"**/{manifest.FILE}") if path.parent.name == Path(str(run)).name]
    if len(named) == 1:
        return named[0]
    several = f"; it is the name of {', '.join(map(shown, named))}" if named else ""
    raise CompareError(f"{run} is no folder of a run and not the name of one below {shown(OUTPUTS)}{several}")


def _hardware(a: Side, b: Side) -> list[str]:
    cards = [_hardware_facts(side.card) for side in (a, b)]
    found = [f"{name} a {cards[0][name]}, b {cards[1][name]}" for name in cards[0] if cards[0][name] != cards[1][name]]
    modes = [set(cells.kind(side.frame)) for side in (a, b)]
    if modes[0] != modes[1]:
        found.append(f"ranks on a {'+'.join(sorted(modes[0]))}, on b {'+'.join(sorted(modes[1]))}")
    mixed = [
        f"the records of {n} come from several machines"
        for n, s in zip("ab", (a, b), strict=True)
        if len(s.machines) > 1
    ]
    return found + mixed


def _hardware_facts(card: Mapping[str, Any]) -> dict[str, str]:
    """What of the machine card must be equal, in words; libraries and driver may differ."""
    gpus = Counter(
        f"{gpu.get('name')} ({gpu.get('memory_bytes')} B, limit {gpu.get('power_limit_w')} W)"
        for gpu in card.get("gpus", [])
    )
    links = Counter(str(link.get("kind")) for link in card.get("links", []))
    cpu = card.get("cpu", {})
    return {
        "GPUs:": ", ".join(f"{count}x {name}" for name, count in sorted(gpus.items())) or "none",
        "links:": ", ".join(f"{count}x {name}" for name, count in sorted(links.items())) or "none",
        "CPU:": f"{cpu.get('model', 'unknown')}, {cpu.get('cores', '?')} cores",
    }


def _dtypes(a: pd.DataFrame, b: pd.DataFrame) -> list[str]:
    """Cases that would be alike in another dtype only."""
    found = changes.pairs(a, b, changes.LOOSE["dtype"])
    other = Counter((one["dtype"], two["dtype"]) for one, two in found if one["dtype"] != two["dtype"])
    return [f"{count} cases are {one} in a and {two} in b" for (one, two), count in other.items()]


def _dirty(side: Side) -> str:
    codes = [*side.codes, side.about["code"]] if isinstance(side.about.get("code"), Mapping) else side.codes
    why = []
    if any(code.get("dirty") for code in codes):
        why.append("had uncommitted changes")
    if any("imported" in code and code["imported"] != code.get("sources") for code in codes):
        why.append("ran code that was edited after its import")
    made = {(code.get("commit"), code.get("sources")) for code in side.codes}
    if len(made) > 1:
        why.append(f"holds records made by {len(made)} versions of the code")
    return f"{side.name} {' and '.join(why)}" if why else ""


def _notes(a: Side, b: Side, found: changes.Compared) -> list[str]:
    notes = [
        {"cpu": "a CPU: no claim about GPUs", "emulated": cells.NO_CLAIM["emulated"]}.get(kind, "")
        for kind in sorted(set(cells.kind(a.frame)) | set(cells.kind(b.frame)))
    ]
    notes += [
        f"{name}: {side.lost} records damaged or missing" for name, side in zip("ab", (a, b), strict=True) if side.lost
    ]
    notes += [
        f"{name} is a run that ended {side.about['status']}"
        for name, side in zip("ab", (a, b), strict=True)
        if side.about["status"] != "completed"
    ]
    unknown = [
        n for n, s in zip("ab", (a, b), strict=True) if any(code.get("dirty", False) is None for code in s.codes)
    ]
    if unknown:
        notes.append(f"{' and '.join(unknown)} ran outside git: uncommitted changes cannot be told")
    for run, part in found.only.groupby("run"):
        methods = ", ".join(labels.label(name) for name in labels.methods_in(part["method"]))
        notes.append(f"only in {run}: {len(part)} cells ({methods})")
    facts = [_facts(side) for side in (a, b)]
    for name in dict.fromkeys([*facts[0], *facts[1]]):
        one, other = (fact.get(name, "none") for fact in facts)
        if one != other:
            notes.append(f"{name} {one} → {other}")
    return [note for note in notes if note]


def _facts(side: Side) -> dict[str, str]:
    """What may differ between the runs and is then told: code, libraries, driver, how it was measured."""
    commits = sorted({f"{str(code.get('commit'))[:7]}/{code.get('sources')}" for code in side.codes})
    libraries = {name: version or "none" for name, version in side.card.get("libraries", {}).items()}
    facts = {"code": ", ".join(commits), **libraries, "driver": side.card.get("driver") or "none"}
    training = ("dw", "learning_rates") if side.about["params"].get("optimizers") else ()
    for key in ("timing", "bias", "product", "seed", "hardware", *training):
        value = side.about["params"].get(key)
        if isinstance(value, Mapping):
            facts |= {f"{key}.{name}": str(inner) for name, inner in value.items()}
        else:
            facts[key] = str(value)
    return facts


def _what(cases: pd.DataFrame) -> str:
    names = {key: labels.ordered(cases[key].astype(str), ()) for key in ("phase", "device", "dtype", "mask", "shape")}
    return ", ".join("/".join(values if len(values) < 5 else [*values[:4], "..."]) for values in names.values())
