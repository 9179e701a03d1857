"""Predicted floors: the least time that each method of one case can take, split by what binds it."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from blockshock_lib.report import cells, figures, labels
from blockshock_lib.report.figures import INK, MUTED
from blockshock_lib.report.time_plots import milliseconds

# Okabe and Ito's palette, each with a hatch of its own, so that the figure can be read in grey.
BINDS = {"bytes": ("#56B4E9", ""), "arithmetic": ("#E69F00", "////"), "link": ("#009E73", "....")}


def floors_figure(table: pd.DataFrame, source: str = "") -> Figure:
    """A bar a method of one case: its work, as bytes or arithmetic bind it, and the link after it; ms.

    Args:
        table: rows of one case as `predict.plan` gives them; methods that cannot run say so.
        source: where the ceilings come from, for the foot of the figure.

    A tick within the bar marks the work's other bound: how far the one that binds is ahead of it. A training step's
    pieces are each bound by their own, so its bar may be longer than either bound of the whole.
    """
    known = table[table["floor_whole"].notna()] if "floor_whole" in table else table.iloc[:0]
    if known.empty:
        return figures.empty("Predicted floors", "no ceilings are known for this machine, so no floor can be told")
    methods = labels.methods_in(table["method"])[::-1]
    rows = table.set_index("method").reindex(methods)
    case = known.iloc[0]
    used = [name for name in BINDS if _shown(known, name)]
    with figures.theme():
        fig = figures.canvas(
            8.2,
            0.95 + 0.33 * len(methods),
            _title(known.set_index("method")),
            figures.subtitle(
                cells.no_claim(known),
                f"{case['out_features']}x{case['in_features']} B={case['batch']}",
                cells.setting(case),
            ),
            _alt(rows),
            "Nothing is measured here: floor = cost / ceiling, nothing overlapped. Tick: the other bound."
            + (f" Ceilings: {source}." if source else ""),
        )
        # At a fixed place: a constrained layout draws the figure twice, too slow to follow a slider.
        _, foot, _, free = fig.get_layout_engine().get()["rect"]
        width, height = fig.get_size_inches()
        fig.set_layout_engine("none")
        left = (0.18 + 0.072 * max(len(labels.label(method)) for method in methods)) / width
        bottom, top = foot + 0.52 / height, foot + free - 0.32 / height
        ax = fig.add_axes((left, bottom, 0.985 - left, top - bottom))
        for place, (_, row) in enumerate(rows.iterrows()):
            _bar(ax, place, row, known["floor_whole"].max())
        ax.set_yticks(range(len(methods)), [labels.label(method) for method in methods])
        ax.set_ylim(-0.55, len(methods) - 0.45)
        ax.set_xlim(0, 1.42 * known["floor_whole"].max())
        ax.set_xlabel(f"predicted floor of {cells.WORK[case['work']]} (time, lower is better)")
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(FuncFormatter(milliseconds))
        ax.tick_params(axis="y", length=0)
        ax.spines["left"].set_visible(False)
        ax.grid(True, axis="x")
        patches = [Patch(facecolor=BINDS[n][0], hatch=BINDS[n][1], edgecolor="white", label=_NAMES[n]) for n in used]
        patches.append(Line2D([], [], color=INK, marker="|", markersize=9, linestyle="", label="the other bound"))
        ax.legend(handles=patches, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(patches), fontsize=8.5)
    return fig


_NAMES = {"bytes": "moving bytes", "arithmetic": "arithmetic", "link": "the link (all-reduce or all-gather)"}


def _shown(known: pd.DataFrame, name: str) -> bool:
    if name == "link":
        return bool(known["floor_link"].gt(0).any())
    ahead = known["floor_bytes"] >= known["floor_arithmetic"]
    return bool(ahead.any() if name == "bytes" else (~ahead).any())


def _bar(ax, place: int, row: pd.Series, most: float) -> None:
    if pd.isna(row["floor_whole"]):
        ax.text(0, place, f" cannot run: {_short(row['unsupported'])}", va="center", fontsize=8, color=MUTED)
        return
    first = "bytes" if row["floor_bytes"] >= row["floor_arithmetic"] else "arithmetic"
    product, other = row["floor_whole"] - row["floor_link"], min(row["floor_bytes"], row["floor_arithmetic"])
    for name, left, width in ((first, 0.0, product), ("link", product, row["floor_link"])):
        colour, hatch = BINDS[name]
        ax.barh(place, width, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4, height=0.68)
    ax.plot([other], [place], color=INK, marker="|", markersize=11, markeredgewidth=1.4, linestyle="")
    end = row["floor_whole"] + 0.015 * most
    ax.text(end, place, f"{milliseconds(row['floor_whole'])}, bound by {_the(row['bound'])}", va="center", fontsize=8.5)


def _short(reason: str, most: int = 76) -> str:
    return reason if len(reason) <= most else f"{reason[: most - 1]}…"


def _title(known: pd.DataFrame) -> str:
    if not {"block_shock", "row_parallel"} <= set(known.index):
        best = known["floor_whole"].idxmin()
        return f"The lowest floor is {labels.label(best)}'s, bound by {_the(known.loc[best, 'bound'])}"
    ours, theirs = known.loc["block_shock"], known.loc["row_parallel"]
    ratio = ours["floor_whole"] / theirs["floor_whole"]
    word = "equals" if abs(ratio - 1) < 0.005 else f"is {ratio:.2f} of"
    return f"Block-Shock's floor {word} B1's; {_the(ours['bound'])} binds it most"


def _the(bound: str) -> str:
    return "the link" if bound == "link" else {"bytes": "moving bytes"}.get(bound, bound)


def _alt(rows: pd.DataFrame) -> str:
    said = []
    for method, row in rows[::-1].iterrows():
        if pd.isna(row["floor_whole"]):
            said.append(f"{labels.label(method)}: cannot run.")
        else:
            parts = ", ".join(f"{name} {milliseconds(row[f'floor_{name}'])}" for name in BINDS)
            said.append(f"{labels.label(method)}: {milliseconds(row['floor_whole'])} ({parts}; {row['bound']} binds).")
    return "Horizontal bars of predicted floors. " + " ".join(said)
