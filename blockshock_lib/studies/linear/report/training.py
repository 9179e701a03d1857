"""Phases 2 and 3: what the pieces of a step take, which way a layer chose, and the loss."""

import pandas as pd
from matplotlib.figure import Figure

from blockshock_lib.report import figures, frames, tables
from blockshock_lib.report.tables import rounded
from blockshock_lib.studies.linear.axes import AXES, optimizer_name
from blockshock_lib.studies.linear.report import build
from blockshock_lib.studies.linear.report.build import B1, KEYS, OURS, PIECES, A, listed, shown

_BYTES = {"weights": "weights_bytes_held", "copies": "copies_bytes", "gradients": "gradient_bytes"}
_BYTES |= {"optimizer": "optimizer_bytes", "activations": "activation_bytes", "peak": "peak_bytes"}


def pieces_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Median ms of every piece alone, a row a (case, method)."""
    table = frames.medians(frame, AXES, **{name: f"{stem}_kernel" for name, stem in PIECES.items()})
    columns = {name: build.text(table[name]) for name in PIECES if table[name].notna().any()}
    return shown(table, columns).rename(columns=piece_names(frame))


def piece_names(frame: pd.DataFrame) -> dict[str, str]:
    """How each of PIECES is called: the forward's collective is timed with the bias added, where there is a bias."""
    biased = frames.complete(frame, AXES)["detail"].eq("db").any()
    return {name: f"{name} + bias" if biased and name == "forward collective" else name for name in PIECES}


def memory_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What a step holds by part, each over its formula, and the peak beside its own: `tables.memory_table`."""
    table = tables.memory_table(frame, AXES, _BYTES)
    return table[[name for name in table if name.startswith("peak") or "by formula" not in name]]


def ways_table(frame: pd.DataFrame, metric: str, chosen: str, *ways: str, missing: tuple = ()) -> pd.DataFrame:
    """Median ms each way, a row a (case, method); of two, the second's time over the first's; and the way that the
    layer took, by the detail of `chosen`: where fresh groups differ, in how many of them each.
    """
    table = frames.medians(frame, AXES, **{way: (metric, way) for way in ways})
    if table.empty:
        return build.nothing(frame, *missing) if missing else pd.DataFrame()
    taken = frames.samples(frame, chosen).groupby(KEYS, sort=False)[["detail", "group"]].apply(_taken).rename("taken")
    table = table.merge(taken.reset_index(), on=KEYS, how="left")
    timed = [way for way in ways if table[way].notna().any()]
    columns = {f"{way} (ms)": rounded(table[way]) for way in timed}
    if len(ways) == len(timed) == 2:
        columns[f"{ways[1]} / {ways[0]}"] = rounded(table[ways[1]] / table[ways[0]], 3)
    return shown(table, columns | {"taken": table["taken"].astype(object)})


def _taken(rows: pd.DataFrame) -> str:
    counts = rows.groupby("detail")["group"].nunique().sort_values(ascending=False, kind="stable")
    return ", ".join(f"{way} in {n} of {counts.sum()}" if len(counts) > 1 else way for way, n in counts.items())


def loss_curves(frame: pd.DataFrame) -> Figure:
    """The loss of each method and group against the step, and below it the distance to B1's (which rounds the same
    partial sums as Block-Shock), or else to A's; a panel an optimizer. A lies broad below what coincides with it.
    """
    chosen, setting = frames.focus(frame, AXES, panels=("optimizer",), metrics=("loss",))
    rows = frames.samples(chosen, "loss")
    if rows.empty:
        return figures.empty("Loss curves", "no loss was recorded")
    optimizers, methods = AXES.sort("optimizer", rows["optimizer"]), AXES.ordered(rows["method"])
    base, keys = B1 if rows["method"].eq(B1).any() else A, ["case", "run", "group", "repeat"]
    against = rows[rows["method"].eq(base)].set_index(keys)["value"].rename("base")
    gaps = rows[rows["method"].ne(base)].join(against, on=keys, how="inner")
    gaps["gap"] = 100 * (gaps["value"] / gaps["base"] - 1).abs()
    most = gaps[gaps["method"].eq(OURS)].groupby("optimizer")["gap"].max()
    title, told, heights = "Loss against the step", [], [3, 2] if len(gaps) else [1]
    if len(most):
        parts = [f"{most[name]:.2g}% {optimizer_name(name)}".strip() for name in AXES.sort("optimizer", most.index)]
        title = f"Largest distance of Block-Shock's loss from {AXES.label(base)}'s at any step: {', '.join(parts)}"
    elif len(gaps):
        title = f"No method's loss is further than {gaps['gap'].max():.2g}% from {AXES.label(base)}'s at any step"
    for (optimizer, method), curve in rows.groupby(["optimizer", "method"], sort=False):
        losses = curve.sort_values("repeat")["value"]
        gap = gaps.loc[gaps["optimizer"].eq(optimizer) & gaps["method"].eq(method), "gap"]
        far = f", at most {gap.max():.2g}% from {AXES.short(base)}" if len(gap) else ""
        ends = f"from {losses.iloc[0]:.3g} to {losses.iloc[-1]:.3g}"
        told.append(f"{AXES.label(method)} with {optimizer_name(optimizer)}: {ends}{far}.")
    with figures.drawing(
        *(max(6.6, 0.9 + 3.9 * len(optimizers)), 4.4 if len(gaps) else 2.7, title),
        *(setting, f"{rows['repeat'].max() + 1} steps, a line a method and group"),
        alt=f"Lines of the loss against the step. {' '.join(told)}",
        rows=len(heights),
        columns=len(optimizers),
        sharex=True,
        sharey="row",
        height_ratios=heights,
    ) as (fig, grid):
        for axes, optimizer in zip(grid.T, optimizers, strict=True):
            case = rows[rows["optimizer"].eq(optimizer)].iloc[0]
            axes[0].set_title(listed(optimizer_name(optimizer), AXES.case(case)))
            axes[-1].set_xlabel("step")
            for place, method in enumerate(methods):
                for ax, table, value in ((axes[0], rows, "value"), (axes[-1], gaps, "gap")):
                    part = table[table["optimizer"].eq(optimizer) & table["method"].eq(method)]
                    for _, curve in part.groupby(["case", "run", "group"]):
                        line = curve[curve[value] > 0].sort_values("repeat")  # zero has no place on a log scale
                        every = (5 * place, max(1, len(curve) // 8)) if len(line) > 5 * place else None
                        ax.plot(line["repeat"], line[value], markevery=every, **_look(method, place))
            for ax in axes:
                ax.set_yscale("log")
                ax.grid(True, axis="y")
        grid[0, 0].set_ylabel("loss (mean squared error)")
        if len(gaps):
            grid[1, 0].set_ylabel(f"distance to {AXES.short(base)} (%)")
        handles = [grid[0, 0].plot([], [], **_look(m, i), label=AXES.label(m))[0] for i, m in enumerate(methods)]
        fig.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=8.5)
    return fig


def _look(method: str, place: int) -> dict:
    look = AXES.look(method)
    if method == A:
        return dict(color=look.colour, linewidth=4.5, alpha=0.35, zorder=2)
    dashes = dict(linewidth=1.3, linestyle=(3 * place, (5, 4)), zorder=3)
    return dict(color=look.colour, marker=look.marker, markersize=4, **dashes)
