"""Tables and figures of the attention study, from its records."""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.interval import LEVEL
from blockshock_lib.report.tables import ABSENT, rounded, shown, smallest_first
from blockshock_lib.report.verdicts import FASTER
from blockshock_lib.studies.attention import law
from blockshock_lib.studies.attention.axes import AXES
from blockshock_lib.studies.attention.law import RIVALS, Law
from blockshock_lib.studies.attention.phases import PHASES

WORKS = PHASES["attention_speed"].works
_CASE = ["k_len", "pattern", "shape", "block"]


def summary(frame: pd.DataFrame) -> list[str]:
    """Sentences at the end of a run's verdict line."""
    cases = frame.drop_duplicates("case")
    return [f"{cases['pattern'].nunique()} patterns in {len(cases)} cases"]


def speed(frame: pd.DataFrame, over: str, under: str, work: str = "step", level: float = LEVEL) -> pd.DataFrame:
    """`verdicts.ratio` of a work: in kernel time where both have one, else in call time."""
    frame = frames.complete(frame, AXES)
    kernel, call = (verdicts.ratio(frame, AXES, over, under, f"{work}_{kind}", level) for kind in ("kernel", "call"))
    parts = [part for part in (kernel, call[~call["case"].isin(kernel["case"])]) if len(part)]
    return pd.concat(parts, ignore_index=True) if parts else call


def against(
    frame: pd.DataFrame, over: str, methods: Iterable[str], work: str = "step", level: float = LEVEL
) -> pd.DataFrame:
    """The rows of `speed` of several methods, with `method`."""
    found = [speed(frame, over, name, work, level).assign(method=name) for name in methods if name != over]
    none = speed(frame.iloc[:0], over, over, work).assign(method=over)
    return pd.concat([one for one in found if len(one)] or [none], ignore_index=True)


def told(frame: pd.DataFrame, table: pd.DataFrame, over: str | dict | pd.Series, work: str) -> list[str]:
    """Of each row of `table` the speed of its method over `over`: a method, each case's (a Series) or each method's."""
    overs = over if isinstance(over, str) else table["case" if isinstance(over, pd.Series) else "method"].map(over)
    found = {}
    for name, own in table.assign(over=overs).groupby("over", observed=True):
        rows = against(frame[frame["case"].isin(own["case"])], name, set(own["method"]), work).to_dict("records")
        found |= {(row["case"], row["method"]): f"{verdicts.interval_text(row)} {row['outcome']}" for row in rows}
    return [found.get(key, ABSENT) for key in zip(table["case"], table["method"], strict=True)]


def fastest_dense(frame: pd.DataFrame, work: str) -> pd.Series:
    """Case -> the fastest of the dense kernels on one device."""
    table = frames.medians(frame, AXES, ms=frames.time_metric(frame, f"{work}_kernel"))
    table = table[table["method"].isin(RIVALS)].dropna(subset="ms").sort_values("ms", kind="stable")
    return table.drop_duplicates("case").set_index("case")["method"]


def times(frame: pd.DataFrame) -> pd.DataFrame:
    """Median times, a row a (case, method), the shortest sequence first: kernel time (on a CPU plain calls) and call
    time of both works in ms; the forward's speed over the fastest dense kernel with its 99% interval; `share`: its
    FLOPs a second of visited blocks over that kernel's; floors in percent, by visited blocks and measured ceilings.
    """
    names = {f"{work} {kind}": f"{work}_{kind}" for work in WORKS for kind in ("kernel", "call")}
    floors = {f"{work} floor": f"floor_{work}" for work in WORKS}
    table = frames.medians(frame, AXES, **names, **floors)
    if table.empty:
        return pd.DataFrame({"times": ["none was measured"]})
    share = shares(frame, frames.time_metric(frame, "forward_kernel"))
    table = table.merge(share[["case", "method", "share"]], "left")
    table["blocks visited"] = table["case"].map(law.densities(frame)).astype(float).round(4)
    rivals, made = fastest_dense(frame, "forward"), {f"{name} (ms)": rounded(table[name]) for name in names}
    made["vs dense"] = told(frame, table, rivals, "forward")
    made["over"] = table["case"].map(rivals).map(AXES.short, na_action="ignore")
    made["share of dense"] = table["share"].round(3)
    made |= {f"{of} of floor (%)": (100 * table[f"{of} floor"] / table[f"{of} kernel"]).round(1) for of in WORKS}
    return shown(smallest_first(table.assign(**made), AXES), AXES, [*_CASE, "blocks visited", "method", *made])


