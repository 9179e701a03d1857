"""What the study promises of one GPU beside its law: over FlexAttention, by `auto`, dilated; and its page."""

import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.tables import ABSENT, markdown, shown, smallest_first
from blockshock_lib.studies.attention import report
from blockshock_lib.studies.attention.axes import AXES
from blockshock_lib.studies.attention.report import WORKS

GOOD, FAIR = 0.97, 0.9  # of the fastest single backend's speed
SINGLE = "triton", "gluon", "flex", "fa4", "cudnn"  # backends by name
_CASE = ["k_len", "pattern", "shape", "work"]


def _best(frame: pd.DataFrame, overs: tuple[str, ...], under: str, work: str) -> pd.DataFrame:
    """Of each case the row of `verdicts.ratio` over the rival that leaves least, with `over`, its `text`, `each`: rival
    -> text; by case.
    """
    metric, found = frames.time_metric(frame, f"{work}_kernel"), {}
    for over in overs:
        table = verdicts.ratio(frame, AXES, over, under, metric)
        table["text"] = [verdicts.interval_text(row) for row in table.to_dict("records")]
        found[over] = table.assign(over=over, work=work, method=under).set_index("case", drop=False)
    every = pd.concat(found.values()).sort_values("ratio", kind="stable")
    least = every[~every.index.duplicated()]
    return least.assign(
        **{over: [way["text"].get(case, ABSENT) for case in least["case"]] for over, way in found.items()}
    )


def _both(frame: pd.DataFrame, overs: tuple[str, ...], under: str) -> pd.DataFrame:
    return pd.concat([_best(frames.complete(frame, AXES), overs, under, work) for work in WORKS], ignore_index=True)


def rivals(frame: pd.DataFrame) -> pd.DataFrame:
    """The speed of our kernels over FlexAttention, a row a (case, work, kernel): as it comes, as PyTorch tunes it, and
    over the faster of the two, which counts; 99% intervals.
    """
    overs = ("flex", "flex_tuned")
    table = pd.concat([_both(frame, overs, ours) for ours in ("triton", "gluon")], ignore_index=True)
    if table.empty:
        return pd.DataFrame({"over FlexAttention": ["no case holds valid times of both"]})
    names = dict(zip(overs, ("over Flex", "over Flex, tuned"), strict=True))
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
    """Of the rows of `choices` the share that reach GOOD and FAIR, by work."""
    table = _chosen(frame)
    if table.empty:
        return choices(frame)
    ratio = table.groupby("work", sort=False)["ratio"]  # as measured: what is printed is rounded
    each = {f"at least {least:g} (%)": ratio.agg(lambda x, at=least: 100 * x.ge(at).mean()) for least in (GOOD, FAIR)}
    found = {"cells": ratio.size(), "least": ratio.min().round(4)}
    return pd.DataFrame(found | {name: share.round(1) for name, share in each.items()}).reset_index()


def gathered(frame: pd.DataFrame) -> pd.DataFrame:
    """The speed of LongNet's attention by gathering over the union of its pairs as a mask, a row a (case, work)."""
    table = _both(frame, SINGLE, "dilated")
    if table.empty:
        return pd.DataFrame({"dilated": ["no case holds valid times of it and of a kernel with a mask"]})
    table = table.assign(masked=table["over"].map(AXES.label)).rename(columns={"text": "over the mask"})
    return shown(smallest_first(table, AXES), AXES, [*_CASE, "masked", "over the mask", "method"])


_SECTIONS = {  # title: the table, and what it says
    "Every check": (
        "correctness",
        "The worst outcome of a pattern on one GPU; ranks have runs of their own.",
    ),
    "The break-even": ("break-even", "ms = slope x density + overhead over random blocks; d*: as long as dense takes."),
    "Over FlexAttention": ("over FlexAttention", "The speed of our kernels; the faster of FlexAttention's two counts."),
    "What was kept, where nothing was tuned": ("auto", "`auto` over the fastest single backend."),
    "Of how many cells": ("auto, shares", "The share of those that reach 0.97 and 0.90 of its speed."),
    "Dilated attention": ("dilated", "LongNet's pairs gathered, over one kernel with their union as its mask."),
    "Building lists": ("lists", "Nothing of them was kept: each time from the rule."),
    "Every time": ("times", "Medians in ms, by kernel where a CUDA graph can hold it, and as called."),
}


def page(frame: pd.DataFrame) -> str:
    """The answer in Markdown, behind its title: what was not measured says so."""
    from blockshock_lib.studies.attention import STUDY  # its tables by name, as notebooks take them

    speed = frame[frame["phase"].eq("attention_speed")]
    claims = [make(speed) for make in STUDY.hypotheses["attention_speed"]]
    lines = ["## The answer", "", report.answer(speed), ""]
    lines += [f"- **{one.hypothesis.rstrip('.')}: {one.verdict}.** {one.why}." for one in claims]
    for title, (name, words) in _SECTIONS.items():
        made = STUDY.tables[name](frame if name == "correctness" else speed)
        made = made.reset_index() if made.index.name or made.index.names[0] else made
        lines += ["", f"## {title}", "", words, "", *markdown(made)]
    return "\n".join(lines)
