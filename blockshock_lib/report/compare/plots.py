"""The figure of a comparison: how much longer each cell takes in the newer run, with its interval."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from blockshock_lib.report import cells, figures, labels
from blockshock_lib.report.compare.changes import IMPROVED, NO_INTERVAL, REGRESSION, UNDECIDED, WORKS
from blockshock_lib.report.figures import FAINT, INK, MUTED

MOST = 40  # cases that fit in a figure one can read
COLOURS = {REGRESSION: "#D55E00", IMPROVED: "#0072B2", UNDECIDED: MUTED, NO_INTERVAL: "#B0B0B0"}
_WASH = "#F9DFD0"
_TICKS = (0.1, 0.2, 0.25, 1 / 3, 0.5, 2 / 3, 0.8, 0.9, 0.95, 0.98, 1, 1.02, 1.05, 1.1, 1.25, 1.5, 2, 3, 4, 5, 10)


def ratios(rows: pd.DataFrame, a: str, b: str, caption: str) -> Figure:
    """Ratio t(b) / t(a) of every case and method, a panel a method, a line a case.

    Args:
        rows: `rows` of changes.compare.
        a, b: what the runs are called.
        caption: how the intervals are to be read.

    Drawn are the times of the whole that a case is about: of a training step, else of forward + dX, else of a forward.
    Kernel time is a filled marker, call time an open one. A cell with any regression is shaded, and one that has no
    marker (a check, memory, a part of the step) is named in it. At most MOST cases are drawn, those with regressions
    and the largest changes.
    """
    times = rows[rows["unit"].eq("ms") & rows["ratio"].notna()]
    bad = rows[rows["outcome"].eq(REGRESSION)]
    if times.empty and bad.empty:
        return figures.empty(f"{b} against {a}", "no cell has times in both runs, and nothing regressed")
    rows = rows.assign(label=_labels(rows))
    rows = rows.assign(drawn=_whole(rows))
    chosen, left_out = _cases(rows)
    rows = rows[rows["label"].isin(chosen)]
    times = rows[rows["drawn"]]
    methods = labels.methods_in(rows.loc[rows["drawn"] | rows["outcome"].eq(REGRESSION), "method"])
    reach = 1.3 * max(0.08, float(np.abs(np.log(times["ratio"])).max()) if len(times) else 0)
    wide = int((np.log(times["high"]).gt(reach) | ~times["low"].gt(np.exp(-reach))).sum())
    notes = [caption]
    if wide:
        notes.append(f"{wide} intervals run over the edge.")
    if left_out:
        notes.append(f"{left_out} cases with smaller changes are not drawn.")
    with figures.theme():
        fig = figures.canvas(
            max(6.8, 3.2 + 1.2 * len(methods)),
            max(2.0, 0.75 + 0.2 * len(chosen)),
            _title(rows),
            figures.subtitle(cells.no_claim(rows), _setting(rows), f"a = {a}", f"b = {b}"),
            _alt(bad, times),
            " ".join(notes),
        )
        axes = fig.subplots(1, len(methods), sharey=True, squeeze=False)[0]
        for ax, method in zip(axes, methods, strict=True):
            _panel(ax, rows[rows["method"].eq(method)], chosen, reach)
            ax.set_title(labels.style(method).short, fontsize=9)
        axes[0].set_yticks(range(len(chosen)), chosen, fontsize=8)
        axes[0].set_ylim(len(chosen) - 0.5, -0.5)
        axes[len(axes) // 2].set_xlabel("t(b) / t(a), × (right: b is slower)")
        axes[-1].legend(handles=_legend(rows), loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8)
    return fig


def _panel(ax: Axes, rows: pd.DataFrame, chosen: list[str], reach: float) -> None:
    ax.axvline(1, color=INK, linewidth=0.9, zorder=1)
    edges = np.exp([-reach, reach])
    for label, cell in rows.groupby("label", sort=False):
        y = chosen.index(label)
        bad = cell[cell["outcome"].eq(REGRESSION)]
        if len(bad):
            ax.axhspan(y - 0.48, y + 0.48, color=_WASH, linewidth=0, zorder=0)
        other = bad.loc[~bad["drawn"], "what"]
        if len(other):
            said = ", ".join(dict.fromkeys(other))
            font = dict(fontsize=7, fontweight="bold", color="#8F3E00")
            behind = dict(facecolor=_WASH, linewidth=0, pad=0.6)
            ax.text(edges[0], y, f" {said} ", va="center", zorder=4, bbox=behind, **font)
        for row in cell[cell["drawn"]].itertuples(index=False):
            call, colour = row.what.startswith("call time"), COLOURS[row.outcome]
            place = y + (0.2 if call else -0.2)
            low, high = np.clip([row.low, row.high], *edges)
            ax.plot([low, high], [place, place], color=colour, linewidth=1, zorder=2)
            ax.plot(
                row.ratio,
                place,
                marker={REGRESSION: "X", IMPROVED: "v"}.get(row.outcome, "o"),
                markersize=5.5 if row.outcome in (REGRESSION, IMPROVED) else 4,
                markerfacecolor="white" if call else colour,
                markeredgecolor=colour,
                zorder=3,
            )
    ax.set_xscale("log")
    ax.set_xlim(*edges)
    inside = [tick for tick in _TICKS if edges[0] <= tick <= edges[1]]
    ax.xaxis.set_major_locator(FixedLocator(sorted({inside[0], 1, inside[-1]})))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.tick_params(axis="x", labelsize=8)
    ax.grid(axis="y", color=FAINT, linewidth=0.4)


def _labels(rows: pd.DataFrame) -> list[str]:
    """A line's name: shape and batch, and what else of its case differs among the rows."""
    rows = rows.assign(optimizer=rows["optimizer"].map(labels.optimizer))
    more = [name for name in ("phase", *cells.FOCUS) if rows[name].nunique() > 1]
    square = rows["in_features"].eq(rows["out_features"]).all()
    sizes = rows["in_features"].astype(str) if square else rows["shape"].astype(str)
    found = []
    for size, batch, others in zip(sizes, rows["batch"], rows[more].astype(str).to_numpy(), strict=True):
        found.append(", ".join([f"N={size}" if square else size, f"B={batch}", *others]))
    return found


