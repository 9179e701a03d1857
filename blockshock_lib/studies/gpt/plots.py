"""Figures of the gpt study's losses: the gap over syncs, the curves over tokens, what is dropped after training."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from blockshock_lib.report import figures
from blockshock_lib.report.figures import INK, MUTED
from blockshock_lib.studies.gpt import gaps
from blockshock_lib.studies.gpt.axes import AXES

_NONE = "no arm was trained to its end beside tensor parallelism"


def gap_over_syncs(frame: pd.DataFrame) -> Figure:
    """Each arm's loss less tensor parallelism's, paired by seed, over its all-reduces a forward: intervals where there
    are seeds enough, else a point a seed. A panel a size, the widest first.
    """
    panels, title, sizes = [], "Loss gap over all-reduces a forward", gaps.settings(gaps.finals(frame))
    for rows in sizes:
        table = gaps.table(rows)
        table = table[table["method"].ne(gaps.BASELINE) & table["seeds"].map(len).gt(0)]
        panels += [(rows, table)] if len(table) else []
    if not panels:
        return figures.empty(title, _NONE)
    every = [row for _, table in panels for row in table.itertuples()]
    worst = max(every, key=lambda row: row.gap.mean)
    counts = sorted({row.syncs for row in every}, reverse=True)
    with figures.drawing(
        *(4.4 * len(panels) + 3.1, 3.6, f"{AXES.short(worst.method)} costs most: {worst.gap.mean:+.3f} nats"),
        "; ".join(gaps.words_of(rows) for rows, _ in panels),
        alt=" ".join(f"{AXES.short(row.method)}, {row.syncs} all-reduces: {row.gap} nats." for row in every),
        note="Gap: validation loss less tensor parallelism's of the same seed. Bars: 99% intervals over seeds; open "
        f"marks: single seeds, of which fewer than {gaps.LEAST} make no interval.",
        columns=len(panels),
        sharey=True,
    ) as (fig, grid):
        for ax, (rows, table) in zip(grid[0], panels, strict=True):
            ax.axhline(0, color=INK, linewidth=1)
            beside = table.groupby("syncs").cumcount() - (table.groupby("syncs")["syncs"].transform("size") - 1) / 2
            for row, aside in zip(table.itertuples(), beside, strict=True):
                look, x = AXES.look(row.method), counts.index(row.syncs) + 0.16 * aside
                kind = dict(color=look.colour, marker=look.marker, linestyle="", markersize=6, label=look.label)
                if np.isnan(row.gap.low):
                    ax.plot([x] * len(row.seeds), gaps.paired(rows, row.method), **kind, markerfacecolor="none")
                else:
                    ax.errorbar(x, row.gap.mean, row.gap.half, **kind, capsize=3, elinewidth=1.2)
            ax.set_xticks(range(len(counts)), map(str, counts))
            ax.set(xlabel="all-reduces a forward, of 12 layers", title=gaps.size_of(rows, sizes) * (len(panels) > 1))
            ax.grid(True, axis="y")
        grid[0, 0].set_ylabel("loss gap (nats)")
        most = max(grid[0], key=lambda ax: len(ax.get_legend_handles_labels()[0]))
        grid[0, -1].legend(*most.get_legend_handles_labels(), loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
    return fig


def loss_over_tokens(frame: pd.DataFrame) -> Figure:
    """Validation loss over tokens, the mean of the seeds with their range, and beside it each arm's gap on the way."""
    best, title = gaps.setting(gaps.finals(frame)), "Loss over tokens"
    if best.empty:
        return figures.empty(title, _NONE)
    rows = gaps.along(frame, best)
    rows = rows.assign(tokens=rows["repeat"] * rows["batch"] * rows["context"] / 1e6)
    wide = rows.pivot_table(index="tokens", columns=["method", "seed"], values="value")
    ends = gaps.table(best).dropna(subset="loss")  # of seeds that the baseline has, too
    with figures.drawing(
        *(9, 3.6, title, gaps.words_of(best)),
        alt=" ".join(f"{AXES.short(r.method)} ends at {r.loss:.3f} nats." for r in ends.itertuples()),
        note="Lines: mean over seeds; bands: from the lowest to the highest. Right: less tensor parallelism's loss of "
        "the same seed at the same token.",
        columns=2,
    ) as (fig, grid):
        for ax, less in zip(grid[0], (False, True), strict=True):
            for method in AXES.ordered(rows["method"]):
                values = wide[method]
                if less:
                    values = values - wide[gaps.BASELINE] if gaps.BASELINE in wide else values * np.nan
                look, low, high = AXES.look(method), values.min(axis=1), values.max(axis=1)
                kind = dict(color=look.colour, marker=look.marker, markersize=3.5, linewidth=1.2)
                ax.plot(values.index, values.mean(axis=1), **kind, label=look.label)
                ax.fill_between(values.index, low, high, color=look.colour, alpha=0.15, lw=0)
            ax.set(xlabel="tokens (million)", ylabel="gap (nats)" if less else "validation loss (nats)")
            ax.grid(True, axis="y")
        ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
    return fig


def dropped(frame: pd.DataFrame) -> Figure:
    """Of the trained tensor-parallel model: what each sublayer's sync is worth alone, and what dropping them in that
    order costs, before and after distillation.
    """
    rows, title = gaps.finals(frame), "All-reduces dropped after training"
    rows = gaps.setting(rows[rows["case"].isin(gaps.curves(frame, "dropped_loss")["case"])])
    if rows.empty:
        return figures.empty(title, "no trained model lost its all-reduces")
    after, taught = (gaps.after(frame, rows, f"{how}_loss") for how in ("dropped", "distilled"))
    alone = gaps.along(frame, rows, "sensitivity")
    means = alone.groupby(alone["detail"].astype(int))["value"].agg(["mean", "min", "max"])
    with figures.drawing(
        *(9, 3.2, title, gaps.words_of(rows)),
        alt=f"The all-reduce of sublayer {means['mean'].idxmax()} is worth most, {means['mean'].max():.3g} nats.",
        note="Left: loss without this sublayer's all-reduce, which is made with the next one, less the loss with all. "
        "Right: the least sensitive dropped first; open: after distillation piece by piece. Bands, bars: over seeds.",
        columns=2,
    ) as (fig, grid):
        left, right = grid[0]
        left.bar(means.index, means["mean"], color=np.where(means.index % 2, "#E69F00", "#0072B2"))
        left.vlines(means.index, means["min"], means["max"], color=INK, linewidth=1)
        left.set(xlabel="sublayer (blue: attention, orange: MLP)", ylabel="its all-reduce is worth (nats)")
        costs = after.groupby("repeat")["cost"].agg(["mean", "min", "max"])
        right.plot(costs.index, costs["mean"], color=INK, marker="o", markersize=3.5)
        right.fill_between(costs.index, costs["min"], costs["max"], color=MUTED, alpha=0.2, lw=0)
        right.plot(taught["repeat"], taught["cost"], color="#D55E00", marker="o", markerfacecolor="none", linestyle="")
        right.set(xlabel="all-reduces dropped of 24 a forward", ylabel="loss gap (nats)", yscale="symlog")
        right.set_yscale("symlog", linthresh=0.01)
        for ax in (left, right):
            ax.grid(True, axis="y")
    return fig
