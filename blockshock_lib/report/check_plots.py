"""How many checks each method passed, drawn."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from blockshock_lib.report import cells, figures, labels
from blockshock_lib.report.figures import FAINT, INK

_FILL = {"passed": "#CFE8F5", "unsupported": "#EEEEEE", "wrong": "#D55E00"}  # blue, grey, orange: told apart by all


def check_matrix(frame: pd.DataFrame) -> Figure:
    """Passed of asked checks, a row a method, a column a mask. Orange where one failed, ran out of memory or time."""
    rows = cells.checks(frame)
    if rows.empty:
        return figures.empty("Checks", "nothing was checked")
    methods, masks = labels.methods_in(rows["method"]), labels.ordered(rows["mask"], labels.MASKS)
    count = rows.groupby(["method", "mask", "outcome"]).size().unstack(fill_value=0)
    count = count.reindex(columns=["passed", "unsupported", "timeout", "oom", "failed"], fill_value=0)
    wrong = int(count[["timeout", "oom", "failed"]].to_numpy().sum())
    passed, asked = int(count["passed"].sum()), int(count.to_numpy().sum())
    title = f"{wrong} of {asked} checks did not pass" if wrong else f"{passed} of {asked} checks passed, none failed"
    said = []
    with figures.theme():
        fig = figures.canvas(2.0 + 0.78 * max(3, len(masks)), 0.7 + 0.3 * len(methods), title, "", "", "")
        ax = fig.subplots()
        for y, method in enumerate(methods):
            for x, mask in enumerate(masks):
                if (method, mask) not in count.index:
                    continue
                field = count.loc[(method, mask)]
                bad = int(field[["timeout", "oom", "failed"]].sum())
                kind = "wrong" if bad else "passed" if field["passed"] else "unsupported"
                text = f"{field['passed']}/{field.sum()}"
                ax.add_patch(mpl.patches.Rectangle((x + 0.02, y + 0.04), 0.96, 0.92, facecolor=_FILL[kind], lw=0))
                ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8.5, color=INK)
                said.append(f"{labels.label(method)}, {mask}: {text}.")
        ax.set(xlim=(0, len(masks)), ylim=(len(methods), 0))
        ax.set_xticks(np.arange(len(masks)) + 0.5, [mask.replace("_", "\n") for mask in masks], fontsize=7.5)
        ax.set_yticks(np.arange(len(methods)) + 0.5, [labels.label(method) for method in methods])
        ax.tick_params(length=0)
        for side in ax.spines.values():
            side.set(visible=True, color=FAINT)
    fig.alt = f"{fig.alt.rstrip()} Passed of asked: {' '.join(said)}"
    return fig
