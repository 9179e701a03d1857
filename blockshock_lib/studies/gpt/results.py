"""The study's answer in Markdown, of the shipped records: losses and times, which runs of their own have measured."""

import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.tables import ABSENT, markdown
from blockshock_lib.studies.gpt import gaps, report, saved
from blockshock_lib.studies.gpt.axes import AXES
from blockshock_lib.studies.gpt.hypotheses import COST, HEADLINE
from blockshock_lib.studies.gpt.params import COLUMNS

RUNS = 3  # whole ones that a headline cell needs
SHOWN = (1, 2, 4, 6, 8, 12)  # of how many syncs were dropped; the page of a run draws all
_HOW = """\
A gap is a schedule's validation loss less that of tensor parallelism (TP) of the same seed, in nats a token, with
Student's 99% interval over seeds; fewer than 4 seeds are points. Time saved is of TP's kernel time, with its 99%
interval over whole runs, or over the fresh groups of processes of one. The slow link: the same GPUs without peer access
(`NCCL_P2P_DISABLE=1`, no symmetric memory). S3 has two gaps: to TP in no more steps than the time allows, which can
only refute, and to a TP trained to its own end for as many or more, which alone supports. [The
schedules](../gpt.md) have a page of their own."""
_DOES_NOT_SAY = """\
- One recipe serves all schedules: no learning rate is tuned for each, and one that suits another schedule better than
  tensor parallelism makes its gap too small. Losses are those of source code, not of web text.
- Gaps are those at the end of these trainings. They move on the way: tensor parallelism may be behind first and catch
  up, so more tokens may open them.
- Each interval is a 99% one by itself, over seeds: the validation text is one. Several tracks have as many residual
  streams between two sums, which one device holds all, and four ranks one each. Seeds beyond the first four of a
  schedule were trained after these had been read: a second look, of which the 99% take no account.
- Sums that run beside a sublayer, of the ladder and the delayed schedule, are NCCL's: our own faster ones are awaited.
  Blocks run by PyTorch's own kernels, uncompiled, for every schedule alike: parallel tracks make more additions of
  their own than tensor parallelism does, which takes back part of what their dropped sums save.
- Sensitivities and what dropping costs are of the same validation text."""


def answer(frame: pd.DataFrame) -> str:
    """Of losses, and of times over each link."""
    phases, none = verdicts.phases(frame), "Not answered: no record of these machines is shipped yet."
    timed = frame[frame["phase"].eq("gpt_latency")] if "gpt_latency" in phases else frame[:0]
    if len(timed) == 0 and "gpt_training" not in phases:
        return "Not answered: no schedule was trained or timed."
    loss = report.answer(frame) if "gpt_training" in phases else none
    if not (time := both(frame)):
        times = [saved.answer(part).removeprefix("Time: ").rstrip(".") for _, part in timed.groupby("link")]
        time = f"Time: {'; '.join(times).replace('at most', 'up to') or none.rstrip('.')}."  # of what was timed
    return f"Loss: {loss.removeprefix('Loss: ')} {time}"


def both(frame: pd.DataFrame) -> str:
    """Loss and time of one shape: by link, of the schedules whose gap is shown to lie below COST, that which surely
    saves most of a training step of the trained shape.
    """
    rows, steps = gaps.setting(gaps.finals(frame)), saved.ratios(frame)
    if rows.empty or rows["width"].iloc[0] < gaps.LEAST_WIDTH or frames.no_claim(steps):
        return ""
    one, gap = rows.iloc[0], {name: gaps.gap(gaps.paired(rows, name)) for name in set(rows["method"])}
    steps = steps[steps["work"].eq("step") & steps["method"].map(lambda name: name in gap and gap[name].high < COST)]
    steps = steps[(steps[[*COLUMNS, "dtype"]] == one[[*COLUMNS, "dtype"]]).all(axis=1) & steps["low"].gt(1)]
    best = steps.sort_values("low", kind="stable").drop_duplicates("link", keep="last").sort_values("link")
    best["text"] = [f"{saved.saving_text(row)} on the {row['link']} link" for row in best.to_dict("records")]
    each = [f"{row.text} by {AXES.short(row.method)}" for row in best.itertuples()]
    costs = "; ".join(f"{AXES.short(name)} {gap[name]} nats" for name in dict.fromkeys(best["method"]))
    return f"Time that such a training step saves within {COST} nats: {', '.join(each)} ({costs})." if each else ""


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


def page(frame: pd.DataFrame) -> str:
    """The page in Markdown, behind its title; what no run has measured says so."""
    from blockshock_lib.studies.gpt import STUDY  # its rules by name

    claims, measured = verdicts.claims(frame, STUDY.hypotheses), verdicts.phases(frame)
    lines = ["## The answer", "", answer(frame), "", *claims, "", "## How to read it", "", _HOW, ""]
    parts = {"gpt_training": _losses, "gpt_latency": _times}
    for phase, write in parts.items():
        lines += write(frame) if phase in measured else [f"No record of {phase} on these machines is shipped yet.", ""]
    return "\n".join([*lines, "## What this does not say", "", _DOES_NOT_SAY])


def _losses(frame: pd.DataFrame) -> list[str]:
    lines = ["## What a dropped synchronisation costs", "", *markdown(report.losses(frame).reset_index()), ""]
    every = gaps.settings(gaps.finals(frame))
    table = [
        {
            "GPT": gaps.size_of(rows, every),
            "syncs dropped of 24": count,
            "how": how,
            "costs (nats)": str(gaps.gap(part["cost"])),
        }
        for rows in every
        for how in ("dropped", "affinity", "distilled")
        for count, part in gaps.after(frame, rows, f"{how}_loss").groupby("repeat")
        if count in SHOWN
    ]
    about = "The least sensitive first: as they are; heads grouped by affinity; after distillation."
    lines += ["**After training**", "", about, "", *markdown(pd.DataFrame(table)), ""] if table else []
    about = "Ranks are played as tracks on one GPU, which has no sum to save: not what ranks would take."
    return [*lines, "**Speed of training**", "", about, "", *markdown(report.rates(frame).reset_index()), ""]


def _times(frame: pd.DataFrame) -> list[str]:
    table = saved.ratios(frame)
    table = table.assign(text=[saved.saving_text(row) for row in table.to_dict("records")])
    names = [AXES.short(name) for name in AXES.ordered(table["method"])]
    cells, table = ["work", "length", "width", "ranks", "link", "dtype", "runs"], table.sort_values("width")
    table["method"] = table["method"].map(AXES.short)
    wide = table.pivot_table(index=cells, columns="method", values="text", aggfunc="first", sort=False)
    about = f"Headline cells need {RUNS} whole runs or more; others, where `runs` is 1, rest on one alone."
    head = headline(frame)
    where = f"{HEADLINE['ranks']} ranks over a {HEADLINE['link']} link"
    none = f"None of the {len(head)} is measured yet: they are of {where}."
    rows = [none] if head["saved"].eq(ABSENT).all() else markdown(head)
    lines = ["## Time saved: the headline cells", "", about, "", *rows, ""]
    lines += ["## Time saved in every cell", "", *markdown(wide[names].fillna(ABSENT).reset_index()), ""]
    notes = [frames.no_claim(table), *saved.summary(frame[frame["phase"].eq("gpt_latency")])]
    return [*lines, *(f"{note}." for note in notes if note), ""]
