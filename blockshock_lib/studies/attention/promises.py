"""What the study promises of one GPU beside its law: over FlexAttention, by `auto`, dilated; and the study's page."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.tables import ABSENT, markdown, shown, smallest_first
from blockshock_lib.report.verdicts import FASTER, NO_CLAIM, SLOWER, UNDECIDED
from blockshock_lib.studies.attention import hypotheses, law, report, scaling_report
from blockshock_lib.studies.attention.axes import AXES
from blockshock_lib.studies.attention.report import WORKS
from blockshock_lib.studies.attention.scaling_hypotheses import NONE

GOOD, FAIR = 0.97, 0.9  # of the fastest single backend's speed
RUNS = 3  # whole ones, that a headline cell needs
SINGLE = "triton", "gluon", "flex", "fa4", "cudnn"  # backends by name
_CASE = ["k_len", "pattern", "shape", "work"]


def _both(frame: pd.DataFrame, overs: tuple[str, ...], under: str) -> pd.DataFrame:
    """Of each (case, work) the row of `verdicts.ratio` over the rival that leaves least, `over`, with the least of all
    rivals' ends as its interval and `text`: any of them may be the fastest; and a column of texts a rival.
    """
    frame, found = frames.complete(frame, AXES), []
    for work in WORKS:
        metric = frames.time_metric(frame, f"{work}_kernel")
        every = pd.concat([verdicts.ratio(frame, AXES, over, under, metric).assign(over=over) for over in overs])
        texts = {(row["case"], row["over"]): verdicts.interval_text(row) for row in every.to_dict("records")}
        every[["low", "high"]] = every.groupby("case")[["low", "high"]].transform("min")  # over whichever is faster
        decided = np.select([every["low"] > 1, every["high"] < 1], [FASTER, SLOWER], UNDECIDED)
        every["outcome"] = every["outcome"].where(every["outcome"].eq(NO_CLAIM), decided)
        least = every.sort_values("ratio", kind="stable").drop_duplicates("case")
        each = {over: [texts.get((case, over), ABSENT) for case in least["case"]] for over in overs}
        text = [verdicts.interval_text(row) for row in least.to_dict("records")]
        found.append(least.assign(work=work, method=under, text=text, **each))
    return pd.concat(found, ignore_index=True)


def rivals(frame: pd.DataFrame) -> pd.DataFrame:
    """The speed of our kernels over FlexAttention, a row a (case, work, kernel): as it comes, as PyTorch tunes it, and
    over the faster of the two, which counts; 99% intervals.
    """
    names = {"flex": "over Flex", "flex_tuned": "over Flex, tuned"}
    table = pd.concat([_both(frame, tuple(names), ours) for ours in ("triton", "gluon")], ignore_index=True)
    if table.empty:
        return pd.DataFrame({"over FlexAttention": ["no case holds valid times of both"]})
    table = table.rename(columns=names | {"text": "what counts", "outcome": "claim"})
    return shown(smallest_first(table, AXES), AXES, [*_CASE, "method", *names.values(), "what counts", "claim"])


def _chosen(frame: pd.DataFrame) -> pd.DataFrame:
    rows = frames.complete(frame, AXES)
    tuned = rows.loc[rows["metric"].eq("kernel") & rows["detail"].str.endswith("; tuned here"), "case"]
    return _both(rows[~rows["case"].isin(set(tuned))], SINGLE, "auto")


def choices(frame: pd.DataFrame) -> pd.DataFrame:
    """The speed of what `auto` takes, by what was kept of other problems, over the fastest single backend, a row a
    (case, work). A case that was tuned itself is none.
    """
    table = _chosen(frame)
    if table.empty:
        return pd.DataFrame({"auto": ["no case that was not tuned holds valid times of it and of a single backend"]})
    table = table.assign(best=table["over"].map(AXES.label)).rename(columns={"text": "over the best single backend"})
    columns = [*_CASE, "best", "over the best single backend", "method"]
    return shown(smallest_first(table, AXES), AXES, columns)


def shares(frame: pd.DataFrame) -> pd.DataFrame:
    """Of the rows of `choices` the share whose points reach GOOD and FAIR; and how many intervals hold these."""
    table = _chosen(frame)
    if table.empty:
        return choices(frame)
    each = {}  # as measured: what is printed is rounded
    for least in (GOOD, FAIR):
        each[f"points at least {least:g} (%)"] = 100 * table["ratio"].ge(least)
        each[f"undecided at {least:g}"] = table["low"].lt(least) & table["high"].ge(least)
    by = table.assign(**each).groupby("work", sort=False)
    found = {"cells": by.size(), "least point": by["ratio"].min().round(4)}
    found |= {name: by[name].sum() if "undecided" in name else by[name].mean().round(1) for name in each}
    return pd.DataFrame(found).reset_index()


def gathered(frame: pd.DataFrame) -> pd.DataFrame:
    """The speed of LongNet's attention by gathering over the union of its pairs as a mask, a row a (case, work)."""
    table = pd.concat([_both(frame, SINGLE, each) for each in ("dilated", "dilated_sdpa")], ignore_index=True)
    if table.empty:
        return pd.DataFrame({"dilated": ["no case holds valid times of it and of a kernel with a mask"]})
    table = table.assign(masked=table["over"].map(AXES.label)).rename(columns={"text": "over the mask"})
    return shown(smallest_first(table, AXES), AXES, [*_CASE, "masked", "over the mask", "method"])


