"""Two records frames in, what changed from the one to the other out: a row a thing compared, regressions first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from blockshock_lib.report import cells, labels
from blockshock_lib.report.interval import Interval, welch_interval

LEVEL = 0.99  # of all intervals of a table together
GROWTH = 1.001  # memory is counted, not sampled: above this it has grown
REGRESSION, IMPROVED, UNDECIDED = "regression", "improved", "no change shown"
SAME, NO_INTERVAL, NEITHER = "same", "no interval: one group", "passed in neither"
# Only what a user waits for as a whole is guarded: each further time would widen all intervals of the table.
WORKS = {"forward": "", "pass": ", forward + dX", "step": ", step"}  # each holds the one before
TIMES = {f"{work}_{kind}": f"{kind} time{more}" for work, more in WORKS.items() for kind in ("kernel", "call")}
BYTES = {
    "weight_bytes": "weight",
    "weights_bytes_held": "weights held",
    "copies_bytes": "packed copies",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "activation_bytes": "activations",
    "peak_bytes": "peak memory",
}
CHECK = "check"
PLAIN = "time of plain calls"  # what a kernel time is on a CPU

KEY = ["phase", "shape", "batch", "dtype", "mask", "workload", "world_size", "emulated", "device", "optimizer"]
ABOUT = [*KEY, "in_features", "out_features"]
COLUMNS = [
    "outcome",
    "what",
    "work",
    "method",
    *ABOUT,
    "unit",
    "a",
    "b",
    "ratio",
    "low",
    "high",
    "groups_a",
    "groups_b",
    "note",
]
# What "allow" lifts: a case may then find its like among those that differ in these.
LOOSE = {"hardware": ("device", "emulated"), "dtype": ("dtype",)}


class Compared(NamedTuple):
    """What `compare` gives.

    Attributes:
        rows: COLUMNS, regressions first (checks before the rest), then the largest ratio; `a`, `b` in `unit`, `ratio` =
            b / a with `low` and `high`; `work` is what a time is of, one of WORKS, "" for what is no time.
        only: what one run alone has, a row a (case, method): "run" ("a" or "b"), "method" and the columns of ABOUT.
        each: the level of each interval, so that all of them together hold at LEVEL.
        intervals: how many intervals there are.
    """

    rows: pd.DataFrame
    only: pd.DataFrame
    each: float
    intervals: int


class Side(NamedTuple):
    """One run, by (case, method): the worst outcome of its check with the reason, the samples of each group, the least
    and the largest number of bytes, and why a metric has no value.
    """

    checks: dict[tuple, tuple[str, str]]
    times: dict[str, dict[tuple, list[np.ndarray]]]
    bytes: dict[str, dict[tuple, tuple[float, float, int]]]
    missing: dict[str, dict[tuple, str]]


def cases(frame: pd.DataFrame) -> pd.DataFrame:
    """The cases of a run, a row each: `case` and the columns of ABOUT."""
    return cells.complete(frame).drop_duplicates("case")[["case", *ABOUT]].reset_index(drop=True)


def pairs(a: pd.DataFrame, b: pd.DataFrame, loose: Iterable[str] = ()) -> list[tuple[dict, dict]]:
    """The cases (see `cases`) of `a` and `b` that are alike: first in all of KEY, then those left over in all but the
    columns of `loose`, where that leaves one case on either side.
    """
    found: list[tuple[dict, dict]] = []
    left = [side.to_dict("records") for side in (a, b)]
    for columns in (KEY, [name for name in KEY if name not in set(loose)]):
        sides: list[dict[tuple, list[dict]]] = [{}, {}]
        for side, rows in zip(sides, left, strict=True):
            for row in rows:
                side.setdefault(tuple(row[name] for name in columns), []).append(row)
        alike = [(side, sides[1][key]) for key, side in sides[0].items() if key in sides[1]]
        new = [(one[0], other[0]) for one, other in alike if len(one) == len(other) == 1]
        found += new
        taken = [{pair[i]["case"] for pair in new} for i in (0, 1)]
        left = [[row for row in rows if row["case"] not in taken[i]] for i, rows in enumerate(left)]
    return found


def compare(a: pd.DataFrame, b: pd.DataFrame, *, loose: Iterable[str] = (), b_short: bool = False) -> Compared:
    """What changed from run `a`, the older, to run `b`: checks, kernel and call time of a forward, of forward + dX and
    of a training step, and memory: peak, weights, and the parts of a training step's.

    Args:
        a, b: records frames.
        loose: columns of KEY in which cases may differ; see `pairs`.
        b_short: whether records are missing from `b`: then what passed in `a` and is not in `b` is a regression,
            where it is otherwise something that `b` was not asked for.

    A check that passed in `a` and not in `b` is a regression, and so is a metric that `b` tried and could not measure.
    A time is one where its interval (interval.welch_interval over the groups of either run) lies above 1. All intervals
    of the table together hold at LEVEL: each has the level 1 - (1 - LEVEL) / their number (Bonferroni). Memory is
    counted: it has grown where the least of `b` is more than 0.1% above the most of `a`.
    One group on a side: no interval, so no regression in time either.
    """
    sides = _side(a), _side(b)
    rows: list[dict[str, Any]] = []
    only: list[dict[str, Any]] = []
    timed: list[tuple[dict, list[np.ndarray], list[np.ndarray]]] = []
    asked = [_methods(side) for side in sides]
    known = cases(a), cases(b)
    alike = pairs(*known, loose)
    for one, other in alike:
        about = {name: _both(one[name], other[name]) for name in ABOUT}
        mine, theirs = asked[0].get(one["case"], set()), asked[1].get(other["case"], set())
        for method in labels.methods_in(mine | theirs):
            cell = about | {"method": method}
            keys = (one["case"], method), (other["case"], method)
            if method not in mine or method not in theirs:
                only += _alone(sides, rows, cell, "a" if method in mine else "b", keys, b_short)
                continue
            rows.append(cell | _check(sides[0].checks[keys[0]], sides[1].checks[keys[1]]))
            for metric in (*TIMES, *BYTES):
                have = [keys[i] in (side.times | side.bytes)[metric] for i, side in enumerate(sides)]
                what = cell | {"what": _name(metric, about), "unit": "ms" if metric in TIMES else "B"}
                what["work"] = metric.rpartition("_")[0] if metric in TIMES else ""
                if all(have) and metric in TIMES:
                    values = [sides[i].times[metric][keys[i]] for i in (0, 1)]
                    timed.append((what, *values))
                elif all(have):
                    rows.append(what | _bytes(*(sides[i].bytes[metric][keys[i]] for i in (0, 1))))
                elif have[0] and keys[1] in sides[1].missing.get(metric, {}):
                    rows.append(what | {"outcome": REGRESSION, "note": f"in b: {sides[1].missing[metric][keys[1]]}"})
    for i, (name, table) in enumerate(zip("ab", known, strict=True)):
        paired = {pair[i]["case"] for pair in alike}
        for row in table[~table["case"].isin(paired)].to_dict("records"):
            for method in labels.methods_in(asked[i].get(row["case"], set())):
                cell = {key: row[key] for key in ABOUT} | {"method": method}
                only += _alone(sides, rows, cell, name, ((row["case"], method),) * 2, b_short)
    intervals = sum(len(x) > 1 and len(y) > 1 for _, x, y in timed)
    each = 1 - (1 - LEVEL) / max(1, intervals)
    rows += [what | _time(x, y, each) for what, x, y in timed]
    return Compared(_ordered(rows), pd.DataFrame(only, columns=["run", "method", *ABOUT]), each, intervals)


def _side(frame: pd.DataFrame) -> Side:
    checks: dict[tuple, tuple[str, str]] = {}
    found = cells.checks(frame)
    order = {name: i for i, name in enumerate(("passed", "unsupported", "timeout", "oom", "failed"))}
    for row in found.sort_values("outcome", key=lambda names: names.map(order)).itertuples(index=False):
        checks[row.case, row.method] = row.outcome, str(row.reason)  # the worst comes last
    times = {metric: _groups(cells.samples(frame, metric)) for metric in TIMES}
    sizes = {
        metric: {
            key: (min(map(np.min, groups)), max(map(np.max, groups)), len(groups))
            for key, groups in _groups(cells.samples(frame, metric)).items()
        }
        for metric in BYTES
    }
    rows = cells.complete(frame)
    rows = rows[~rows["status"].eq("ok") & rows["metric"].isin([*TIMES, *BYTES])]
    missing: dict[str, dict[tuple, str]] = {}
    for row in rows.itertuples(index=False):
        missing.setdefault(row.metric, {})[row.case, row.method] = f"{row.status}: {row.reason}"
    return Side(checks, times, sizes, missing)


def _groups(rows: pd.DataFrame) -> dict[tuple, list[np.ndarray]]:
    """(case, method) -> the values of each group."""
    found: dict[tuple, list[np.ndarray]] = {}
    for (case, method, _, _), values in rows.groupby(["case", "method", "run", "group"], sort=True)["value"]:
        found.setdefault((case, method), []).append(values.to_numpy(dtype=float))
    return found


def _methods(side: Side) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for case, method in side.checks:
        found.setdefault(case, set()).add(method)
    return found


def _alone(sides: tuple[Side, Side], rows: list[dict], cell: dict, run: str, keys: tuple, b_short: bool) -> list[dict]:
    """The entry of what one run alone has; where `b` lost a record that passed in `a`, a regression instead."""
    if run == "a" and b_short and sides[0].checks[keys[0]][0] == "passed":
        rows.append(cell | {"what": CHECK, "unit": "", "outcome": REGRESSION, "note": "passed → its record is missing"})
        return []
    return [cell | {"run": run}]


def _both(one: object, other: object) -> object:
    return one if one == other else f"{one} → {other}"


def _name(metric: str, about: Mapping[str, object]) -> str:
    # A CPU has no CUDA graphs: there it is the time of plain calls in a loop.
    name = (TIMES | BYTES)[metric]
    return name.replace("kernel time", PLAIN) if about["device"] == "cpu" else name


def _check(one: tuple[str, str], other: tuple[str, str]) -> dict[str, Any]:
    was, now = one[0], other[0]
    if was == now == "passed":
        return {"what": CHECK, "unit": "", "outcome": SAME, "note": "passed"}
    outcome = REGRESSION if was == "passed" else IMPROVED if now == "passed" else NEITHER
    reason = other[1] or one[1]
    return {"what": CHECK, "unit": "", "outcome": outcome, "note": f"{was} → {now}{f': {reason}' if reason else ''}"}


def _bytes(one: tuple[float, float, int], other: tuple[float, float, int]) -> dict[str, Any]:
    grown, shrunk = other[0] > one[1] * GROWTH, other[1] * GROWTH < one[0]
    outcome = REGRESSION if grown else IMPROVED if shrunk else SAME
    ratio = other[1] / one[1] if one[1] else np.nan
    counts = {"groups_a": one[2], "groups_b": other[2]}
    note = f"0 B → {other[1]:,.0f} B" if grown and not one[1] else ""
    found = {"outcome": outcome, "a": one[1], "b": other[1], "ratio": ratio, "low": ratio, "high": ratio}
    return found | counts | {"note": note}


def _time(one: list[np.ndarray], other: list[np.ndarray], level: float) -> dict[str, Any]:
    found: Interval = welch_interval(other, one, level)
    if min(len(one), len(other)) == 1:
        outcome = NO_INTERVAL
    else:
        outcome = REGRESSION if found.low > 1 else IMPROVED if found.high < 1 else UNDECIDED
    middle = [float(np.exp(np.mean(np.log([np.median(values) for values in side])))) for side in (one, other)]
    counts = {"groups_a": len(one), "groups_b": len(other)}
    return {"outcome": outcome, "a": middle[0], "b": middle[1], **found._asdict(), **counts}


def _ordered(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """COLUMNS of `rows`: regressions first, checks before the rest; then by ratio, those without one last."""
    # A column that no row fills would be one of numbers, which takes no text.
    kinds = dict.fromkeys(("a", "b", "ratio", "low", "high"), float) | dict.fromkeys(("note", "work"), object)
    counts = ("groups_a", "groups_b")
    table = pd.DataFrame(rows, columns=COLUMNS).astype(kinds)
    table = table.fillna({"note": "", "work": ""} | dict.fromkeys(counts, 0)).astype(dict.fromkeys(counts, int))
    bare, regressed = table["ratio"].isna(), table["outcome"].eq(REGRESSION)
    place = np.select([regressed & bare, regressed, ~bare], [0, 1, 2], 3)
    order = pd.DataFrame({"place": place, "ratio": -table["ratio"]}).sort_values(["place", "ratio"], kind="stable")
    return table.loc[order.index].reset_index(drop=True)
