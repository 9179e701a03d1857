"""Figures of the gpt study's losses: the gap over syncs, the curves over tokens, what is dropped after training."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from blockshock_lib.report import figures
from blockshock_lib.report.figures import INK, MUTED
from blockshock_lib.studies.gpt import gaps
from blockshock_lib.studies.gpt.axes import AXES
from blockshock_lib.studies.gpt.report import words_of

_NONE = "no arm was trained to its end beside tensor parallelism"


def gap_over_syncs(frame: pd.DataFrame) -> Figure:
    """Each arm's loss less tensor parallelism's, paired by seed, over its all-reduces a forward: intervals where there
    are seeds enough, else a point a seed.
    """
    rows = gaps.setting(gaps.finals(frame))
    table, title = gaps.table(rows), "Loss gap over synchronisations"
    table = table[table["method"].ne(gaps.BASELINE) & table["seeds"].gt(0)]
    if table.empty:
        return figures.empty(title, _NONE)
    worst = table.loc[table["gap"].map(lambda one: one.mean).idxmax()]
    title = f"{AXES.short(worst['method'])} costs most: {worst['gap'].mean:+.3f} nats"
    with figures.drawing(
        *(7.5, 3.6, title, words_of(rows)),
        alt=" ".join(f"{AXES.short(r.method)}, {r.syncs} syncs: {r.gap} nats." for r in table.itertuples()),
        note="Gap: validation loss less tensor parallelism's of the same seed. Bars: 99% intervals over seeds; open "
        f"marks: single seeds, of which fewer than {gaps.LEAST} make no interval.",
    ) as (fig, grid):
        ax = grid[0, 0]
        ax.axhline(0, color=INK, linewidth=1)
        places = {count: at for at, count in enumerate(sorted(table["syncs"].unique(), reverse=True))}
        beside = table.groupby("syncs").cumcount() - (table.groupby("syncs")["syncs"].transform("size") - 1) / 2
        for row, aside in zip(table.itertuples(), beside, strict=True):
            look, x = AXES.look(row.method), places[row.syncs] + 0.16 * aside
            kind = dict(color=look.colour, marker=look.marker, linestyle="", markersize=6)
            if np.isnan(row.gap.low):
                each = gaps.paired(rows, row.method)
                ax.plot([x] * len(each), each, **kind | {"markerfacecolor": "none"}, label=look.label)
            else:
                ax.errorbar(x, row.gap.mean, row.gap.half, **kind, capsize=3, elinewidth=1.2, label=look.label)
        ax.set_xticks(list(places.values()), [str(count) for count in places])
        ax.set(xlabel="all-reduces a forward, of 12 layers", ylabel="loss gap (nats)")
        ax.grid(True, axis="y")
        ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
    return fig


def loss_over_tokens(frame: pd.DataFrame) -> Figure:
    """Validation loss over tokens, the mean of the seeds with their range, and beside it each arm's gap on the way."""
    rows = gaps.curves(frame)
    best = gaps.setting(gaps.finals(frame))
    title = "Loss over tokens"
    if best.empty:
        return figures.empty(title, _NONE)
    rows = rows.merge(best[gaps.SAME].drop_duplicates(), on=gaps.SAME)
    rows = rows.assign(tokens=rows["repeat"] * rows["batch"] * rows["context"] / 1e6)
    methods = AXES.ordered(rows["method"])
    with figures.drawing(
        *(9, 3.6, title, words_of(best)),
        alt=" ".join(f"{AXES.short(r.method)} ends at {r.loss:.3f} nats." for r in gaps.table(best).itertuples()),
        note="Lines: mean over seeds; bands: from the lowest to the highest. Right: less tensor parallelism's loss of "
        "the same seed at the same token.",
        columns=2,
    ) as (fig, grid):
        for ax, less in zip(grid[0], (False, True), strict=True):
            for method in methods:
                values = rows[rows["method"].eq(method)].pivot_table(index="tokens", columns="seed", values="value")
                if less:
                    base = rows[rows["method"].eq(gaps.BASELINE)].pivot_table(
                        index="tokens", columns="seed", values="value"
                    )
                    values = (values - base).dropna(how="all").dropna(axis=1, how="all")
                look = AXES.look(method)
                kind = dict(color=look.colour, marker=look.marker, markersize=3.5, linewidth=1.2)
                ax.plot(values.index, values.mean(axis=1), **kind, label=look.label)
                ax.fill_between(
                    values.index, values.min(axis=1), values.max(axis=1), color=look.colour, alpha=0.15, lw=0
                )
            ax.set(xlabel="tokens (million)", ylabel="gap (nats)" if less else "validation loss (nats)")
            ax.grid(True, axis="y")
        ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
    return fig


def dropped(frame: pd.DataFrame) -> Figure:
    """Of the trained tensor-parallel model: what each sublayer's sync is worth alone, and what dropping them in that
    order costs, before and after distillation.
    """
    title = "Syncs dropped after training"
    alone, after = gaps.curves(frame, "sensitivity"), gaps.curves(frame, "dropped_loss")
    rows = gaps.finals(frame)
    rows = gaps.setting(rows[rows["case"].isin(after["case"])])
    if rows.empty:
        return figures.empty(title, "no trained model lost its syncs")
    alone, after, taught = (
        part.merge(rows[gaps.SAME].drop_duplicates(), on=gaps.SAME)
        for part in (alone, after, gaps.curves(frame, "distilled_loss"))
    )
    own = rows.set_index("seed")["value"]
    after, taught = (part.assign(cost=part["value"] - part["seed"].map(own)) for part in (after, taught))
    alone = alone.assign(place=alone["detail"].astype(int))
    means = alone.groupby("place")["value"].agg(["mean", "min", "max"])
    with figures.drawing(
        *(9, 3.2, title, words_of(rows)),
        alt=f"The sync of sublayer {means['mean'].idxmax()} is worth most, {means['mean'].max():.3g} nats.",
        note="Left: loss without this sublayer's sync alone, which is made with the next one, less the loss with all. "
        "Right: the least sensitive dropped first; open: after distillation piece by piece. Bands, bars: over seeds.",
        columns=2,
    ) as (fig, grid):
        left, right = grid[0]
        even = means.index % 2 == 0
        left.bar(means.index, means["mean"], color=np.where(even, "#0072B2", "#E69F00"))
        left.vlines(means.index, means["min"], means["max"], color=INK, linewidth=1)
        left.set(xlabel="sublayer (blue: attention, orange: MLP)", ylabel="its sync is worth (nats)")
        costs = after.groupby("repeat")["cost"].agg(["mean", "min", "max"])
        right.plot(costs.index, costs["mean"], color=INK, marker="o", markersize=3.5)
        right.fill_between(costs.index, costs["min"], costs["max"], color=MUTED, alpha=0.2, lw=0)
        right.plot(taught["repeat"], taught["cost"], color="#D55E00", marker="o", markerfacecolor="none", linestyle="")
        right.set(xlabel="syncs dropped of 24", ylabel="loss gap (nats)", yscale="symlog")
        right.set_yscale("symlog", linthresh=0.01)
        for ax in (left, right):
            ax.grid(True, axis="y")
    return fig
