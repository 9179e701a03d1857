"""Figures of the findings: the law and the measurement, where the time goes, what parity takes, a prediction."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from blockshock_lib.report import cells, figures, labels
from blockshock_lib.report.figures import FAINT, INK, MUTED
from blockshock_lib.report.findings import law, needs, versions
from blockshock_lib.report.findings.law import BEYOND, CLOSE, NAME, largest
from blockshock_lib.report.training.tables import piece_names

# One colour a kind of work (Okabe and Ito), and a hatch for what is communication.
_PARTS = {
    NAME["compute_kernel"]: ("#0072B2", ""),
    NAME["dx_kernel"]: ("#56B4E9", ""),
    NAME["dw_kernel"]: ("#009E73", ""),
    BEYOND: ("#F0B878", ""),
    NAME["reduce_kernel"]: ("#E69F00", "////"),
    NAME["reduce_dx_kernel"]: ("#F0E442", "////"),
    NAME["optimizer_kernel"]: ("#8C8C8C", ""),
    NAME["remask_kernel"]: ("#CC79A7", ""),
    NAME["compress_kernel"]: ("#D55E00", ""),
    NAME["refresh_kernel"]: ("#882255", ""),
}
_SHOWN = ("dense", "row_parallel", "masked_dense", "permuted_dense", "block_shock", "block_shock_recompress")
_MARKERS = "osD^vPX*h"


def law_check(frame: pd.DataFrame) -> Figure:
    """The ratio that the law makes of the measured s, against the ratio as measured, a point a case."""
    table = law.law_rows(frame)
    if table.empty:
        return figures.empty("The law against the measurement", "no case holds kernel times of A, B1 and Block-Shock")
    close, total = int(table["residual"].abs().le(CLOSE).sum()), len(table)
    worst = table.loc[table["residual"].abs().idxmax()]
    said = cells.no_claim(table)
    title = f"The law says what was measured to within {CLOSE:.0%} in {close} of {total} cases"
    top = 1.12 * max(1.0, table["ratio"].max(), table["predicted"].max())
    with figures.theme():
        fig = figures.canvas(
            6.6,
            4.4,
            "The law against the measurement: no claim" if said else title,
            figures.subtitle(said, cells.setting(table.iloc[0]), "bars: 99% intervals"),
            " ".join(
                f"{r.shape}, B={r.batch}: {r.predicted:.2f}x said, {r.ratio:.2f}x measured." for r in _rows(table)
            ),
            f"Law: B1's product takes its share of A's, Block-Shock's 2/s of that, both add B1's collective. Farthest: "
            f"{worst['shape']}, B={worst['batch']}, {worst['residual']:+.1%}: {worst['reason']}.",
        )
        ax = fig.subplots()
        ax.axline((0, 0), slope=1, color=INK, linewidth=1.2, zorder=1)
        ax.axhline(1, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        tints, markers = _tints(table["batch"]), _marks(table["size"])
        for row in _rows(table):
            bars = [[row.ratio - row.low], [min(row.high, top) - row.ratio]]
            style = dict(color=tints[row.batch], marker=markers[row.size], markersize=7.5, markeredgecolor="white")
            ax.errorbar(row.predicted, row.ratio, yerr=bars, elinewidth=0.9, zorder=3, **style)
        ax.set(xlim=(0, top), ylim=(0, top))
        ax.text(0.02 * top, 1.01, "parity with B1", fontsize=8, color=MUTED, va="bottom")
        ax.set_xlabel("speed over B1 that the law makes of the measured s (×)")
        ax.set_ylabel("speed over B1 as measured (×)")
        _legend(ax, tints, markers, Line2D([], [], color=INK, linewidth=1.2, label="law = measured"))
    return fig


def where(frame: pd.DataFrame) -> Figure:
    """Parts of a forward, and of a training step, in the largest case of each: bars a method, B1's whole is 1."""
    parts = largest(law.pieces(frame))
    parts = parts[parts["method"].isin(_SHOWN) & parts["part"].isin(list(_PARTS))]
    wholes = [key for key, _ in parts.groupby(["work", "optimizer", "shape", "batch"], sort=False)]
    wholes.sort(key=lambda key: (key[0], list(labels.OPTIMIZERS).index(key[1]) if key[1] else -1))
    if not wholes:
        return figures.empty("Where the time goes", "no case holds the kernel times of its parts")
    said, works = cells.no_claim(parts), versions.of_works(frame) if parts["work"].nunique() > 1 else {}
    title = "Where the time goes" + (": no claim" if said else _where_title(parts))
    known, called = [name for name in _PARTS if name in set(parts["part"])], piece_names(frame)
    with figures.theme():
        fig = figures.canvas(
            9.2,
            0.5 + sum(0.5 + 0.3 * parts[parts["work"].eq(key[0])]["method"].nunique() for key in wholes),
            title,
            figures.subtitle(said, cells.setting(parts.iloc[0].replace({"sgd": "", "adamw": ""}))),
            " ".join(_bar_text(*one, called) for one in parts.groupby(["work", "optimizer", "method"], sort=False)),
            "Each part as it was measured alone; the number is their sum, so what a step overlaps is in it twice. "
            "Hatched: a collective, alone. A forward beyond its product: what its collective adds, and other work. "
            + versions.sentence(works),
        )
        heights = [parts[parts["work"].eq(key[0])]["method"].nunique() + 1 for key in wholes]
        axes = fig.subplots(len(wholes), 1, squeeze=False, height_ratios=heights)[:, 0]
        for ax, (work, optimizer, shape, batch) in zip(axes, wholes, strict=True):
            case = parts[parts["work"].eq(work) & parts["optimizer"].eq(optimizer)]
            case = case[case["shape"].eq(shape) & case["batch"].eq(batch)]
            _bars(ax, case)
            name = f"training step with {labels.optimizer(optimizer)}" if work == "step" else "forward"
            ax.set_title(f"{name}, {shape}, B={batch}")
        axes[-1].set_xlabel("time over B1's (×)")
        handles = [_swatch(*_PARTS[name], called.get(name, name)) for name in known]
        axes[0].legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8.5)
    return fig


