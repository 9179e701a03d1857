"""Tables and figures of the attention study, from its records."""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.tables import ABSENT, rounded, shown, smallest_first
from blockshock_lib.studies.attention import law
from blockshock_lib.studies.attention.axes import AXES
from blockshock_lib.studies.attention.law import DENSE, RIVALS
from blockshock_lib.studies.attention.methods import METHODS
from blockshock_lib.studies.attention.phases import PHASES

WORKS = PHASES["attention_speed"].works
_CASE = ["k_len", "pattern", "shape", "block"]


def summary(frame: pd.DataFrame) -> list[str]:
    """Sentences at the end of a run's verdict line."""
    cases = frame.drop_duplicates("case")
    return [f"{cases['pattern'].nunique()} patterns in {len(cases)} cases"]


def speed(frame: pd.DataFrame, over: str, under: str, work: str = "step") -> pd.DataFrame:
    """`verdicts.ratio` of a work: in kernel time where both have one, else in call time."""
    frame = frames.complete(frame, AXES)
    kernel, call = (verdicts.ratio(frame, AXES, over, under, f"{work}_{kind}") for kind in ("kernel", "call"))
    parts = [part for part in (kernel, call[~call["case"].isin(kernel["case"])]) if len(part)]
    return pd.concat(parts, ignore_index=True) if parts else call


def against(frame: pd.DataFrame, over: str, methods: Iterable[str], work: str = "step") -> pd.DataFrame:
    """The rows of `speed` of several methods, with `method`."""
    found = [speed(frame, over, name, work).assign(method=name) for name in methods if name != over]
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
    rivals = fastest_dense(frame, "forward")
    table["vs dense"] = told(frame, table, rivals, "forward")
    table["over"] = table["case"].map(rivals).map(AXES.short, na_action="ignore")
    share = shares(frame, frames.time_metric(frame, "forward_kernel"))
    table = table.merge(share[["case", "method", "share"]], "left")
    table["blocks visited"] = table["case"].map(law.densities(frame)).astype(float)
    made = {f"{name} (ms)": rounded(table[name]) for name in names}
    made |= {
        f"{work} of floor (%)": (100 * table[f"{work} floor"] / table[f"{work} kernel"]).round(1) for work in WORKS
    }
    made |= {"share of dense": table["share"].round(3), "blocks visited": table["blocks visited"].round(4)}
    columns = [*_CASE, "blocks visited", "method", *(f"{name} (ms)" for name in names)]
    columns += ["vs dense", "over", "share of dense", *(f"{work} of floor (%)" for work in WORKS)]
    return shown(smallest_first(table.assign(**made), AXES), AXES, columns)


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
            about = {name: row[name] for name in [*law.KEYS, "method"]} | {"work": work}
            numbers = {"slope (ms)": one.slope, "overhead (ms)": one.overhead, "dense (ms)": row["dense"]}
            found.append(about | numbers | {"worst off (%)": 100 * one.worst, "d*": even_text(one.even)})
    if not found:
        return pd.DataFrame({"law": ["no length has two densities and a dense time"]})
    return rounded(shown(pd.DataFrame(found), AXES, found[0]), 3)


def even_text(even: tuple[float, float, float]) -> str:
    """ "0.93 [0.91, 0.95]"."""
    if np.isnan(even[0]):
        return "none"
    return "{:.2f} [{:.2f}, {:.2f}]".format(*even) if even[1] > 0 and even[2] < 100 else f"{even[0]:.2f} [no interval]"


def answer(frame: pd.DataFrame) -> str:
    """The answer of the speed phase in a sentence: the largest d* of each length."""
    table = law.laws(frame)
    if table.empty:
        return "Not answered: no length holds valid times of two densities and of the best dense kernel."
    if why := frames.no_claim(table):
        return f"Not answered here ({why})."
    table = law.fastest(table[table["block"].eq(table["block"].max())])
    shape = table["shape"].iloc[-1]
    table = table[table["shape"].eq(shape)]
    each, rivals, known = {}, [], True  # what is said -> the lengths of which it is said
    for row in table.to_dict("records"):
        even, by = row["law"].even, f" ({AXES.short(row['method'])})"
        name = "PyTorch's dense attention" if row["rival"] == DENSE else METHODS[row["rival"]].label
        rivals += [name] if name not in rivals else []
        if not 0 < even.low <= even.high < np.inf:
            known &= not even.ratio > 0  # NaN where nothing beats it
        if not even.ratio > 0:
            said = "nowhere", ""
        elif (even.low if known else even.ratio) >= 1:
            said = "at any density", by
        else:
            said = f"below a density of {even_text(even)}", by
        each.setdefault(said, []).append(str(row["k_len"]))
    at = [" and ".join(filter(None, (", ".join(lengths[:-1]), lengths[-1]))) for lengths in each.values()]
    parts = [f"{words} at {lengths} keys{by}" for (words, by), lengths in zip(each, at, strict=True)]
    said = f"Block-sparse attention is faster than {' and '.join(rivals)} {', '.join(parts)} ({shape})."
    return said if known else f"No claim, for an interval is missing. By the points: {said[0].lower()}{said[1:]}"
