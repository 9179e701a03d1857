"""Where the time goes, a bar a method: the parts of each work, and the timeline."""

import functools
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from blockshock_lib.report import figures, frames, traces
from blockshock_lib.report import timeline as timelines
from blockshock_lib.report.figures import MUTED
from blockshock_lib.studies.linear.axes import AXES, optimizer_name
from blockshock_lib.studies.linear.report import build, law
from blockshock_lib.studies.linear.report.build import B1, OURS, T1, A, C, listed
from blockshock_lib.studies.linear.report.training import piece_names

# Collectives last, hatched: what overlap hides, it hides of them.
LOOKS = {
    "forward product": ("#0072B2", ""),
    "dX": ("#56B4E9", ""),
    "dW": ("#009E73", ""),
    "optimizer step": ("#8C8C8C", ""),
    "re-mask": ("#CC79A7", ""),
    "compress": ("#D55E00", ""),
    "refresh": ("#882255", ""),
    law.BEYOND: ("#F0B878", ""),
    "forward collective": ("#E69F00", "////"),
    "dX collective": ("#F0E442", "////"),
}
_WORKS = ("forward", "pass", "step")
_METHODS = (A, B1, C, "permuted_dense", OURS, T1)


def where_figure(frame: pd.DataFrame) -> Figure:
    """Parts of each work that the frame has, in the largest case of each: bars a method, B1's parts together are 1."""
    times = [f"{stem}_kernel" for stem in ("forward", *build.PIECES.values())]
    chosen, setting = frames.focus(frame, AXES, panels=("optimizer",), metrics=times)
    table = law.pieces(chosen)
    table = pd.concat([build.largest(part) for _, part in table.groupby("work", sort=False)] or [table])
    table = table[table["method"].isin(_METHODS)]
    known = [name for name in LOOKS if name in table and table[name].notna().any()]
    wholes = [part for _, part in table.groupby(["work", "optimizer", "shape", "batch"], sort=False)]
    wholes.sort(key=lambda part: (_WORKS.index(part["work"].iloc[0]), -ord(part["optimizer"].iloc[0][:1] or " ")))
    if not known:
        return figures.empty("Where the time goes", "no case holds the kernel times of its parts")
    called, told, no_claim = piece_names(frame), [], frames.no_claim(table)
    for row in table.to_dict("records"):
        times = ", ".join(f"{called.get(name, name)} {row[name]:.3g}" for name in known if pd.notna(row[name]))
        whose = listed(row["work"], optimizer_name(row["optimizer"]), AXES.label(row["method"]), by=" ")
        told.append(f"{whose}: {times} ms.")
    products = table[table["work"].eq("forward")].set_index("method")["forward product"]
    title = "Where the time goes" + (": no claim" if no_claim else "")
    if not no_claim and {B1, OURS} <= set(products.index):
        title += f": Block-Shock's product alone takes {products[OURS] / products[B1]:.2f} times B1's"
    note = "Each part as it was measured alone; the number is their sum, so what overlaps is in it twice. "
    note += "Hatched: a collective, alone. "
    if len(products):
        note += "A forward beyond its product: what its collective adds, and other work. "
    with figures.drawing(
        *(9.2, 0.5 + sum(0.5 + 0.3 * len(part) for part in wholes), title, no_claim),
        setting,
        alt=" ".join(told),
        note=note,
        rows=len(wholes),
        height_ratios=[len(part) + 1 for part in wholes],
    ) as (fig, grid):
        for ax, part in zip(grid[:, 0], wholes, strict=True):
            first = part.iloc[0]
            _panel(ax, part, known)
            work = listed(AXES.times[first["work"]].words, optimizer_name(first["optimizer"]), by=" with ")
            ax.set_title(f"{work}, {AXES.case(first)}")
        grid[-1, 0].set_xlabel("time over B1's (×)")
        look = dict(edgecolor="white", linewidth=0.4)
        keys = [Patch(facecolor=LOOKS[n][0], hatch=LOOKS[n][1], label=called.get(n, n), **look) for n in known]
        grid[0, 0].legend(handles=keys, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8.5)
    return fig


def _panel(ax: Axes, case: pd.DataFrame, known: list[str]) -> None:
    methods = AXES.ordered(case["method"])[::-1]
    wide = case.set_index("method").loc[methods, known].fillna(0.0)
    whole, end = wide.sum(axis=1), np.zeros(len(wide))
    unit = whole.get(B1, whole.min())
    for name in known:
        width = wide[name].to_numpy(float) / unit
        look = dict(color=LOOKS[name][0], hatch=LOOKS[name][1], edgecolor="white", linewidth=0.4)
        ax.barh(np.flatnonzero(width), width[width > 0], left=end[width > 0], height=0.66, **look)
        end += width
    for place, at in enumerate(end):
        ax.text(at + 0.01 * end.max(), place, f"{at:.2f}", va="center", fontsize=8, color=MUTED)
    ax.set_yticks(range(len(methods)), [AXES.label(name) for name in methods])
    ax.set_xlim(0, 1.1 * end.max())
    ax.axvline(1, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))


@functools.lru_cache(maxsize=1)
def _traces(folder: Path) -> pd.DataFrame:
    return traces.read(folder, AXES)


def timeline(frame: pd.DataFrame, folder: Path) -> Figure:
    """Of the traces in a run's folder."""
    return timelines.timeline(_traces(folder), AXES, frame)


def exposed(frame: pd.DataFrame, folder: Path) -> pd.DataFrame:
    return timelines.exposed(_traces(folder), AXES)
