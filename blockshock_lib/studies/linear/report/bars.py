"""Where the time goes, a bar a method: the pieces of a pass or a step, all parts of a work, and the timeline."""

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from blockshock_lib.report import figures, frames, traces
from blockshock_lib.report import timeline as timelines
from blockshock_lib.report.figures import INK, MUTED, milliseconds
from blockshock_lib.studies.linear.axes import AXES, optimizer_name
from blockshock_lib.studies.linear.report import build, law
from blockshock_lib.studies.linear.report.build import B1, OURS, PIECES, T1, A, C, listed
from blockshock_lib.studies.linear.report.training import piece_names

Looks = Mapping[str, tuple[str, str]]
"""Part -> face (Okabe and Ito), and a hatch that tells it apart in grey."""
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
PIECE_LOOKS = {name: look for name, look in LOOKS.items() if name != law.BEYOND}
REST, HIDDEN = "between the pieces", "beyond the whole"
_REST_LOOK = {REST: ("#D9D9D9", "")}
_WHERE_METHODS = (A, B1, C, "permuted_dense", OURS, T1)


def stack(ax: Axes, rows: pd.DataFrame, looks: Looks, height: float = 0.7) -> np.ndarray:
    """A horizontal bar a row, the columns of `looks` one after the other; returns where each ends."""
    end = np.zeros(len(rows))
    for name, (face, hatch) in looks.items():
        width = rows[name].to_numpy(float)
        known = np.flatnonzero(~np.isnan(width))
        look = dict(color=face, hatch=hatch, height=height, edgecolor="white", linewidth=0.4)
        ax.barh(known, width[known], left=end[known], **look)
        end = end + np.nan_to_num(width)
    return end


def swatches(looks: Looks, called: Mapping[str, str] | None = None, **edge: float) -> list[Patch]:
    """The legend's entries; `called`: part -> what the legend calls it."""
    return [
        Patch(facecolor=face, hatch=hatch, edgecolor="white", label=(called or {}).get(name, name), **edge)
        for name, (face, hatch) in looks.items()
    ]


def step_pieces(frame: pd.DataFrame, what: str = "step") -> pd.DataFrame:
    """Median ms of the pieces of a "pass" or a "step", each measured alone, a row a (case, method); `whole` with `low`
    and `high` (p10, p90); `REST` = whole - sum where that is more, `HIDDEN` = sum - whole where that is more.
    """
    table = frames.summary(frame, AXES, frames.time_metric(frame, f"{what}_kernel"))
    table = build.add_medians(table, frame, {name: f"{PIECES[name]}_kernel" for name in PIECE_LOOKS})
    table = table.rename(columns={"median": "whole", "p10": "low", "p90": "high"})
    table = table.fillna(dict.fromkeys(PIECE_LOOKS, 0.0))
    over = table[list(PIECE_LOOKS)].sum(axis=1) - table["whole"].astype(float)
    return table.assign(**{REST: (-over).clip(lower=0), HIDDEN: over.clip(lower=0)})