def _swatch(colour: str, hatch: str, label: str) -> Patch:
    return Patch(facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0.4, label=label)


def _bar_text(key: tuple[str, str, str], parts: pd.DataFrame, called: dict[str, str]) -> str:
    work, optimizer, method = key
    name = " ".join(filter(None, (work, labels.optimizer(optimizer), labels.label(method))))
    return f"{name}: {', '.join(f'{called.get(r.part, r.part)} {r.ms:.3g}' for r in _rows(parts))} ms."


def _where_title(parts: pd.DataFrame) -> str:
    case = parts[parts["work"].eq("forward") & parts["part"].eq(NAME["compute_kernel"])].set_index("method")["ms"]
    if not {"row_parallel", "block_shock"} <= set(case.index):
        return ""
    return f": Block-Shock's product alone takes {case['block_shock'] / case['row_parallel']:.2f} times B1's"


def _bars(ax: Axes, case: pd.DataFrame) -> None:
    methods = [name for name in labels.methods_in(case["method"])][::-1]
    whole = case.groupby("method")["ms"].sum()
    unit = whole.get("row_parallel", whole.min())
    for place, method in enumerate(methods):
        left = 0.0
        mine = case[case["method"].eq(method)].set_index("part")["ms"]
        for name in (name for name in _PARTS if name in mine):
            colour, hatch = _PARTS[name]
            width = mine[name] / unit
            ax.barh(place, width, left=left, height=0.66, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
            left += width
        ax.text(left + 0.01 * whole.max() / unit, place, f"{left:.2f}", va="center", fontsize=8, color=MUTED)
    ax.set_yticks(range(len(methods)), [labels.label(name) for name in methods])
    ax.set_xlim(0, 1.1 * whole.max() / unit)
    ax.axvline(1, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))