_SECTIONS = {  # phase, "" for all records: title: the table, and what it says
    "": {"Every check": ("correctness", "The worst outcome of a pattern, on one GPU and over ranks.")},
    "attention_speed": {
        "The break-even": ("break-even", "ms = slope x density + overhead; of two densities nothing can be off."),
        "Over FlexAttention": ("over FlexAttention", "The speed of our kernels; FlexAttention's faster way counts."),
        "What was kept, where nothing was tuned": ("auto", "`auto` over the fastest single backend."),
        "Of how many cells": ("auto, shares", "Points that reach 0.97 and 0.90 of it; intervals that hold these."),
        "Dilated attention": ("dilated", "LongNet's pairs gathered, over one kernel with their union as its mask."),
        "Building lists": ("lists", "Nothing of them was kept: each time from the rule."),
        "Every time": ("times", "Medians in ms, by kernel where a CUDA graph can hold it, and as called."),
    },
    "attention_scaling": {
        "Speed-up over ranks": (
            "speed-ups",
            "In a CUDA graph; ms also as called. By its power cap a GPU alone may run slower than each of several.",
        ),
        "The parts of a step": (
            "parts of a step",
            "ms, called, each alone; together they make up the step. Ring and heads are sent, so their fellow is send.",
        ),
        "Memory": ("memory", "The peak of a step by rank; the longest sequence is reckoned from it, not tried."),
        "Models": ("models", "One model of one attention: batches dealt to ranks, or its sequence."),
        "Gradients": ("gradients", "A hook pays where the link is slower than its break-even."),
        "The hybrid block": ("hybrid", "Where a forward goes, each piece measured alone."),
    },
}


