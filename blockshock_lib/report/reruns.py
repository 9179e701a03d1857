"""What several runs of one reference say of each other, and of a further run: see `report.interval`."""

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, interval
from blockshock_lib.report.axes import Axes
from blockshock_lib.report.interval import LEVEL, Cell


def cells(frame: pd.DataFrame, over: str, under: str, metric: str) -> dict[str, Cell]:
    """Case -> run -> log t(over) / t(under), one a fresh group in which both have valid times; "" takes 1 ms."""
    found = {}
    for case, rows in frames.samples(frame, metric).groupby("case", sort=False):
        times, others = (frames.groups(rows[rows["method"].eq(method)]) for method in (over, under))
        others = others if under else dict.fromkeys(times, np.ones(1))
        if shared := [key for key in times if key in others]:
            logs = interval.log_ratios(*([side[key] for key in shared] for side in (times, others)))
            found[case] = interval.by_run(shared, logs)
    return found


def table(frame: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    """How well a further run is foretold, a row a (metric, method): its ratios over the baseline, of the baseline its
    times. `runs`, `cells`; half-widths in %, medians over cells: `mean` of the interval by which verdicts are said,
    `further` of the one that predicts; how many values of single runs the other runs `caught`, `of` all; `drift`.
    """
    found = []
    for metric in _metrics(axes):
        for method in axes.ordered(frames.samples(frame, metric)["method"]):
            sides = (method, "") if method == axes.over else (axes.over, method)
            if several := [*cells(frame, *sides, metric).values()]:
                found.append({"metric": metric, "method": method, "several": several})
    for row in found:
        several = row.pop("several")
        ends = [(mean.high / mean.ratio, far.high / far.ratio) for mean, far in interval.intervals(several)]
        mean, further = 100 * (np.median(ends, axis=0) - 1)
        caught, of = interval.caught(several)
        row |= {"runs": max(map(len, several)), "cells": len(several), "mean": mean, "further": further}
        shifts = interval.drift(several, 1 - (1 - LEVEL) / len(found)).items()
        row |= {"caught": caught, "of": of, "drift": ", ".join(f"{run} {shift - 1:+.1%}" for run, shift in shifts)}
    columns = ["metric", "method", "runs", "cells", "mean", "further", "caught", "of", "drift"]
    return pd.DataFrame(found, columns=columns)


def foretold(frame: pd.DataFrame, further: pd.DataFrame, axes: Axes) -> tuple[int, int]:
    """How many ratios over the baseline of the run `further` lie where the runs of `frame` predict them, of how many:
    kernel and call times of every case that both hold.
    """
    inside = []
    for metric in _metrics(axes):
        for method in set(frames.samples(further, metric)["method"]) - {axes.over}:
            known, new = (cells(side, axes.over, method, metric) for side in (frame, further))
            between = interval.between_runs([*known.values()])
            for case in known.keys() & new.keys():
                (logs,) = new[case].values()
                inside.append(interval.holds(interval.predicted(known[case], between, len(logs)), logs))
    return sum(inside), len(inside)


def _metrics(axes: Axes) -> list[str]:
    return [f"{stem}_{kind}" for stem in axes.times for kind in ("kernel", "call")]


def sentences(frame: pd.DataFrame, axes: Axes) -> list[str]:
    """`table` in words; none of a single run."""
    several = frames.complete(frame).groupby("case")["run"].nunique().gt(1).any()
    rows = table(frame, axes) if several else pd.DataFrame({"runs": []})
    rows = rows[rows["runs"].gt(1)]
    if rows.empty:
        return []
    caught, of = rows["caught"].sum(), rows["of"].sum()
    said = (
        f"{over_text(rows['runs'].max())}: means are known within {rows['mean'].median():.1f}%, a further run within "
    )
    said += f"{rows['further'].median():.1f}% (99%); the others predicted {caught} of {of} values of a run "
    said += f"({caught / of:.0%})"
    drifts = [
        f"{row.metric.rpartition('_')[2]} time of {axes.label(row.method)}{over}: {row.drift} against the others"
        for row in rows[rows["drift"].ne("")].itertuples()
        for over in ["" if row.method == axes.over else f", speed over {axes.short(axes.over)}"]
    ]
    return [said, f"RUNS LIE APART: {'; '.join(drifts)}" if drifts else "no drift between runs"]


def over_text(runs: int) -> str:
    """What an interval of so many runs is over."""
    return f"{runs} runs" if runs > 1 else "the groups of one run: others differ by more" if runs else "nothing"
