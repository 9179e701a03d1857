"""Figures of phases 2 and 3: where the time of a pass or a step goes, and the loss curves."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from blockshock_lib.report import cells, figures, labels
from blockshock_lib.report.figures import INK, MUTED
from blockshock_lib.report.time_plots import milliseconds
from blockshock_lib.report.training.tables import PIECES, piece_names

# Face and hatch of each piece, collectives last: what overlap hides, it hides of them.
_LOOKS = {
    "forward product": ("#0072B2", ""),
    "dX": ("#56B4E9", ""),
    "dW": ("#A6CEE3", "////"),
    "optimizer step": ("#009E73", ""),
    "re-mask": ("#F0E442", ""),
    "compress": ("#D55E00", ""),
    "refresh": ("#882255", ""),
    "forward collective": ("#E69F00", ""),
    "dX collective": ("#E69F00", "////"),
}
REST, HIDDEN = "between the pieces", "beyond the whole"
_REST_LOOK = ("#D9D9D9", "")


def step_pieces(frame: pd.DataFrame, what: str = "step") -> pd.DataFrame:
    """Median ms of the pieces of a pass or a step (`what` is "pass" or "step"), a row a (case, method).

    A column a piece of PIECES, each measured alone; `whole` with `low` and `high` (p10, p90); `REST` = whole - sum
    where that is more, `HIDDEN` = sum - whole where that is more: overlap hides
    it, or the whole ran at other clocks.
    """
    metric = cells.time_metric(frame, f"{what}_kernel")
    table = cells.summary(frame, metric).rename(columns={"median": "whole", "p10": "low", "p90": "high"})
    for name in _LOOKS:
        part = cells.summary(frame, PIECES[name][0]).rename(columns={"median": name})
        table = table.merge(part[["case", "method", name]], on=["case", "method"], how="left")
        table[name] = table[name].astype(float).fillna(0.0)
    total = table[list(_LOOKS)].sum(axis=1)
    table[REST] = (table["whole"].astype(float) - total).clip(lower=0)
    table[HIDDEN] = (total - table["whole"].astype(float)).clip(lower=0)
    return table


def pieces_figure(frame: pd.DataFrame, what: str = "step") -> Figure:
    """Where the time goes: the pieces of a pass or a step in a row, a panel an (optimizer, shape) at the largest B.

    The pieces are measured alone. The black tick is the whole as measured, with its p10 to p90. What stands beyond it
    is crossed: overlap hides it, or the whole ran at other clocks. Grey before it is time that no piece explains.
    """
    chosen, setting = cells.focus(frame, panels=("optimizer",)) if len(frame) else (frame, "")
    table, name = step_pieces(chosen, what), cells.WORK[what]
    table = table[table[list(_LOOKS)].sum(axis=1) > 0]
    if table.empty:
        return figures.empty("Where the time goes", f"no valid time of {name} and its pieces in these records")
    table = table[table["batch"].eq(table["batch"].max())]
    shapes = list(dict.fromkeys(table["shape"]))[-3:]
    optimizers = labels.ordered(table["optimizer"], labels.OPTIMIZERS)
    methods = labels.methods_in(table["method"])[::-1]
    named = [piece for piece in _LOOKS if table[piece].gt(0).any()]
    called = piece_names(chosen)
    with figures.theme():
        fig = figures.canvas(
            max(6.6, 1.6 + 2.9 * len(shapes)),
            0.75 + (0.42 + 0.24 * len(methods)) * len(optimizers),
            _pieces_title(table, what, called["forward collective"]),
            figures.subtitle(
                cells.no_claim(table),
                setting,
                "medians of pieces measured alone, slowest rank; scales differ",
                "black: the whole, p10 to p90",
                "crossed: parts exceed the whole, by overlap or clocks" if table[HIDDEN].gt(0).any() else "",
            ),
            _pieces_alt(table, {piece: called[piece] for piece in named}, name),
        )
        axes = fig.subplots(len(optimizers), len(shapes), squeeze=False, sharey=True)
        for i, optimizer in enumerate(optimizers):
            for j, shape in enumerate(shapes):
                rows = table[table["optimizer"].eq(optimizer) & table["shape"].eq(shape)].set_index("method")
                _pieces_panel(axes[i, j], rows, methods, named)
                batch = f"B={table['batch'].max()}"
                axes[i, j].set_title(", ".join(filter(None, [labels.optimizer(optimizer), shape, batch])))
        looks = {called[piece]: _LOOKS[piece] for piece in named} | (
            {REST: _REST_LOOK} if table[REST].gt(0).any() else {}
        )
        keys = [Patch(facecolor=f, hatch=h, edgecolor="white", label=piece) for piece, (f, h) in looks.items()]
        fig.legend(handles=keys, loc="outside lower center", ncols=min(5, len(keys)), fontsize=8.5)
    return fig


def _pieces_panel(ax: Axes, rows: pd.DataFrame, methods: list[str], named: list[str]) -> None:
    rows, places = rows.reindex(methods), np.arange(len(methods))
    start = np.zeros(len(methods))
    for piece, (face, hatch) in [*((name, _LOOKS[name]) for name in named), (REST, _REST_LOOK)]:
        width = rows[piece].astype(float).fillna(0).to_numpy()
        ax.barh(places, width, left=start, color=face, hatch=hatch, edgecolor="white", linewidth=0.4, height=0.7)
        start = start + width
    whole, hidden = rows["whole"].astype(float), rows[HIDDEN].astype(float).fillna(0)
    over = dict(height=0.7, facecolor="white", edgecolor=INK, linewidth=0, alpha=0.55, hatch="xxxx")
    ax.barh(places, hidden, left=whole.fillna(0), **over)
    ax.hlines(places, rows["low"].astype(float), rows["high"].astype(float), color=INK, linewidth=1.4)
    ax.plot(whole, places, color=INK, marker="|", markersize=14, markeredgewidth=2, linestyle="")
    for place, method in enumerate(methods):
        if pd.isna(whole[method]):
            ax.text(0, place, " not run", va="center", fontsize=7.5, color=MUTED)
    ax.set_yticks(places, [labels.label(method) for method in methods])
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(FuncFormatter(milliseconds))
    _limit(ax, pd.Series(np.fmax(start, rows["high"].astype(float)), index=methods), whole)
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelsize=8)
    ax.spines["left"].set_visible(False)
    ax.grid(True, axis="x")


def _limit(ax: Axes, reach: pd.Series, whole: pd.Series) -> None:
    """The axis up to the longest bar; one beyond 1.6 times the next is cut off, and says how long the whole is."""
    ordered = reach.sort_values()
    cut = len(ordered) > 2 and ordered.iloc[-1] > 1.6 * ordered.iloc[-2] > 0
    limit = 1.25 * ordered.iloc[-2] if cut else 1.04 * ordered.iloc[-1]
    ax.set_xlim(0, limit or 1)
    if cut:
        name = ordered.index[-1]
        box = dict(boxstyle="square,pad=0.25", facecolor="white", edgecolor="none")
        text = f"cut: {milliseconds(whole[name])} →"
        place = reach.index.get_loc(name)
        ax.text(limit, place, text, ha="right", va="center", fontsize=8, bbox=box, zorder=5)


def _pieces_title(table: pd.DataFrame, what: str, forward: str) -> str:
    ours = table[table["method"].isin(["block_shock_recompress", "block_shock"])]
    if cells.no_claim(table) or ours.empty:
        return f"Where the time of {cells.WORK[what]} goes"
    largest = ours[np.isclose(ours["size"], ours["size"].max())]
    largest = largest[largest["optimizer"].eq(labels.ordered(largest["optimizer"], labels.OPTIMIZERS)[0])]
    row = largest.iloc[-1]
    if what == "step" and "block_shock_recompress" in set(largest["method"]):
        row = largest[largest["method"].eq("block_shock_recompress")].iloc[0]
        share = 100 * (row["compress"] + row["re-mask"]) / row["whole"]
        with_ = f" with {labels.optimizer(row['optimizer'])}" if row["optimizer"] else ""
        return f"At {row['shape']}, B={row['batch']}{with_}, compressing and re-masking take {share:.0f}% of T1's step"
    bias = " and the bias" if forward.endswith("bias") else ""
    sent = 100 * (row["forward collective"] + row["dX collective"]) / row["whole"]
    return f"At {row['shape']}, B={row['batch']}, the collectives{bias} alone are {sent:.0f}% of Block-Shock's {what}"


def _pieces_alt(table: pd.DataFrame, named: dict[str, str], name: str) -> str:
    cell = table[np.isclose(table["size"], table["size"].max())]
    said = []
    for row in cell.to_dict("records"):
        who = " with ".join(filter(None, [labels.label(row["method"]), labels.optimizer(row["optimizer"])]))
        pieces = ", ".join(f"{said} {milliseconds(row[piece])}" for piece, said in named.items() if row[piece] > 0)
        said.append(f"{who}: {milliseconds(row['whole'])} ({pieces}).")
    first = cell.iloc[0]
    return f"Stacked bars of {name}. At {first['shape']}, B={first['batch']}: {' '.join(said)}"


def loss_curves(frame: pd.DataFrame) -> Figure:
    """The loss of each method against the step, and below it the distance to B1's; a panel an optimizer.

    B1 is sharded as Block-Shock is and rounds the same partial sums, so its loss is the one to compare with; without it
    the distance is to the dense one. All groups' curves are drawn. Dense (A) lies broad below the others, so that what
    coincides with it can be seen.
    """
    chosen, setting = cells.focus(
        frame[frame["metric"].isin(["loss", "check"])] if len(frame) else frame, ("optimizer",)
    )
    rows = cells.samples(chosen, "loss")
    if rows.empty:
        return figures.empty("Loss curves", "no loss was recorded")
    optimizers = labels.ordered(rows["optimizer"], labels.OPTIMIZERS)
    methods = labels.methods_in(rows["method"])
    base = "row_parallel" if rows["method"].eq("row_parallel").any() else "dense"
    gaps = _gaps(rows, base)
    with figures.theme():
        fig = figures.canvas(
            max(6.6, 0.9 + 3.9 * len(optimizers)),
            4.4 if len(gaps) else 2.7,
            _loss_title(gaps, base),
            figures.subtitle(setting, f"{rows['repeat'].max() + 1} steps, a line a method and group"),
            _loss_alt(rows, gaps, base),
        )
        heights = [3, 2] if len(gaps) else [1]
        shape = (len(heights), len(optimizers))
        axes = fig.subplots(*shape, squeeze=False, sharex=True, sharey="row", height_ratios=heights)
        for j, optimizer in enumerate(optimizers):
            part = rows[rows["optimizer"].eq(optimizer)]
            shape = f"{part['shape'].iloc[0]}, B={part['batch'].iloc[0]}"
            axes[0, j].set_title(", ".join(filter(None, [labels.optimizer(optimizer), shape])))
            for place, method in enumerate(methods):
                for _, curve in part[part["method"].eq(method)].groupby(["case", "run", "group"]):
                    _loss_line(axes[0, j], curve.sort_values("repeat"), "value", method, place)
                own = gaps[gaps["optimizer"].eq(optimizer) & gaps["method"].eq(method)]
                for _, curve in own.groupby(["case", "run", "group"]):
                    _loss_line(axes[1, j], curve.sort_values("repeat"), "gap", method, place)
            axes[-1, j].set_xlabel("step")
            for ax in axes[:, j]:
                ax.set_yscale("log")
                ax.grid(True, axis="y")
        axes[0, 0].set_ylabel("loss (mean squared error)")
        if len(gaps):
            axes[1, 0].set_ylabel(f"distance to {labels.style(base).short} (%)")
        keys = [axes[0, 0].plot([], [], **_loss_look(m, i), label=labels.label(m))[0] for i, m in enumerate(methods)]
        fig.legend(handles=keys, loc="outside lower center", ncols=min(4, len(keys)), fontsize=8.5)
    return fig


def _gaps(rows: pd.DataFrame, base: str) -> pd.DataFrame:
    """Rows of loss of the methods but `base`, where that has the same step, with `gap` in % of its loss there."""
    keys = ["case", "run", "group", "repeat"]
    against = rows[rows["method"].eq(base)][[*keys, "value"]].rename(columns={"value": "base"})
    other = rows[rows["method"].ne(base)].merge(against, on=keys)
    return other.assign(gap=100 * (other["value"] / other["base"] - 1).abs())


def _loss_look(method: str, place: int) -> dict:
    look = labels.style(method)
    if method == "dense":
        return dict(color=look.colour, linewidth=4.5, alpha=0.35, zorder=2)
    return dict(
        color=look.colour, linewidth=1.3, linestyle=(3 * place, (5, 4)), zorder=3, marker=look.marker, markersize=4
    )


def _loss_line(ax: Axes, curve: pd.DataFrame, value: str, method: str, place: int) -> None:
    shown = curve[curve[value] > 0]  # a distance of zero has no place on a log scale
    every = (5 * place, max(1, len(curve) // 8))
    ax.plot(
        shown["repeat"], shown[value], markevery=every if len(shown) > every[0] else None, **_loss_look(method, place)
    )


def _loss_title(gaps: pd.DataFrame, base: str) -> str:
    if gaps.empty:
        return "Loss against the step"
    ours = gaps[gaps["method"].eq("block_shock")]
    if ours.empty:
        return f"No method's loss is further than {gaps['gap'].max():.2g}% from {labels.label(base)}'s at any step"
    most = ours.groupby("optimizer")["gap"].max()
    order = labels.ordered(most.index, labels.OPTIMIZERS)
    said = ", ".join(" ".join(filter(None, [f"{most[name]:.2g}%", labels.optimizer(name)])) for name in order)
    return f"Largest distance of Block-Shock's loss from {labels.label(base)}'s at any step: {said}"


def _loss_alt(rows: pd.DataFrame, gaps: pd.DataFrame, base: str) -> str:
    said = []
    for (optimizer, method), curve in rows.groupby(["optimizer", "method"], sort=False):
        curve = curve.sort_values("repeat")
        own = gaps[gaps["optimizer"].eq(optimizer) & gaps["method"].eq(method)]
        far = f", at most {own['gap'].max():.2g}% from {labels.style(base).short}" if len(own) else ""
        ends = f"from {curve['value'].iloc[0]:.3g} to {curve['value'].iloc[-1]:.3g}"
        said.append(f"{labels.label(method)} with {labels.optimizer(optimizer)}: {ends}{far}.")
    return f"Lines of the loss against the step. {' '.join(said)}"