def _whole(rows: pd.DataFrame) -> pd.Series:
    """Whether a row is a time of the widest work that its case and method have a time of."""
    width = rows["work"].map({work: i for i, work in enumerate(WORKS)}).fillna(-1)
    times = rows["unit"].eq("ms") & rows["ratio"].notna()
    return times & width.eq(width.where(times).groupby([rows["label"], rows["method"]]).transform("max"))


def _cases(rows: pd.DataFrame) -> tuple[list[str], int]:
    """The lines to draw, smallest case first, and how many are left out."""
    change = np.log(rows["ratio"]).abs().fillna(0) + rows["outcome"].eq(REGRESSION) * 1e3
    most = change.groupby(rows["label"], sort=False).max().sort_values(ascending=False, kind="stable")
    kept = set(most.index[:MOST])
    order = rows.assign(size=rows["in_features"].astype(float) * rows["out_features"].astype(float))
    order["optimizer"] = order["optimizer"].map(labels.ordered(order["optimizer"], labels.OPTIMIZERS).index)
    keys = ["phase", "dtype", "mask", "workload", "optimizer", "size", "batch"]
    order = order.sort_values(keys, kind="stable")["label"]
    return [label for label in dict.fromkeys(order) if label in kept], len(most) - len(kept)


def _title(rows: pd.DataFrame) -> str:
    bad = rows[rows["outcome"].eq(REGRESSION)]
    if bad.empty:
        better = int(rows["outcome"].eq(IMPROVED).sum())
        words = "No regression from a to b"
        return f"{words}; {better} of {len(rows)} comparisons improved" if better else words
    count = bad["what"].value_counts(sort=False)
    said = ", ".join(f"{name} in {number}" for name, number in count.items())
    cells_hit = len(bad[["label", "method"]].drop_duplicates())
    return f"b is worse than a in {cells_hit} cell{'s' * (cells_hit > 1)}: {said}"


def _setting(rows: pd.DataFrame) -> str:
    same = all(rows[name].nunique() == 1 for name in cells.FOCUS)
    return cells.setting(rows.iloc[0]) if same else ""


def _alt(bad: pd.DataFrame, times: pd.DataFrame) -> str:
    shown = bad.head(12)
    said = [
        f"{r.what} of {labels.label(r.method)} at {r.shape}, B={r.batch}: "
        + (r.note if pd.isna(r.ratio) else f"{r.ratio:.3f}x")
        for r in shown.itertuples(index=False)
    ]
    more = f" and {len(bad) - len(shown)} more" if len(bad) > len(shown) else ""
    span = f"Ratios from {times['ratio'].min():.3f} to {times['ratio'].max():.3f}." if len(times) else "No times."
    return f"Ratios of times, a panel a method. {span} Regressions: {'; '.join(said) or 'none'}{more}."


def _legend(rows: pd.DataFrame) -> list:
    dot = dict(linestyle="", markersize=5)
    kinds = [name for name in COLOURS if rows["outcome"].eq(name).any()]
    handles: list = [
        Line2D([], [], color=COLOURS[k], marker={REGRESSION: "X", IMPROVED: "v"}.get(k, "o"), label=k, **dot)
        for k in kinds
    ]
    names = set(rows.loc[rows["drawn"], "what"])
    for name in sorted(names, key=lambda name: (name.startswith("call time"), name)):
        face = {"markerfacecolor": "white"} if name.startswith("call time") else {}
        handles.append(Line2D([], [], color=INK, marker="o", label=name, **face, **dot))
    if rows["outcome"].eq(REGRESSION).any():
        handles.append(Patch(color=_WASH, label="cell with a regression"))
    return handles