def shares(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A row a (case, method) with `share`: FLOPs a second over those of the fastest dense kernel in the same case."""
    table = frames.medians(frame, AXES, ms=metric, flops="flops")
    table["rate"] = table["flops"] / table["ms"]
    dense = table[table["method"].isin(RIVALS)].groupby("case")["rate"].max()
    return table.assign(share=table["rate"] / table["case"].map(dense)).dropna(subset="share")


def lists(frame: pd.DataFrame) -> pd.DataFrame:
    """What comes before the steady state, a row a (case, method), ms: our lists, built whole and sorted alone (both
    directions, from the blocks found); a first call, with what the backend makes of the lists and compiles, which
    PyTorch may have kept on disk; a later one; and of how many later ones the first is worth.
    """
    names = {"lists": "list_build", "sorting": "list_sort", "first call": "first_call", "later call": "forward_call"}
    table = frames.medians(frame, AXES, **names)
    if table["first call"].isna().all():
        return pd.DataFrame({"lists": ["none was timed"]})
    peak = frames.summary(frame, AXES, "list_peak_bytes").set_index("case")["median"]
    size = frames.summary(frame, AXES, "lists_bytes").drop_duplicates("case").set_index("case")["median"]
    for name in ("lists", "sorting"):  # of a case, not of the method whose rows hold it
        table[name] = table.groupby("case")[name].transform("max").mask(table["method"].isin(RIVALS))
    made = {f"{name} (ms)": rounded(table[name]) for name in names}
    made["peak / lists"] = (table["case"].map(peak) / table["case"].map(size)).astype(float).round(2)
    made["first / later"] = (table["first call"] / table["later call"]).round(1)
    return shown(smallest_first(table.assign(**made), AXES), AXES, [*_CASE, "method", *made])


def break_even(frame: pd.DataFrame) -> pd.DataFrame:
    """The law of each method, a row a (length, method, work): ms = slope x density + overhead, over random blocks as
    measured; its largest deviation; and d*, the density at which it takes as long as the best dense kernel.
    """
    found = []
    for work in WORKS:
        for row in law.laws(frame, work).to_dict("records"):
            one = row["law"]
            about = {name: row[name] for name in ("k_len", "shape", "batch", "block", "dtype", "method")}
            numbers = {"slope (ms)": one.slope, "overhead (ms)": one.overhead, "dense (ms)": row["dense"]}
            found.append(about | {"work": work} | numbers | {"worst off (%)": 100 * one.worst, "d*": even_text(one)})
    if not found:
        return pd.DataFrame({"law": ["no length has two densities and a dense time"]})
    return rounded(shown(pd.DataFrame(found), AXES, found[0]), 3)


def span_text(of: tuple[float, float, float]) -> str:
    """ "0.93 [0.91, 0.95]"."""
    text = "{:.2f} [{:.2f}, {:.2f}]" if of[1] > 0 else "{:.2f} [no interval]"
    return "none" if np.isnan(of[0]) else text.format(*of)


def even_text(one: Law) -> str:
    """d*, where it is a density: "0.93 [0.91, 0.95]", "at least 0.97"; and how many groups of processes have none."""
    even, text = one.even, span_text(one.even)
    if (even.high if even.low else even.ratio) >= 1:
        text = f"at least {min(even.low, 1.0):.2f}" if even.low else "at least 1.00 [no interval]"
    return text + f" ({one.lacks} groups have none)" * bool(one.lacks)


def answer(frame: pd.DataFrame) -> str:
    """The answer of the speed phase in a sentence: of the setting with the most cases d* of each length."""
    rows = law.blocks(frame)
    rows, _ = frames.focus(rows, AXES, metrics=(frames.time_metric(rows, "forward_kernel"), "block_density"))
    if not (judged := [*law.judged(rows)]):
        return "Not answered: no length holds valid times of two densities and of the best dense kernel."
    if why := frames.no_claim(rows):
        return f"Not answered here ({why})."
    said, last = {True: [], False: []}, {}  # by whether it is decided: what is said of each length
    for row, cells in judged:
        one, faster = row["law"], cells["outcome"].eq(FASTER)
        head, words = "up to a density of " * (0 < one.even.low < 1), even_text(one)
        if row["nowhere"]:
            head, words = "", "at no density measured"
        elif one.even.low >= 1:
            words = "at every density measured" if faster.all() else f"in {faster.sum()} of {len(cells)} cells"
        decided, (by, points) = row["nowhere"] or one.even.low > 0, row["by"].rsplit(", ", 1)
        first, last[decided] = last.get(decided) != (head, by), (head, by)
        said[decided].append(f"{head * first}{words} at {row['lengths']} ({row['by'] if first else points})")
    ran, sure, points = dict.fromkeys(row["dense kernels"] for row, _ in judged), *map(", ".join, said.values())
    text = f"lock-sparse attention is faster than the fastest dense kernel that ran ({'; '.join(ran)})"
    text = f"B{text} {sure}" if sure else f"It is undecided whether b{text}"
    text += f"{'; undecided' * bool(sure)}, by points of the density below which it is: {points}" * bool(points)
    return f"{text} ({AXES.setting(row)}, {row['dtype']})."
