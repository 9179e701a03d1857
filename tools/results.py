"""Writes docs/results/<study>.md, its picture and README's table from the records: `python -m tools.results`; with
--check it only says whether the texts are stale.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from blockshock_lib import files, studies
from blockshock_lib.engine.study import Study
from blockshock_lib.files import ROOT, shown
from blockshock_lib.notebook import terminal
from blockshock_lib.notebook.findings import Findings
from blockshock_lib.report import changes, figures, frames, reruns, verdicts
from blockshock_lib.report.axes import Axes
from blockshock_lib.report.tables import markdown, rounded
from blockshock_lib.runs import records, reference, rules

RESULTS = ROOT / "docs" / "results"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
ASIDE = re.compile(r" \((?:[^()\s]+\s){2,}[^()]+\)")  # more than two words: left to the page
NOTHING = "Not answered: no run on a GPU is shipped yet."
HOW = """\
[a, b] is a 99% interval: of times over whole runs, of a single run over its fresh groups of processes, over several
rivals the least of their ends; of losses over seeds. Without one: too few groups, or they lie too far apart. Faster or
slower is said where it excludes 1 ([how it is measured](../measuring.md)). Runs made at once on one machine do not show
how days or machines differ; the last table names them. Where a run timed a method twice, as a control, a claim below
the smallest difference that this tells apart rests on its own interval alone. "The seed": the notes that the project
began with, whose claims are tested."""


def written() -> dict[Path, str | Figure]:
    """File -> what it should hold, of the shipped records: each study's page and picture, and README."""
    pages, rows = {}, []
    for name in studies.names():
        terminal.note(name)
        study = studies.load(name)
        if study.results:
            found = Findings(None, "reference", Path(), study)
            source, said, machines = "Written by `make findings`: no run of it is shipped yet.\n", NOTHING, ""
            if found.frames:
                source = f"Written by `make findings` from the records of {found.setting}."
                if study.picture:
                    pages[RESULTS / f"{name}.png"] = drawn = study.figures[study.picture](found.main)
                    source = f"{source}\n\n![{drawn.alt}]({name}.png)"
                source = f"{source}\n\n{study.results(found.main)}\n{_before(found)}{_runs(found)}"
                of = [one for one in found.sources if one.counts and one.setting == found.setting]
                if set(found.main["device"]) - {"cpu"}:
                    said = found.sentence
                    machines = ", ".join(sorted({one.manifest["machine"]["title"] for one in of}))
            text = f"# Results of the study {name}\n\n**{study.question}**\n\n{said}\n\n{HOW}\n\n{source}"
            pages[RESULTS / f"{name}.md"] = text
            rows.append(f"| [{name}](docs/results/{name}.md) | {study.question} | {ASIDE.sub('', said)} | {machines} |")
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    if BEGIN in text:
        head = (
            "| study | question | answer; its conditions: the study's page | measured on |\n| --- | --- | --- | --- |"
        )
        table = "\n".join([head, *rows])
        pages[readme] = re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table}\n{END}", text, flags=re.DOTALL)
    return pages


def _before(found: Findings) -> str:
    """What changed from a run's older one, `<name>-before` beside it, to it and its further runs: what is said of each
    hypothesis, and the speeds; "" where none has an older one.
    """
    lines, study = ["", "## What changed against the numbers before", ""], found.study
    for source in (one for one in found.sources if one.counts and one.setting == found.setting):
        older = source.folder.with_name(f"{source.folder.name}-before")
        if not older.is_dir():
            continue
        own = reference.name_of(source.manifest)
        runs = [one.folder for one in found.sources if one.counts and reference.name_of(one.manifest) == own]
        old, new = records.load(older), records.load(*runs)
        said = [verdicts.hypotheses(side, study.hypotheses) for side in (old, new)]
        claims = [
            {"": then.name} | {when: f"{one.verdict}: {one.why}" for when, one in (("before", then), ("now", now))}
            for then, now in zip(*said, strict=True)
        ]
        phase = study.phases[source.manifest["phase"]]
        speeds, alike, (inside, asked) = _speeds(old, new, study.axes, phase.metric)
        every = old.drop_duplicates("case").to_dict("records")
        lost = [f"{study.axes.case(row)} ({study.axes.setting(row)})" for row in every if row["case"] not in alike]
        times = f"{len(runs)} run{'s' * (len(runs) > 1)}"
        anew = f"{len(alike)} of its {len(every)} cases were measured anew in {times} by other code"
        lead = (
            f"**{phase.question}** [{shown(older)}](../../{shown(older)}) stays; {anew}{', not ' * bool(lost)}"
            f"{'; '.join(lost)}. Of their {asked} ratios over the baseline, kernel and call time, it predicted "
            f"{inside} ({inside / asked:.0%}). Speeds are over the baseline's, medians of the cases; *up* and *down*: "
            "in how many of them the 99% intervals of before and now lie apart. Times: "
            f"{frames.time_name(new, study.axes, phase.metric)}."
        )
        lines += [lead, "", *markdown(pd.DataFrame(claims)), "", *markdown(speeds), ""]
    return "\n".join(lines) if lines[3:] else ""