def pieces_figure(frame: pd.DataFrame, what: str = "step") -> Figure:
    """The pieces of a pass or a step in a row, each measured alone; a panel an (optimizer, shape) at the largest B.
    Black tick: the whole, with p10 to p90; crossed: beyond it, by overlap or clocks; grey: what no piece explains.
    """
    chosen, setting = frames.focus(frame, AXES, panels=("optimizer",))
    table, name = step_pieces(chosen, what), AXES.times[what].words
    table = table[table[list(PIECE_LOOKS)].sum(axis=1) > 0]
    if table.empty:
        return figures.empty("Where the time goes", f"no valid time of {name} and its pieces in these records")
    batch = table["batch"].max()
    table = table[table["batch"].eq(batch)]
    shapes, optimizers = list(dict.fromkeys(table["shape"]))[-3:], AXES.sort("optimizer", table["optimizer"])
    methods, called = AXES.ordered(table["method"])[::-1], piece_names(chosen)
    looks, cell = {piece: look for piece, look in PIECE_LOOKS.items() if table[piece].gt(0).any()}, _largest_n(table)
    told = []
    for row in cell.to_dict("records"):
        parts = ", ".join(f"{called[piece]} {milliseconds(row[piece])}" for piece in looks if row[piece] > 0)
        told.append(f"{build.who(row)}: {milliseconds(row['whole'])} ({parts}).")
    with figures.drawing(
        *(max(6.6, 1.6 + 2.9 * len(shapes)), 0.75 + (0.42 + 0.24 * len(methods)) * len(optimizers)),
        _pieces_title(table, what, called["forward collective"].removeprefix("forward collective")),
        *(frames.no_claim(table), setting, "medians of pieces measured alone, slowest rank; scales differ"),
        "black: the whole, p10 to p90",
        "crossed: parts exceed the whole, by overlap or clocks" if table[HIDDEN].gt(0).any() else "",
        alt=f"Stacked bars of {name}. At {AXES.case(cell.iloc[0])}: {' '.join(told)}",
        rows=len(optimizers),
        columns=len(shapes),
        sharey=True,
    ) as (fig, grid):
        for line, optimizer in zip(grid, optimizers, strict=True):
            for ax, shape in zip(line, shapes, strict=True):
                rows = table[table["optimizer"].eq(optimizer) & table["shape"].eq(shape)].set_index("method")
                _pieces_panel(ax, rows.reindex(methods), looks)
                ax.set_title(listed(optimizer_name(optimizer), shape, f"B={batch}"))
        keys = swatches(looks | (_REST_LOOK if table[REST].gt(0).any() else {}), called)
        fig.legend(handles=keys, loc="outside lower center", ncols=min(5, len(keys)), fontsize=8.5)
    return fig


def _largest_n(table: pd.DataFrame) -> pd.DataFrame:
    return table[np.isclose(table["size"], table["size"].max())]


def _pieces_panel(ax: Axes, rows: pd.DataFrame, looks: Looks) -> None:
    places, end = np.arange(len(rows)), stack(ax, rows, {**looks, **_REST_LOOK})
    whole, low, high, hidden = (rows[name].astype(float) for name in ("whole", "low", "high", HIDDEN))
    over = dict(height=0.7, facecolor="white", edgecolor=INK, linewidth=0, alpha=0.55, hatch="xxxx")
    ax.barh(places, hidden.fillna(0), left=whole.fillna(0), **over)
    ax.hlines(places, low, high, color=INK, linewidth=1.4)
    ax.plot(whole, places, color=INK, marker="|", markersize=14, markeredgewidth=2, linestyle="")
    for place in np.flatnonzero(whole.isna()):
        ax.text(0, place, " not run", va="center", fontsize=7.5, color=MUTED)
    figures.lines(ax, [AXES.label(method) for method in rows.index])
    ax.grid(True, axis="x")
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(FuncFormatter(milliseconds))
    ax.tick_params(axis="x", labelsize=8)
    # The axis reaches to the longest bar; one beyond 1.6 times the next is cut off, and says how long the whole is.
    reach = np.fmax(end, high)
    ordered = reach.sort_values()
    cut = len(ordered) > 2 and ordered.iloc[-1] > 1.6 * ordered.iloc[-2] > 0
    limit = 1.25 * ordered.iloc[-2] if cut else 1.04 * ordered.iloc[-1]
    ax.set_xlim(0, limit or 1)
    if cut:
        name, box = ordered.index[-1], dict(boxstyle="square,pad=0.25", facecolor="white", edgecolor="none")
        look = dict(ha="right", va="center", fontsize=8, bbox=box, zorder=5)
        ax.text(limit, reach.index.get_loc(name), f"cut: {milliseconds(whole[name])} →", **look)


def _pieces_title(table: pd.DataFrame, what: str, bias: str) -> str:
    ours = table[table["method"].isin([T1, OURS])]
    if frames.no_claim(table) or ours.empty:
        return f"Where the time of {AXES.times[what].words} goes"
    rows = _largest_n(ours)
    rows = rows[rows["optimizer"].eq(AXES.sort("optimizer", rows["optimizer"])[0])].set_index("method")
    if what == "step" and T1 in rows.index:
        row = rows.loc[T1]
        share = 100 * (row["compress"] + row["re-mask"]) / row["whole"]
        at = listed(AXES.case(row), optimizer_name(row["optimizer"]), by=" with ")
        return f"At {at}, compressing and re-masking take {share:.0f}% of T1's step"
    row = rows.iloc[-1]
    sent = 100 * (row["forward collective"] + row["dX collective"]) / row["whole"]
    bias = bias.replace("+", "and the")
    return f"At {AXES.case(row)}, the collectives{bias} alone are {sent:.0f}% of Block-Shock's {what}"


