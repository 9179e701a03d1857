"""Phases 2 and 3: what was checked, what a step and its pieces take, what a layer chose, what fits, and the loss."""

import re
from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from blockshock_lib.report import figures, frames
from blockshock_lib.report.tables import ABSENT, rounded
from blockshock_lib.studies.linear.axes import AXES, TENSORS, optimizer_name
from blockshock_lib.studies.linear.report import build
from blockshock_lib.studies.linear.report.build import B1, KEYS, OURS, PIECES, A, listed, shown

_GATE = {"error_max_ratio": 2.0, "error_rms_ratio": 1.05, "error_line_ratio": 1.0}
_WORDS = {"oom": "out of memory", "timeout": "out of time", "unsupported": "unsupported"}
_BOUNDS = {
    "memory": "memory, by formula",
    "2:4 library": "2:4 library",
    "formula": "memory; the 2:4 library was not asked",  # of records older than that bound
}
# How the reason of a failed check begins: "rank 1: dx: largest error ...", "rank 0: y after 3 steps holds NaN".
_NAMED = re.compile(r"(rank \d+: )?(?P<tensor>y|dx|dw|db|weight)\b(?P<after> after)?")
# The worst last. Of a method that ran in some cases and cannot in others its checks are shown; the reasons have a
# table of their own.
_RANK = (ABSENT, "unsupported", "pass", "not reached", "out of time", "out of memory", "FAIL")


def tensor_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The worst outcome of the check of each tensor in all cases and groups, a row a (method, optimizer). A check stops
    at the first that fails: the rest say "not reached". "W after steps" covers y and dX with the trained weights.
    """
    errors = frames.complete(frame, AXES)
    errors = errors[errors["metric"].isin(list(_GATE)) & errors["status"].eq("ok")]
    keys = ["run", "case", "group", "method"]
    inside = errors["value"].le(errors["metric"].map(_GATE).astype(float))
    passed = inside.groupby([errors[name] for name in (*keys, "detail")]).all()
    # Where nothing was reached, y is what was asked for first.
    tensors = [name for name in TENSORS if name in set(errors["detail"])] or [""]
    found = []
    for row in frames.checks(frame).to_dict("records"):
        good = {tensor: passed.get((*(row[name] for name in keys), tensor)) for tensor in tensors}
        found.append({"optimizer": row["optimizer"], "method": row["method"]} | _outcomes(row, good))
    if not found:
        return pd.DataFrame(columns=["method", *(TENSORS[tensor] for tensor in tensors)], dtype=object)
    table = pd.DataFrame(found).groupby(["optimizer", "method"], as_index=False).agg(lambda c: max(c, key=_RANK.index))
    table = build.in_order(table, "optimizer", "method")
    table["method"], table["optimizer"] = table["method"].map(AXES.label), table["optimizer"].map(optimizer_name)
    return table.rename(columns=TENSORS).drop(columns=[] if table["optimizer"].any() else "optimizer")


def _outcomes(row: dict, passed: dict[str, bool | None]) -> dict[str, str]:
    """What is said of each tensor in a row of `frames.checks`; `passed`: whether its errors were within the gate."""
    if row["outcome"] in _WORDS:
        return dict.fromkeys(passed, _WORDS[row["outcome"]])
    if row["outcome"] == "passed":
        return {tensor: ABSENT if good is None else "pass" for tensor, good in passed.items()}
    if named := _NAMED.match(row["reason"]):
        bad = "weight" if named["after"] else named["tensor"].replace("y", "")
    else:  # the first without an error inside the gate, or the last, whose fault is no error's size
        bad = next((tensor for tensor, good in passed.items() if not good), list(passed)[-1])
    order = list(TENSORS)
    return {t: "FAIL" if t == bad else "pass" if order.index(t) < order.index(bad) else "not reached" for t in passed}


def how_table(frame: pd.DataFrame) -> pd.DataFrame:
    """How each method's dX is made with each mask, a row a mask, text only: "2:4", "dense masked" or "dense"."""
    rows = frames.valid(frames.complete(frame, AXES))
    rows = rows[rows["metric"].eq("dx_kernel")]
    table = rows.groupby(["mask", "method"])["detail"].agg(lambda details: ", ".join(sorted(set(details)))).unstack()
    table = table.reindex(index=AXES.sort("mask", rows["mask"]), columns=AXES.ordered(rows["method"]))
    return table.rename(columns=AXES.label).rename_axis(columns=None).rename_axis("mask").fillna(ABSENT).astype(object)


