"""The study's answer in Markdown, of the shipped records: losses and times, which runs of their own have measured."""

import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.tables import ABSENT, markdown
from blockshock_lib.studies.gpt import gaps, report, saved
from blockshock_lib.studies.gpt.axes import AXES
from blockshock_lib.studies.gpt.hypotheses import COST, HEADLINE
from blockshock_lib.studies.gpt.params import COLUMNS

_TRAINED, _TIMED = "gpt_training", "gpt_latency"
RUNS = 3  # whole ones that a headline cell needs
SHOWN = (1, 2, 4, 6, 8, 12)  # of how many syncs were dropped; the page of a run draws all


def answer(frame: pd.DataFrame) -> str:
    """In a sentence: of losses, and of times over each link."""
    phase, none = frames.complete(frame)["phase"], "Not answered: no record of these machines is shipped yet."
    loss = report.answer(frame) if phase.eq(_TRAINED).any() else none
    if not (time := both(frame)):
        said = [saved.answer(part).removeprefix("Time: ") for _, part in frame[phase.eq(_TIMED)].groupby("link")]
        time = f"time: {'; '.join(one.rstrip('.') for one in said)}." if said else f"time: {none}"
    return f"{loss.removesuffix('.')}; {time}"


def both(frame: pd.DataFrame) -> str:
    """Loss and time of one shape: by link, of the schedules whose gap is shown to lie below COST, that which surely
    saves most of a training step of the trained shape.
    """
    rows, steps = gaps.setting(gaps.finals(frame)), saved.ratios(frame)
    if rows.empty or rows["width"].iloc[0] < gaps.LEAST_WIDTH or frames.no_claim(steps):
        return ""
    one, gap = rows.iloc[0], {name: gaps.gap(gaps.paired(rows, name)) for name in set(rows["method"])}
    steps = steps[steps["work"].eq("step") & steps["method"].isin({name for name in gap if gap[name].high < COST})]
    steps = steps[(steps[[*COLUMNS, "dtype"]] == one[[*COLUMNS, "dtype"]]).all(axis=1) & steps["low"].gt(1)]
    best = steps.sort_values("low", kind="stable").drop_duplicates("link", keep="last").sort_values("link")
    best["text"] = [f"{saved.saving_text(row)} on the {row['link']} link" for row in best.to_dict("records")]
    each = [f"{r.text} by {AXES.label(r.method)} left" + " (one run)" * (r.runs == 1) for r in best.itertuples()]
    costs = "; ".join(f"{AXES.short(name)} {gap[name]} nats" for name in dict.fromkeys(best["method"]))
    return f"a training step within {COST} nats saves {', '.join(each)} ({costs})." if each else ""


def headline(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a headline cell: the time that it saves, and on how many whole runs that rests."""
    table, found = saved.ratios(frame), []
    for name in ("ranks", "link", "dtype"):
        table = table[table[name].eq(HEADLINE[name])]
    for work, length, width in HEADLINE["cases"]:
        for method in HEADLINE["methods"]:
            cell = table[table["method"].eq(method) & table["width"].eq(width)]
            cell = cell[cell["work"].eq(work) & cell["length"].eq(length)].to_dict("records")
            runs = cell[0]["runs"] if cell else 0
            rests = {0: "not measured", 1: "one run"}.get(runs, f"{runs} runs") + ", too few" * (0 < runs < RUNS)
            about = {"work": f"{work} {length}", "width": f"{width}", "schedule": AXES.label(method)}
            found.append(about | {"saved": saved.saving_text(cell[0]) if cell else ABSENT, "rests on": rests})
    return pd.DataFrame(found)


def _after(frame: pd.DataFrame) -> pd.DataFrame:
    every = gaps.settings(gaps.finals(frame))
    found = [
        (gaps.size_of(rows, every), count, how, str(gaps.gap(part["cost"])))
        for rows in every
        for how in ("dropped", "affinity", "distilled")
        for count, part in gaps.after(frame, rows, f"{how}_loss").groupby("repeat")
        if count in SHOWN
    ]
    return pd.DataFrame(found, columns=["GPT", "all-reduces dropped of 24 a forward", "how", "costs (nats)"])


def _cells(frame: pd.DataFrame) -> pd.DataFrame:
    table = saved.ratios(frame)
    table = table.assign(text=[saved.saving_text(row) for row in table.to_dict("records")]).sort_values("width")
    order, table["method"] = AXES.ordered(table["method"]), table["method"].map(AXES.short)
    cells = ["work", "length", "width", "ranks", "link", "dtype", "runs"]
    wide = table.pivot_table(index=cells, columns="method", values="text", aggfunc="first", sort=False)
    return wide[[AXES.short(name) for name in order]]


_TABLES = {  # title: its phase, what is said of it, the table
    "What a dropped synchronisation costs": (_TRAINED, "By size and recipe, paired by seed.", report.losses),
    "After training": (_TRAINED, "Dropped: the least sensitive first. Affinity: with heads grouped by it.", _after),
    "Speed of training": (_TRAINED, "Ranks are tracks on one GPU, without sums: no time of ranks.", report.rates),
    "Time saved: the headline cells": (_TIMED, f"Each needs {RUNS} whole runs or more.", headline),
    "Time saved in every cell": (_TIMED, "Where `runs` is 1 a cell rests on one run alone.", _cells),
}


def page(frame: pd.DataFrame) -> str:
    """The page in Markdown, behind its title and `answer`; what no run has measured says so. See docs/gpt.md."""
    from blockshock_lib.studies.gpt import STUDY  # its rules by name

    measured = verdicts.phases(frame)
    lines = ["## The answer", "", *verdicts.claims(frame, STUDY.hypotheses)]
    lines += ["", "[How to read this, and what it does not say](../gpt.md#how-to-read-the-results)."]
    for title, (phase, about, make) in _TABLES.items():
        if phase in measured and len(table := make(frame)):
            table = table.reset_index() if table.index.names[0] else table
            lines += ["", f"## {title}", "", about, "", *markdown(table)]
    if _TIMED in measured:
        notes = [frames.no_claim(saved.ratios(frame)), *saved.summary(frame[frame["phase"].eq(_TIMED)])]
        lines += ["", *(f"{note}." for note in notes if note)]
    missing = [phase for phase in (_TRAINED, _TIMED) if phase not in measured]
    return "\n".join([*lines, "", *(f"No record of {phase} on these machines is shipped yet.\n" for phase in missing)])