def parity(frame: pd.DataFrame) -> Figure:
    """Contours of the ratio to B1 over s and the share of communication, with every case where it was measured."""
    table = needs.needs(frame)
    if table.empty:
        return figures.empty("What parity takes", "no case holds kernel times of A, B1 and Block-Shock")
    share = table["reduce"] / table["b1"]
    s, c = np.meshgrid(np.linspace(0.25, 3, 200), np.geomspace(min(0.02, share.min()), max(10, share.max()), 200))
    ratio = (1 + c) / (2 / s + c)
    said = cells.no_claim(table)
    needed = table["s_needed"].dropna()
    takes = f"s of {needed.min():.2f} to {needed.max():.2f}" if len(needed) else "more than any s"
    title = f"Parity takes {takes}; {table['s'].min():.2f} to {table['s'].max():.2f} was measured"
    with figures.theme():
        fig = figures.canvas(
            7.4,
            4.5,
            "What parity takes: no claim" if said else title,
            figures.subtitle(said, cells.setting(table.iloc[0]), "needed: with the communication of each case held"),
            " ".join(
                f"{r.shape}, B={r.batch}: s={r.s:.2f}, communication {r.reduce / r.b1:.2f} of B1's product."
                for r in _rows(table)
            ),
            "Lines: speed over B1 by the law, (1 + c) / (2/s + c). A slower link (upwards) brings it towards 1, and no "
            "link takes it across: only s does. Dashed: parity. Points: measured s and communication.",
        )
        ax = fig.subplots()
        levels = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2]
        ax.contour(s, c, ratio, levels=levels, colors=FAINT, linewidths=1.1)
        foot = 1.15 * c.min()
        for level in levels:
            place = 2 / ((1 + foot) / level - foot)
            ax.text(
                place, foot, f"{level}×", ha="center", fontsize=8, color=MUTED, bbox=dict(fc="white", ec="none", pad=1)
            )
        ax.axvline(2, color=INK, linewidth=1.3, linestyle=(0, (4, 3)))
        tints, markers = _tints(table["batch"]), _marks(table["size"])
        for row in _rows(table):
            style = dict(color=tints[row.batch], marker=markers[row.size], markersize=7.5, markeredgecolor="white")
            ax.plot(row.s, row.reduce / row.b1, zorder=3, linestyle="", **style)
        ax.set(yscale="log", xlim=(0.25, 3), ylim=(c.min(), c.max()))
        ax.set_xlabel("s: speed of the 2:4 product over the dense one (×)")
        ax.set_ylabel("communication over B1's product (×)")
        _legend(ax, tints, markers, Line2D([], [], color=INK, linestyle=(0, (4, 3)), label="parity by the law: s = 2"))
    return fig