def gains(frame: pd.DataFrame) -> str:
    """Up to which density a forward surely is faster than by the fastest dense kernel, and by how much at the least
    measured, by each length's kernel of the law; `report.answer` where a length tells no such density.
    """
    rows = law.blocks(frame)
    rows, _ = frames.focus(rows, AXES, metrics=(frames.time_metric(rows, "forward_kernel"), "block_density"))
    judged = [] if frames.no_claim(rows) else [*law.judged(rows)]
    ends = [row["law"].even.low for row, _ in judged]
    if not all(end > 0 for end in ends) or not ends:
        return report.answer(frame)
    density, by = law.densities(rows).astype(float), {"in kernel time": [], "as called": []}
    for row, cells in judged:
        least = cells.loc[cells["case"].map(density).idxmin()]
        call = verdicts.ratio(frame[frame["case"].eq(least["case"])], AXES, row["rival"], row["method"], "forward_call")
        for ratios, each in zip(by.values(), ([least["ratio"]], call["ratio"]), strict=True):
            ratios += [*each]
    said = [f"{_span(ratios, '{:.2f}x')} {clock}" for clock, ratios in by.items() if ratios]
    lengths = _span([row["k_len"] for row, _ in judged], "{}")
    text = f"On one GPU block-sparse attention beats the fastest dense kernel at {lengths} keys up to a density of "
    return f"{text}{min(*ends, 1.0):.2f} at least, at {density.min():.1g} by {', '.join(said)}."


def _span(values: Sequence[float], form: str) -> str:
    return " to ".join(dict.fromkeys(form.format(end) for end in (min(values), max(values))))


def steps(frame: pd.DataFrame) -> str:
    """By ranks how much faster a step is than the fastest dense kernel's on one; else the phase's own answer."""
    table = scaling_report.furthest(frame)[1]
    rows = table.iloc[:0] if frames.no_claim(table) else table[table["beside"].ne(ABSENT)]
    each = [f"{r.beside.rpartition(' ')[0]} on {r.world_size} GPUs ({AXES.short(r.method)})" for r in rows.itertuples()]
    said = f"A step at {table['k_len'].max()} keys is {' and '.join(each)} as fast as by that kernel on one GPU."
    return said if each else scaling_report.answer(frame)


def answer(frame: pd.DataFrame) -> str:
    """Of the phases that were timed, in a sentence."""
    made = {"attention_speed": gains, "attention_scaling": steps}
    found = [say(frame[frame["phase"].eq(phase)]) for phase, say in made.items() if phase in verdicts.phases(frame)]
    found = found or [report.answer(frame)]
    return f"{'; '.join([found[0].removesuffix('.'), *(one[0].lower() + one[1:-1] for one in found[1:])])}."


def rests(frame: pd.DataFrame) -> str:
    """On how many whole runs the cells of one GPU rest."""
    runs = frames.samples(frame, frames.time_metric(frame, "forward_kernel")).groupby("case")["run"].nunique()
    named = runs.index.isin(hypotheses.headline(frame)["case"])
    asked = len(hypotheses.LENGTHS) * len(hypotheses.DENSITIES)
    enough = [f"{runs[which].ge(RUNS).sum()} in {RUNS} whole runs or more" for which in (named, ~named)]
    return f"Of {asked} headline cells {named.sum()} were timed, {enough[0]}; of others {(~named).sum()}, {enough[1]}."


def page(frame: pd.DataFrame) -> str:
    """The page in Markdown, behind its title and `answer`: what was not measured says so."""
    from blockshock_lib.studies.attention import STUDY  # its tables and rules by name

    rules = {phase: STUDY.hypotheses.get(phase, ()) for phase in verdicts.phases(frame)}
    said = verdicts.claims(frame, rules)
    none = [one[4:].rpartition(": ")[0] for one in said if one.endswith(f" {NONE}.")]
    lines = ["## The answer", "", *(one for one in said if not one.endswith(f" {NONE}."))]
    lines += [f"- **No record of their cells yet.** {'; '.join(none)}."] * bool(none)
    for phase, sections in _SECTIONS.items():
        rows = frame[frame["phase"].eq(phase)] if phase else frame
        if phase and rows.empty:
            lines += ["", f"No record of {phase} on these machines is shipped yet."]
            continue
        lines += ["", rests(rows)] if phase == "attention_speed" else []
        for title, (name, words) in sections.items():
            made = STUDY.tables[name](rows)
            made = made.reset_index() if made.index.name or made.index.names[0] else made
            lines += ["", f"## {title}", "", words, "", *markdown(made)]
    return "\n".join(lines)
