"""Which method to use: of each case the fastest, those that nothing here tells from it, and by how much it leads."""

import textwrap
from collections.abc import Mapping
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from blockshock_lib.report import figures, frames, plots, verdicts
from blockshock_lib.report.axes import Axes
from blockshock_lib.report.tables import widest


def fastest(frame: pd.DataFrame, axes: Axes, metric: str) -> pd.DataFrame:
    """A row a case, smallest first: its columns, `size` and `best`, the methods with the least `metric`: the first of
    them, and each whose ratio to it is 1 or undecided (`verdicts.ratio`). `next` is the least of the others, "" without
    any, `ratio` what it takes over the first, with its 99% interval `low` to `high`.
    """
    table = frames.summary(frame, axes, metric)
    least = table.sort_values("median", kind="stable").drop_duplicates("case").set_index("case")["method"]
    pairs = [(first, other) for first in sorted(set(least)) for other in set(table["method"]) - {first}]
    found = [
        verdicts.ratio(frame, axes, other, first, metric).assign(method=other, first=first) for first, other in pairs
    ]
    none = pd.DataFrame(columns=["case", "method", "first", "ratio", "low", "high"])
    found = pd.concat(found, ignore_index=True) if found else none
    found = found[found["first"].eq(found["case"].map(least))].sort_values("ratio", kind="stable")
    cases = table.drop_duplicates("case").drop(columns=["method", "median", "p10", "p90"])
    behind = found[found["low"].gt(1)].drop_duplicates("case").set_index("case")
    ties = found[~found["low"].gt(1)].groupby("case")["method"].agg(list)
    cases["best"] = [(least[case], *ties.get(case, [])) for case in cases["case"]]
    cases["next"] = cases["case"].map(behind["method"]).astype(object).fillna("")
    return cases.assign(**{name: cases["case"].map(behind[name]).astype(float) for name in ("ratio", "low", "high")})


def which_to_use(
    frame: pd.DataFrame, axes: Axes, metric: str = "", title: str = "Which is fastest", more: str = ""
) -> Figure:
    """`fastest` on (size, y), a panel for each of `axes.panels`; `metric` "": kernel time of the narrowest work. `more`
    is said at the foot.
    """
    metric = frames.time_metric(frame, metric or f"{axes.stem}_kernel")
    rows = widest(frame, axes) if metric == "energy" else frame
    chosen, setting = frames.focus(rows, axes, axes.panels, [metric])
    table = fastest(chosen, axes, metric)
    if table.empty:
        return figures.empty(title, f"no valid {metric.replace('_', ' ')} in these records")
    no_claim = frames.no_claim(table)
    told = [f"{frames.where(row, axes)}: {words(row, axes)}." for row in table.to_dict("records")]
    used = axes.ordered({name for names in table["best"] for name in names} | {*table["next"]} - {""})
    what, of = "how many times as long it takes", frames.time_name(table, axes, metric)
    if metric == "energy":
        what, of = "how many times its energy", "joules of one call, all that work for it"
    note = f"Below the best: the next that is no tie, and {what}. Tie: the 99% interval of the ratio holds 1. Named: "
    note += f"{', '.join(axes.label(name) for name in used)}."
    note += f" {axes.short(axes.whole)} needs one device alone." * (axes.whole in used) + more
    text = partial(_cell, axes=axes, grey=bool(no_claim))
    title = f"{title}: {no_claim or _counted(table['best'], axes)}"
    return plots.cells(table, axes, text, title, setting, of, alt=" ".join(told), note=note)


def _counted(best: pd.Series, axes: Axes) -> str:
    """ "B2 in 9 of 20 cases, A in 4, a tie in 7"; and that the method in question wins none, where that is so."""
    alone = best[best.map(len).eq(1)].map(lambda names: names[0]).value_counts()
    parts = [f"{axes.short(name)} in {alone[name]}" for name in sorted(alone.index, key=lambda name: -alone[name])]
    parts += [f"a tie in {len(best) - alone.sum()}"] if alone.sum() < len(best) else []
    parts[0] += f" of {len(best)} cases"
    mine = sum(axes.under in names for names in best)
    return ", ".join(parts) + f"; {axes.short(axes.under)} in none" * (not mine and axes.under in axes.methods)


def words(row: Mapping, axes: Axes) -> str:
    """A row of `fastest`: "tie: B1, B2; D permuted dense takes 1.09x [1.06, 1.12]"."""
    behind = f"; {axes.label(row['next'])} takes {verdicts.interval_text(row)}" if row["next"] else ""
    return _named(row["best"], axes) + behind


def _named(names: tuple[str, ...], axes: Axes) -> str:
    return "tie: " * (len(names) > 1) + ", ".join(map(axes.short, names))


def _cell(row: dict, axes: Axes, grey: bool) -> tuple[str, str, str]:
    best, names = row["best"], textwrap.fill(_named(row["best"], axes), 12, break_on_hyphens=False)
    names = names if names.count("\n") < 2 else f"tie of {len(best)}"
    behind = f"{axes.short(row['next'])} {row['ratio']:.2f}×" if row["next"] else ""
    face = "#F0F0F0" if grey or len(best) > 1 else to_hex(0.65 + 0.35 * np.array(to_rgb(axes.look(best[0]).colour)))
    return names, textwrap.fill(behind, 14, break_on_hyphens=False), face