def _speeds(a: pd.DataFrame, b: pd.DataFrame, axes: Axes, metric: str) -> tuple[pd.DataFrame, set[str], list[int]]:
    """From `a`, the older, to the runs `b`: a row a method that both timed, of its `metric` in the cases of both, on
    whichever machine; these cases, as `a` names them; of how many ratios over the baseline `a` predicted a run of `b`,
    and all. The speed over the baseline is a median; it is "up" or "down" where the intervals of the two lie apart.
    """
    alike = changes.pairs(*changes.cases((a, b), axes), changes.LOOSE["hardware"])
    b, found = b[b["case"].isin(alike)].assign(case=lambda rows: rows["case"].map(alike)), []
    a, b = (side[side["metric"].isin(["check", metric, metric.replace("kernel", "call")])] for side in (a, b))
    times = [frames.medians(side, axes, time=metric).set_index(["method", "case"]) for side in (a, b)]
    for name in axes.ordered(set.intersection(*(set(one.index.unique("method")) for one in times))):
        was, now = (verdicts.ratio(side, axes, axes.over, name, metric).set_index("case") for side in (a, b))
        was, now = was.align(now, join="inner", axis=0)
        change, slower = now["ratio"] / was["ratio"], times[1].loc[name, "time"] / times[0].loc[name, "time"]
        row = {"speed before": was["ratio"].median(), "now": now["ratio"].median(), "now / before": change.median()}
        row |= {"least": change.min(), "most": change.max()}
        row |= {"up": (now["low"] > was["high"]).sum(), "down": (now["high"] < was["low"]).sum()}
        found.append({"method": axes.label(name)} | row | {"time, now / before": slower.median()})
    told = [reruns.foretold(a, run, axes) for _, run in b.groupby("run")]
    return rounded(pd.DataFrame(found)), set(alike.values()), [sum(one) for one in zip(*told, strict=True)]


def _runs(found: Findings) -> str:
    """The runs behind the page: executed notebook, start, code and versions of each."""
    lines = ["", "## The runs behind it", "", "| run | started | code | versions | note |", "| - | - | - | - | - |"]
    for source in found.sources:
        if source.counts and source.setting == found.setting:
            row, notebook = source.row(), found.study.phases[source.manifest["phase"]].notebook
            link = f"[{row['run']}](../../{row['run']}/{Path(notebook).name})"
            about = [
                link,
                row["started"],
                row["code"],
                row["versions"],
                note(source.manifest, found.study, source.frame),
            ]
            lines.append(f"| {' | '.join(about)} |")
    lines += ["", "Times of runs of other code or versions are not to be compared with each other.", ""]
    lines += [f"{shown(one.folder)} is {one.use}.\n" for one in found.sources if not one.counts]
    return "\n".join(lines)


def note(facts: Mapping[str, Any], study: Study, frame: pd.DataFrame) -> str:
    """What a reader must know of a run: its rules, the smallest difference that it can claim, how it was measured or
    why it was stopped, and what it lacks.
    """
    other = rules.changed(facts, study, frame) if facts.get("rules") else "its rules were not kept"
    said, told = [other] * bool(other), facts.get("verdict", "")
    said += re.findall(r"\S[^·]* again differs from [^·]*? in [1-9]\d* of \d+ cells[^·;]*", told)
    said += re.findall(r"smallest difference to claim: [\d.]+%", told)
    apart = re.findall(r"(?i)runs (?:lie apart|differ)[^·]*", told)
    said += [re.sub(r": outputs/\S+ ", ": one run ", one.strip()) for one in apart]
    said += filter(None, [facts.get("reason")])
    groups, asked = frame.groupby("case")["group"].nunique(), facts["params"]["timing"]["groups"]
    few = frame[frame["case"].isin(groups[groups < asked].index)].drop_duplicates("case").to_dict("records")
    words = [", ".join(filter(None, (row.get("timed"), study.axes.case(row)))) for row in few]
    said += [f"{groups[row['case']]} of {asked} groups: {what}" for row, what in zip(few, words, strict=True)]
    return "; ".join(said)


def stale() -> list[Path]:
    """The texts that do not hold what the shipped records say."""
    texts = {path: text for path, text in written().items() if isinstance(text, str)}
    return [path for path, text in texts.items() if not path.is_file() or path.read_text("utf-8") != text]


def main(words: Sequence[str] = ()) -> int:
    """Writes the files; with --check it only names those that are stale, and returns 1 where there are any."""
    if unknown := set(words) - {"--check"}:
        print(f"error: {', '.join(sorted(unknown))}; allowed: --check", file=sys.stderr)
        return 2
    with terminal.working("docs/results and README"):
        old, pages = (stale(), {}) if words else ([], written())
    for path in old:
        print(f"{files.shown(path)} is not what the records say: make findings")
    for path, made in pages.items():
        files.write_atomic(path, made if isinstance(made, str) else figures.png(made))
        print(files.shown(path))
    return int(bool(old))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
