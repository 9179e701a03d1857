"""What several runs of one reference say of each other, and of a further run: see `report.interval`."""

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, interval
from blockshock_lib.report.axes import Axes
from blockshock_lib.report.interval import Cell

ASKED = 0.97  # of a further run's values inside the interval that predicts them


def cells(frame: pd.DataFrame, over: str, under: str, metric: str) -> dict[str, Cell]:
    """Case -> run -> log t(over) / t(under), one a fresh group in which both have valid times; "" takes 1 ms. Without
    `metric`, `frame` holds samples of one already.
    """
    rows = frames.complete(frame)
    rows = rows[rows["method"].isin([over, under])]
    rows = frames.samples(rows, metric) if metric else rows
    medians = rows.groupby(["method", "case", "run", "group"])["value"].median().astype(float)
    logs, shared = dict(zip(medians.index, np.log(medians), strict=True)), {case: {} for case in rows["case"].unique()}
    for (method, case, run, group), log in logs.items():
        log -= logs.get((under, case, run, group), np.nan) if under else 0.0
        if method == over and not np.isnan(log):
            shared[case].setdefault(run, []).append(log)
    return {case: {run: np.array(one) for run, one in cell.items()} for case, cell in shared.items() if cell}


def foretold(frame: pd.DataFrame, further: pd.DataFrame, axes: Axes) -> tuple[int, int]:
    """How many ratios over the baseline of the run `further` lie where the runs of `frame` predict them, of how many:
    kernel and call times of every case that both hold.
    """
    inside = []
    for metric in _metrics(axes):
        sides = [frames.samples(side, metric) for side in (frame, further)]
        for method in set(sides[1]["method"].unique()) - {axes.over}:
            known, new = (cells(side, axes.over, method, "") for side in sides)
            both = [(known[case], *new[case].values()) for case in known if case in new]
            inside += interval.foretold(*zip(*both, strict=True)) if both else []
    return sum(inside), len(inside)


def _metrics(axes: Axes) -> list[str]:
    return [f"{stem}_{kind}" for stem in axes.times for kind in ("kernel", "call")]


def sentences(frame: pd.DataFrame, axes: Axes) -> list[str]:
    """How well means are known and a further run is foretold, how many values of single runs the others predicted, in
    kernel and in call time, and how far the runs lie apart: of the baseline its times, of the other methods their
    ratios over it; none of a single run.
    """
    if not frames.complete(frame).groupby("case")["run"].nunique().gt(1).any():
        return []
    found = {}
    for metric in _metrics(axes):
        for method in axes.ordered(frames.samples(frame, metric)["method"]):
            own = method == axes.over
            several = [*cells(frame, *((method, "") if own else (axes.over, method)), metric).values()]
            if max(map(len, several), default=0) > 1:
                words = f"{metric.rpartition('_')[2]} time of {axes.label(method)}"
                found[words if own else f"{words}, speed over {axes.short(axes.over)}"] = several
    if not found:
        return []
    runs, told = max(len(cell) for several in found.values() for cell in several), []
    for kind in ("kernel", "call"):
        alike = [several for words, several in found.items() if words.startswith(kind)]
        ends = [[(m.high / m.ratio, f.high / f.ratio) for m, f in interval.intervals(several)] for several in alike]
        if ends:
            mean, further = np.median([np.median(one, axis=0) for one in ends], axis=0) - 1
            caught = [hit for several in alike for hit in interval.caught(several)]
            counts = f"the others predicted {sum(caught)} of {len(caught)} ({np.mean(caught):.1%})" if caught else ""
            counts += f", fewer than {ASKED:.0%}" * bool(caught and np.mean(caught) < ASKED)
            counts = counts or "single groups predict no run"
            told.append(f"{kind} times known within {mean:.1%}, of a further run within {further:.1%} (99%), {counts}")
    said = f"{over_text(runs)}: {'; '.join(told)}"
    return [said, *_drift(found)]


def _drift(found: dict[str, list[Cell]]) -> list[str]:
    drifts = [(words, one) for words in found if (one := interval.drift(found[words], tests=len(found)))]
    drifts.sort(key=lambda one: -abs(one[1].shift))
    ways = [("RUNS LIE APART: ", "most"), ("runs differ, by no more than machines do: ", "scatter")]
    ways = [(lead, [one for one in drifts if abs(one[1].shift) > getattr(one[1], end)]) for lead, end in ways]
    lead, drifts = next((way for way in ways if way[1]), ("no drift between runs, the furthest: ", drifts[:1]))
    said = [
        f"{words}: {one.run} {np.expm1(one.shift):+.1%} against the others (up to {np.expm1(one.most):.1%} is usual)"
        for words, one in drifts[:3]
    ]
    more = f"; {len(drifts) - 3} more" if len(drifts) > 3 else ""
    return [f"{lead}{'; '.join(said)}{more}"] if said else []


def over_text(runs: int) -> str:
    """What an interval of so many runs is over."""
    return f"{runs} runs" if runs > 1 else "the groups of one run: others differ by more" if runs else "nothing"