def where_figure(frame: pd.DataFrame) -> Figure:
    """Parts of a forward, and of a training step, in the largest case of each: bars a method, B1's whole is 1."""
    table = build.largest(law.pieces(frame))
    table = table[table["method"].isin(_WHERE_METHODS)]
    known = [name for name in law.PARTS if name in LOOKS and table[name].notna().any()]
    wholes = [part for _, part in table.groupby(["work", "optimizer", "shape", "batch"], sort=False)]
    wholes.sort(key=lambda part: (part["work"].iloc[0], -ord(part["optimizer"].iloc[0][:1] or " ")))
    if not known:
        return figures.empty("Where the time goes", "no case holds the kernel times of its parts")
    no_claim, works = frames.no_claim(table), law.codes(frame) if table["work"].nunique() > 1 else {}
    called, told = piece_names(frame), []
    for row in table.to_dict("records"):
        times = ", ".join(f"{called.get(name, name)} {row[name]:.3g}" for name in known if pd.notna(row[name]))
        whose = listed(row["work"], optimizer_name(row["optimizer"]), AXES.label(row["method"]), by=" ")
        told.append(f"{whose}: {times} ms.")
    products = table[table["work"].eq("forward")].set_index("method")["forward product"]
    title = "Where the time goes" + (": no claim" if no_claim else "")
    if not no_claim and {B1, OURS} <= set(products.index):
        title += f": Block-Shock's product alone takes {products[OURS] / products[B1]:.2f} times B1's"
    with figures.drawing(
        *(9.2, 0.5 + sum(0.5 + 0.3 * len(part) for part in wholes), title, no_claim),
        frames.setting(dict(table.iloc[0]) | {"optimizer": ""}, AXES),
        alt=" ".join(told),
        note="Each part as it was measured alone; the number is their sum, so what a step overlaps is in it twice. "
        "Hatched: a collective, alone. A forward beyond its product: what its collective adds, and other work. "
        + law.codes_sentence(works),
        rows=len(wholes),
        height_ratios=[len(part) + 1 for part in wholes],
    ) as (fig, grid):
        for ax, part in zip(grid[:, 0], wholes, strict=True):
            first = part.iloc[0]
            work = f"training step with {optimizer_name(first['optimizer'])}" if first["work"] == "step" else "forward"
            _where_panel(ax, part)
            ax.set_title(f"{work}, {AXES.case(first)}")
        grid[-1, 0].set_xlabel("time over B1's (×)")
        looks = {name: look for name, look in LOOKS.items() if name in known}
        keys = swatches(looks, called, linewidth=0.4)
        grid[0, 0].legend(handles=keys, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8.5)
    return fig


def _where_panel(ax: Axes, case: pd.DataFrame) -> None:
    methods = AXES.ordered(case["method"])[::-1]
    wide = case.set_index("method").loc[methods, list(LOOKS)]
    whole = wide.sum(axis=1)
    unit = whole.get(B1, whole.min())
    most = whole.max() / unit
    ends = stack(ax, wide / unit, LOOKS, 0.66)
    for place, end in enumerate(ends):
        ax.text(end + 0.01 * most, place, f"{end:.2f}", va="center", fontsize=8, color=MUTED)
    ax.set_yticks(range(len(methods)), [AXES.label(name) for name in methods])
    ax.set_xlim(0, 1.1 * most)
    ax.axvline(1, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))


@functools.lru_cache(maxsize=1)
def _traces(folder: Path) -> pd.DataFrame:
    return traces.read(folder, AXES)


def timeline(frame: pd.DataFrame, folder: Path) -> Figure:
    """Of the traces in a run's folder."""
    return timelines.timeline(_traces(folder), AXES, frame)


def exposed(frame: pd.DataFrame, folder: Path) -> pd.DataFrame:
    return timelines.exposed(_traces(folder), AXES)