def whole_table(frame: pd.DataFrame, what: str) -> pd.DataFrame:
    """Times of every valid cell, a row a (case, method), smallest case first; `what` is "pass" or "step": median kernel
    time of the slowest rank, on a CPU of plain calls in a loop; tokens are rows of the input.
    """
    metric = frames.time_metric(frame, f"{what}_kernel")
    table = frames.summary(frame, AXES, metric)
    table = build.add_medians(table, frame, {"call": f"{what}_call", "floor": f"floor_{what}"})
    table = table.merge(build.speeds(frame, B1, AXES.ordered(table["method"]), metric), on=KEYS, how="left")
    ms = table["median"].astype(float)
    columns = {
        f"{what} (ms)": rounded(ms),
        "p10–p90 (ms)": [f"{row.p10:.4g}–{row.p90:.4g}" for row in table.itertuples(index=False)],
        "vs B1": table["speed"],
        "claim": table["claim"],
        "tokens/s": rounded(1e3 * table["batch"].astype(float) / ms).round().astype(int),
        "call (ms)": rounded(table["call"]),
        "of floor (%)": (100 * table["floor"] / ms).round(1),
    }
    return shown(table, columns)


def pieces_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Median ms of every piece alone, a row a (case, method). What a step hides of them, or adds, is in the figure."""
    table = build.medians(frame, {name: f"{stem}_kernel" for name, stem in PIECES.items()})
    columns = {name: build.text(table[name]) for name in PIECES if table[name].notna().any()}
    return shown(table, columns).rename(columns=piece_names(frame))


def piece_names(frame: pd.DataFrame) -> dict[str, str]:
    """How each of PIECES is called: the forward's collective is timed with the bias added, where there is a bias."""
    biased = frames.complete(frame, AXES)["detail"].eq("db").any()
    return {name: f"{name} + bias" if biased and name == "forward collective" else name for name in PIECES}


def stages_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What follows the optimizer, against its floor: a row a (case, method, stage)."""
    stages = {name: PIECES[name] for name in ("re-mask", "compress", "refresh")}
    table, columns = against_floor(frame, "stage", {name: (f"{s}_kernel", f"floor_{s}") for name, s in stages.items()})
    return pd.DataFrame() if table.empty else shown(table, columns)


def against_floor(
    frame: pd.DataFrame, what: str, metrics: Mapping[str, tuple[build.Metric, str]]
) -> tuple[pd.DataFrame, dict[str, pd.Series]]:
    """Rows that have a time of `metrics`, name (in the column `what`) -> (time, floor); and what is shown of them."""
    found = []
    for name, (time, floor) in metrics.items():
        part = build.medians(frame, {"time": time, "floor": floor}).dropna(subset="time")
        found.append(part.assign(**{what: name}))
    table = build.stacked(found)
    times = {f"{name} (ms)": rounded(table[name]) for name in ("time", "floor")}
    over = rounded(table["time"] / table["floor"].mask(table["floor"].eq(0)), 3)
    return table, {what: table[what]} | times | {"time / floor": over}


def ways_table(frame: pd.DataFrame, metric: str, chosen: str, *ways: str, missing: tuple = ()) -> pd.DataFrame:
    """Median ms each way, a row a (case, method); of two, the second's time over the first's; and the way that the
    layer took, by the detail of `chosen`: where fresh groups differ, in how many of them each.
    """
    table = build.medians(frame, {way: (metric, way) for way in ways})
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


def largest_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The largest N (a multiple of 4096) that can train on this machine and what bounds it, memory by the method's
    formula or its 2:4 library; a row a (B, optimizer, method). No run tried it.
    """
    rows = frames.valid(frames.complete(frame, AXES))
    rows = rows[rows["metric"].eq("largest_n") & rows["detail"].isin(list(_BOUNDS))]
    rows = rows.sort_values("value", kind="stable").drop_duplicates(["batch", "optimizer", "method"])
    rows = build.in_order(rows, "batch", "optimizer", "method")
    columns = {"B": rows["batch"], "optimizer": rows["optimizer"].map(optimizer_name)}
    columns |= {"method": rows["method"].map(AXES.label), "largest N, not tried": build.text(rows["value"], "{:.0f}")}
    return pd.DataFrame(columns | {"bound by": rows["detail"].map(_BOUNDS)})


def loss_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The loss curves in numbers, a row an (optimizer, method): first and last loss, and the largest distance at any
    step from B1's and from the dense one (A's), each over the loss that it is measured from, in %.
    """
    rows, found = frames.samples(frames.complete(frame, AXES), "loss"), []
    for optimizer in AXES.sort("optimizer", rows["optimizer"]):
        for _, case in rows[rows["optimizer"].eq(optimizer)].groupby("case", sort=True):
            curves = case.pivot_table(index="repeat", columns="method", values="value")
            for method in AXES.ordered(curves):
                curve = curves[method].dropna()
                row = {"optimizer": optimizer_name(optimizer), "method": AXES.label(method), "steps": len(curve)}
                row |= {"first loss": curve.iloc[0], "last loss": curve.iloc[-1]}
                for other, name in ((B1, "B1"), (A, "A")):
                    if other in curves and method != other:
                        gap = ((curve - curves[other]).abs() / curves[other]).dropna()
                        row |= {f"largest gap to {name} (%)": 100 * gap.max(), f"{name}: at step": str(gap.idxmax())}
                found.append(row)
    table = rounded(pd.DataFrame(found))
    return table.fillna({name: ABSENT for name in table if name.endswith("at step")})


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