def what_if(table: pd.DataFrame, said: str = "") -> Figure:
    """A table of `needs.what_if`: ratio to B1 as measured (hollow) and then (filled), on B, a panel a work."""
    if table.empty:
        return figures.empty("What if", "no case holds kernel times of A, B1 and Block-Shock")
    keys = table[["work", "method", "optimizer"]].drop_duplicates().itertuples(index=False, name=None)
    panels = [key for key in keys]
    after, no_claim = table[table["work"].eq("forward")], cells.no_claim(table)
    title = f"Then Block-Shock's forward reaches {after['then'].min():.2f} to {after['then'].max():.2f} of B1's speed: "
    title += f"faster than B1 in {int(after['low'].gt(1).sum())} of {len(after)} cases"
    with figures.theme():
        fig = figures.canvas(
            max(6.4, 3.1 * len(panels)),
            3.2,
            "What if: no claim" if no_claim else title,
            figures.subtitle(no_claim, said),
            " ".join(
                f"{r.work}, {labels.label(r.method)}, {r.shape}, B={r.batch}: {r.ratio:.2f}x, {r.then:.2f}x then."
                for r in _rows(table)
            ),
            "Computed from measured parts, not measured. Hollow and dotted: as measured. Filled: then. Faster: above 1 "
            "with an interval as wide as the measured one. "
            + versions.sentence(table.attrs.get("works", {}) if table["work"].nunique() > 1 else {}),
        )
        axes = fig.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        markers = _marks(table["size"])
        tints = dict(zip(markers, sns.color_palette("viridis_r", len(markers) + 1)[1:], strict=True))
        for ax, (work, method, optimizer) in zip(axes, panels, strict=True):
            rows = table[table["work"].eq(work) & table["method"].eq(method) & table["optimizer"].eq(optimizer)]
            # One batch alone would put all sizes on one line: then they stand side by side.
            along = "batch" if rows["batch"].nunique() > 1 else "size"
            for size, part in rows.groupby("size"):
                part, style = part.sort_values("batch"), dict(color=tints[size], marker=markers[size])
                ax.plot(part[along], part["ratio"], linestyle=":", markerfacecolor="white", linewidth=1, **style)
                ax.plot(part[along], part["then"], linewidth=1.6, **style)
            ax.axhline(1, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
            ticks = sorted(rows[along].unique())
            ax.set_xscale("log", base=2)
            ax.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
            ax.margins(x=0.15)
            name = labels.style(method).short
            ax.set_title(f"{name}, {work}" + (f", {labels.optimizer(optimizer)}" if optimizer else ""))
            ax.set_xlabel("B (rows of the input)" if along == "batch" else f"N (B = {rows['batch'].iloc[0]})")
        axes[0].set_ylabel("speed over B1 (×)")
        axes[0].set_ylim(0, 1.1 * max(1.0, table[["ratio", "then"]].max().max()))
        found = [Line2D([], [], color=tints[n], marker=markers[n], label=f"N = {n:.0f}") for n in markers]
        axes[-1].legend(handles=found, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
    return fig


def prediction(table: pd.DataFrame, note: str) -> Figure:
    """PREDICTED ratio to B1 on more GPUs, a table of `predict.scaling.larger`; a line a batch."""
    if table.empty:
        return figures.empty("PREDICTION for more GPUs", "no measured cases on real GPUs to fit the model to")
    top = table[table["ranks"].eq(table["ranks"].max())]["ratio"]
    with figures.theme():
        fig = figures.canvas(
            6.8,
            3.4,
            f"PREDICTION, not measured: with more GPUs the forward's ratio nears 1, {top.min():.2f} to {top.max():.2f} "
            f"with {table['ranks'].max()}",
            figures.subtitle(
                f"forward alone, N = {table['n'].iloc[0]}",
                "one weight split over all GPUs",
                "the two-GPU points too are the model's",
                "hollow: as measured" if table["measured"].notna().any() else "",
            ),
            " ".join(
                f"{r.ranks} GPUs, B={r.batch}: {r.ratio:.2f}x predicted"
                + (f", {r.measured:.2f}x measured." if pd.notna(r.measured) else ".")
                for r in _rows(table)
            ),
            note,
        )
        ax = fig.subplots()
        tints = _tints(table["batch"])
        for place, (batch, part) in enumerate(table.groupby("batch")):
            ax.plot(
                part["ranks"],
                part["ratio"],
                color=tints[batch],
                marker=_MARKERS[place % len(_MARKERS)],
                label=f"B = {batch}",
            )
            hollow = dict(color=tints[batch], marker=_MARKERS[place % len(_MARKERS)], markerfacecolor="white")
            ax.plot(part["ranks"], part["measured"], linestyle="", zorder=3, **hollow)
        ax.axhline(1, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        ax.text(table["ranks"].min(), 1.01, "parity with B1", fontsize=8, color=MUTED, va="bottom")
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted(table["ranks"].unique()), [f"{w}" for w in sorted(table["ranks"].unique())])
        ax.set_ylim(0, 1.12)
        ax.set_xlabel("GPUs")
        ax.set_ylabel("PREDICTED forward speed over B1 (×)")
        ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
    return fig


def _rows(table: pd.DataFrame):
    return table.itertuples(index=False)


def _tints(batches: pd.Series) -> dict:
    known = sorted(batches.unique())
    return dict(zip(known, sns.color_palette("viridis_r", len(known) + 1)[1:], strict=True))


def _marks(sizes: pd.Series) -> dict:
    known = sorted(sizes.unique())
    return {size: _MARKERS[place % len(_MARKERS)] for place, size in enumerate(known)}


def _legend(ax: Axes, tints: dict, markers: dict, line: Line2D) -> None:
    known = dict(linestyle="", markersize=7)
    of_b = [Line2D([], [], color=tint, marker="o", label=f"B = {b}", **known) for b, tint in tints.items()]
    of_n = [Line2D([], [], color=MUTED, marker=mark, label=f"N = {n:.0f}", **known) for n, mark in markers.items()]
    ax.legend(handles=[*of_b, *of_n, line], loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
