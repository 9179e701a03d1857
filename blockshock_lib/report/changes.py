"""Two records frames in; what became wrong, slower or larger from the one to the other out, as a table."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, interval, verdicts
from blockshock_lib.report.axes import Axes
from blockshock_lib.report.tables import ABSENT, varying

GROWTH = 1.001  # memory is counted, not sampled: above this it has grown
REGRESSION, IMPROVED, UNDECIDED = "regression", "improved", "no change shown"
SAME, NO_INTERVAL, NEITHER = "same", "no interval: one group", "passed in neither"
_CHECKED = {(True, True): SAME, (True, False): REGRESSION, (False, True): IMPROVED, (False, False): NEITHER}
PLAIN = "time of plain calls"  # what a kernel time is on a CPU: it has no CUDA graphs
# What "allow" lifts: a case may then find its like among those that differ in these.
LOOSE = {"hardware": ("device", "emulated"), "dtype": ("dtype",)}
_NUMBERS = ("a", "b", "ratio", "low", "high")
_CHECK = dict.fromkeys(_NUMBERS, np.nan) | dict(what="check", unit="", part="", groups_a=0, groups_b=0)


class Compared(NamedTuple):
    rows: pd.DataFrame  # regressions first (checks before the rest), then the largest `ratio` = b / a
    only: pd.DataFrame  # what one run alone has, a row a (case, method): `run` ("a" or "b"), method and the case
    each: float  # the level of each interval, so that all of them together hold at LEVEL
    intervals: int


def _key(axes: Axes) -> list[str]:
    return ["phase", *axes.case_columns[1:]]


def cases(runs: Sequence[pd.DataFrame], axes: Axes) -> list[pd.DataFrame]:
    """The cases of each run, a row each: `case`, the phase and the case's own columns; `arm`, methods and seed where in
    one of the runs these alone tell such cases apart, as those that are trained.
    """
    found = []
    for frame in runs:
        rows = frames.complete(frame, axes)
        methods = rows.groupby("case")["method"].agg(lambda found: " ".join(axes.ordered(found)))
        rows = rows.drop_duplicates("case").reset_index(drop=True)
        found.append(rows[["case", *_key(axes)]].assign(arm=rows["case"].map(methods) + " " + rows["seed"].astype(str)))
    keys = [one[_key(axes)].apply(lambda row: str([*row]), axis=1) for one in found]
    several = {key for one in keys for key in one[one.duplicated()]}
    return [one.assign(arm=one["arm"].where(key.isin(several), "")) for one, key in zip(found, keys, strict=True)]


def pairs(a: pd.DataFrame, b: pd.DataFrame, loose: Iterable[str] = ()) -> dict[str, str]:
    """Case of `b` -> its like in `a` (both from `cases`): first alike in all columns, then, of those left over, in all
    but the columns of `loose`, where that leaves one case on either side.
    """
    found: dict[str, str] = {}
    every = [name for name in a.columns if name != "case"]
    for columns in (every, [name for name in every if name not in set(loose)]):
        left = a[~a["case"].isin(found.values())].astype(str), b[~b["case"].isin(found)].astype(str)
        one, other = (side.drop_duplicates(columns, keep=False)[["case", *columns]] for side in left)
        alike = one.merge(other, on=columns, suffixes=("_a", "_b"))
        found |= dict(zip(alike["case_b"], alike["case_a"], strict=True))
    return found


def compare(a: pd.DataFrame, b: pd.DataFrame, axes: Axes, loose: Iterable[str] = (), b_short: bool = False) -> Compared:
    """What changed from run `a`, the older, to run `b`: checks, kernel and call time of each of `axes.times`, and
    memory, `axes.bytes`. A regression is a check that passed in `a` and not in `b` (`b_short`, records are missing from
    `b`: or is not there), a metric that `b` could not measure, memory whose least in `b` is more than 0.1% above its
    most in `a`, a time whose interval lies above 1: where `a` is several runs, that which predicts a further one; of
    one interval.welch_interval, none with one group on a side. All intervals together hold at LEVEL (Bonferroni).
    """
    known = cases((a, b), axes)
    alike, b = pairs(*known, loose), frames.complete(b, axes)
    # From here a case of b has the name of its like in a.
    b, other = (side.assign(case=[alike.get(case, f"{case} of b") for case in side["case"]]) for side in (b, known[1]))
    mine, theirs = ({row["case"]: row for row in side.to_dict("records")} for side in (known[0], other))
    about = {}
    for case in mine | theirs:
        x, y = mine.get(case, theirs.get(case)), theirs.get(case, mine.get(case))
        about[case] = {n: x[n] if str(x[n]) == str(y[n]) else f"{x[n]} → {y[n]}" for n in x}
    metrics = {metric: (words, "B", "") for metric, words in axes.bytes.items()}
    for stem, work in axes.times.items():
        metrics |= {f"{stem}_{kind}": (f"{kind} time{work.note}", "ms", stem) for kind in ("kernel", "call")}
    checks, missing, groups = zip(*(_side(side, metrics) for side in (a, b)), strict=True)
    both = [key for key in groups[0] if key in groups[1] and metrics[key[2]][1] == "ms"]
    times = {name: [_cell(x) for key, x in groups[0].items() if key[2] == name] for name in {key[2] for key in both}}
    between = {metric: interval.between_runs(found) for metric, found in times.items()}
    several = {run for side in groups[0].values() for run, _ in side}
    intervals = sum(len(several) > 1 or min(len(side[key]) for side in groups) > 1 for key in both)
    each = 1 - (1 - interval.LEVEL) / max(1, intervals)
    rows, only = [], []
    for case, method in ((c, m) for c in about for m in axes.ordered(m for x, m in checks[0] | checks[1] if x == c)):
        cell, (was, now) = about[case] | {"method": method}, (side.get((case, method)) for side in checks)
        if was and now:
            outcome = _CHECKED[was[0] == "passed", now[0] == "passed"]
            note = "passed" if outcome == SAME else f"{was[0]} → {now[0]}: {now[1] or was[1]}".removesuffix(": ")
            rows.append(cell | _CHECK | {"outcome": outcome, "note": note})
        elif b_short and was and was[0] == "passed":
            rows.append(cell | _CHECK | {"outcome": REGRESSION, "note": "passed → its record is missing"})
        else:
            only.append(cell | {"run": "a" if was else "b"})
        for metric, (words, unit, work) in metrics.items():
            key = case, method, metric
            words = words.replace("kernel time", PLAIN) if cell["device"] == "cpu" else words
            row, x, y = cell | _CHECK | dict(what=words, unit=unit, part=work), groups[0].get(key), groups[1].get(key)
            if x and y:
                found = _bytes(x, y) if unit == "B" else _time(x, y, each, between[metric])
                rows.append(row | {"note": "", "groups_a": len(x), "groups_b": len(y)} | found)
            elif x and key in missing[1]:
                rows.append(row | {"outcome": REGRESSION, "note": f"in b: {missing[1][key]}"})
    columns = ["outcome", "what", "part", "method", *_key(axes), "unit", *_NUMBERS, "groups_a", "groups_b", "note"]
    table = pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(_NUMBERS, float))
    bare, regressed = table["ratio"].isna(), table["outcome"].eq(REGRESSION)
    table["place"] = np.select([regressed & bare, regressed, ~bare], [0, 1, 2], 3)
    ties = {"kind": "stable", "key": lambda column: column.round(9)}  # the last bits depend on the processor
    table = table.sort_values(["place", "ratio"], ascending=[True, False], ignore_index=True, **ties)
    return Compared(table[columns], pd.DataFrame(only, columns=["run", "method", *_key(axes)]), each, intervals)


def _side(frame: pd.DataFrame, metrics: Iterable[str]) -> tuple[dict, dict, dict]:
    # (case, method) -> its worst check: outcome, reason; (case, method, metric) -> why it has no value, or its groups.
    outcomes = frames.checks(frame)
    order = outcomes["outcome"].map(frames.OUTCOMES.index).sort_values(kind="stable").index
    checks = {(row.case, row.method): (row.outcome, str(row.reason)) for row in outcomes.loc[order].itertuples()}
    rows = frames.complete(frame)[list(frames.COLUMNS)]
    rows = rows[rows["metric"].isin([*metrics, "check"])]
    lost = rows[~rows["status"].eq("ok") & rows["metric"].ne("check")]
    missing = {(row.case, row.method, row.metric): f"{row.status}: {row.reason}" for row in lost.itertuples()}
    groups: dict[tuple, dict[tuple, np.ndarray]] = {}
    there = set(rows["metric"].unique())
    for metric in (one for one in metrics if one in there):
        found = frames.samples(rows, metric).sort_values("repeat", kind="stable")
        for (*cell, run, group), values in found.groupby(["case", "method", "run", "group"])["value"]:
            groups.setdefault((*cell, metric), {})[run, group] = values.to_numpy(dtype=float)
    return checks, missing, groups


def _bytes(a: Mapping[tuple, np.ndarray], b: Mapping[tuple, np.ndarray]) -> dict[str, Any]:
    (low_a, high_a), (low_b, high_b) = (
        (min(map(np.min, side.values())), max(map(np.max, side.values()))) for side in (a, b)
    )
    grown, shrunk = low_b > high_a * GROWTH, high_b * GROWTH < low_a
    ratio = dict.fromkeys(("ratio", "low", "high"), high_b / high_a) if high_a else {}
    note = {"note": f"0 B → {high_b:,.0f} B"} if grown and not high_a else {}
    return {"a": high_a, "b": high_b, "outcome": REGRESSION if grown else IMPROVED if shrunk else SAME} | ratio | note


def _cell(side: Mapping[tuple, np.ndarray]) -> interval.Cell:
    return interval.by_run(side, interval.log_medians(side.values()))


def _time(
    a: Mapping[tuple, np.ndarray], b: Mapping[tuple, np.ndarray], level: float, between: interval.Between
) -> dict[str, Any]:
    older = _cell(a)
    means = [float(np.exp(np.mean([logs.mean() for logs in cell.values()]))) for cell in (older, _cell(b))]
    if len(older) > 1:  # of b / a: as wide as a's prediction of a further run
        ahead, ratio = interval.predicted(older, between, len(b), level), means[1] / means[0]
        found = interval.Interval(ratio, ratio * ahead.low / ahead.ratio, ratio * ahead.high / ahead.ratio)
    else:
        found = interval.welch_interval(*map(interval.log_medians, (b.values(), a.values())), level)
    outcome = REGRESSION if found.low > 1 else IMPROVED if found.high < 1 else UNDECIDED
    outcome = outcome if len(older) > 1 or min(len(a), len(b)) > 1 else NO_INTERVAL
    return dict(zip("ab", means, strict=True)) | found._asdict() | {"outcome": outcome}


def readable(rows: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    """`rows` of `compare` as text, in their order, with those columns of a case that differ among them."""
    differ = [name for name in ("phase", *varying(rows, axes)) if rows[name].nunique() > 1]
    table = rows[["outcome", "what", "method", axes.x, axes.y, *differ]].rename(columns=axes.headers)
    records = rows.to_dict("records")
    made = {f"run {name}": [_amount(row[name], row["unit"]) for row in records] for name in "ab"}
    made["b / a"] = [ABSENT if pd.isna(row["ratio"]) else _ratio(row) for row in records]
    made["groups"] = [f"{row['groups_a']} and {row['groups_b']}" if row["groups_a"] else ABSENT for row in records]
    return table.assign(method=rows["method"].map(axes.label), **made, note=rows["note"])


def sentence(row: Mapping[str, Any], axes: Axes) -> str:
    """One row in words: "kernel time of merge sort at n=4096, order=random: 1.10x [1.07, 1.13]"."""
    value = row["note"] if pd.isna(row["ratio"]) else _ratio(row)
    return f"{row['what']} of {axes.label(row['method'])} at {axes.case(row)}: {value}"


def _ratio(row: Mapping[str, Any]) -> str:
    return f"{row['ratio']:.4f}x" if row["unit"] == "B" else verdicts.interval_text(row)


def _amount(value: float, unit: str) -> str:
    return ABSENT if pd.isna(value) else f"{value:,.0f} B" if unit == "B" else f"{value:.4g} {unit}"
