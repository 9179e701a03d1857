"""The law drawn, speed over B1 against s; where the time goes, a bar a method: the parts of each work; the loss."""

from dataclasses import replace

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from blockshock_lib.report import figures, frames
from blockshock_lib.report.axes import Look, Work
from blockshock_lib.report.figures import FAINT, INK, MUTED
from blockshock_lib.report.plots import time_over, which_to_use
from blockshock_lib.studies.linear.axes import AXES, optimizer_name
from blockshock_lib.studies.linear.report import build, law
from blockshock_lib.studies.linear.report.build import B1, OURS, STOCK, A, listed
from blockshock_lib.studies.linear.report.tables import piece_names

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
_SMALL = dict(fontsize=8, color=MUTED, va="bottom")
_MARKS = 4 * "osD^vPX*h"


def law_figure(frame: pd.DataFrame) -> Figure:
    """The line of the law, s/2, and each case with 99% intervals, cut at the axes."""
    chosen, setting = frames.focus(frame, AXES, metrics=("forward_kernel", "compute_kernel", "reduce_kernel"))
    table, title = law.law_rows(chosen), "The law: speed over B1 = s / 2"
    if table.empty:
        return figures.empty(title, "no case holds kernel times of A, B1 and Block-Shock")
    if not frames.no_claim(table):
        below, total = int(table["s_high"].lt(2).sum()), len(table)
        least, most = table["s"].min(), table["s"].max()
        title = f"The law s/2 over B1: measured s = {f'{least:.2f} to ' if total > 1 else ''}{most:.2f}, "
        all_cases = f"below 2 in {f'all {total} cases' if total > 1 else 'the one case'}"
        title += all_cases if below == total else f"its interval below 2 in {below} of {total} cases"
    batches, sizes = sorted(table["batch"].unique()), sorted(table["size"].unique())
    tints = dict(zip(batches, sns.color_palette("viridis_r", len(batches) + 1)[1:], strict=True))
    markers = dict(zip(sizes, _MARKS, strict=False))
    told = [f"{AXES.case(row)}: s={row['s']:.2f}, {row['ratio']:.2f}x." for row in table.to_dict("records")]
    # From the points, not their intervals: two groups may give an interval without a useful end.
    left, right = 0.92 * table["s"].min(), 1.05 * max(2.0, table["s"].max())
    low, top = 0.92 * table["ratio"].min(), 1.06 * max(1.0, table["ratio"].max())
    with figures.drawing(
        *(7.4, 4.5, title, frames.no_claim(table), setting),
        *("parity needs s = 2 where B1's half product takes half of A's time", "beside a point: N, B; 99% intervals"),
        alt=f"Scatter of speed over B1 against s with the line s/2. {' '.join(told)}",
        note="s = time of A's dense product / time of the 2:4 product of the same size. Arithmetic allows s = 2 at "
        "most, and reading the weight s = 16/9 (packed bytes are 9/16 of dense). Two things lift points above the "
        "line: communication that costs both methods the same, and a half product of B1 that takes more than half "
        "of A's time, as at small N·B.",
    ) as (fig, grid):
        ax, line = grid[0, 0], np.array([left, right])
        ax.plot(line, line / 2, color=INK, linewidth=1.4, zorder=2, label="law: s / 2")
        # One label on the outer side of each line, so that they stay apart on any scale.
        for place, words, side in ((16 / 9, "bytes: s ≤ 16/9", "right"), (2.0, "arithmetic: s ≤ 2", "left")):
            ax.axvline(place, color=FAINT, linewidth=1.2, zorder=1.1)
            shift = 0.007 * (right - left) * (1 if side == "left" else -1)
            ax.text(place + shift, low + 0.03 * (top - low), words, rotation=90, ha=side, **_SMALL)
        ax.axhline(1, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        look = dict(markersize=7.5, markeredgecolor="white", markeredgewidth=0.7, alpha=0.95, elinewidth=0.9, zorder=3)
        for row in table.to_dict("records"):
            bars = dict(yerr=[[row["ratio"] - max(row["low"], low)], [min(row["high"], top) - row["ratio"]]])
            if row["s_high"] > row["s_low"]:
                bars |= dict(xerr=[[row["s"] - max(row["s_low"], left)], [min(row["s_high"], right) - row["s"]]])
            ax.errorbar(row["s"], row["ratio"], color=tints[row["batch"]], marker=markers[row["size"]], **bars, **look)
        ax.text(left + 0.02 * (right - left), 1.002, "parity with B1", **_SMALL)
        ax.set(xlim=(left, right), ylim=(low, top), xlabel="s: speed of the 2:4 product over the dense one (×)")
        ax.set_ylabel("speed of Block-Shock over B1, whole forward (×)")
        ax.legend(loc="upper left", bbox_to_anchor=(0, 0.86), fontsize=8.5)
        names = [f"{x}, {y}" for x, y in zip(AXES.x_text(table), table["batch"], strict=True)]
        figures.name_points(ax, table[["s", "ratio"]].to_numpy(float), names)
    return fig


def forward_over(frame: pd.DataFrame) -> Figure:
    """Time of a forward over B1's, of the reference lines too, which are named as what they are."""
    return time_over(build.with_lines(frame), AXES)


def where_figure(frame: pd.DataFrame) -> Figure:
    """Parts of each work that the frame has, in the largest case of each: bars a method, B1's parts together are 1."""
    times = [f"{stem}_kernel" for stem in ("forward", *build.PIECES.values())]
    chosen, setting = frames.focus(frame, AXES, panels=("optimizer",), metrics=times)
    table = law.pieces(chosen)
    table = pd.concat([build.largest(part) for _, part in table.groupby("work", sort=False)] or [table])
    table = table[table["method"].ne(STOCK)]  # so slow that no other part would be seen
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


_WAYS = {"dense": A, "cslt": OURS, "small": OURS}
ONE = replace(
    AXES,
    whole="",
    times={"compute": Work("a product")},
    methods={
        "dense": Look("dense product", "dense", "#4D4D4D", "s"),
        "cslt": Look("2:4 by planned cuSPARSELt", "2:4", "#0072B2", "o"),
        "small": Look("2:4 by the small-batch kernel", "2:4 small", "#D55E00", "P"),
    },
)


def on_one(frame: pd.DataFrame) -> pd.DataFrame:
    """The products of a weight on one GPU as records of methods: dense, or pruned 2:4 by each of our kernels. Those of
    A and of Block-Shock on two ranks, whose terms are 2:4 weights of full size; none without any.
    """
    rows, parts = frames.complete(frame, AXES), []
    rows = rows[rows["world_size"].eq(2)]
    for way, method in _WAYS.items():
        own = rows[rows["method"].eq(method)]
        each, alone = (own["metric"].eq(name) for name in ("product_by_kernel", "compute_kernel"))
        # Where a product has several ways, all of them are among `each`; of one way the detail may be left out.
        alone &= ~own["case"].isin(own.loc[each, "case"]) & (own["detail"].eq(way) | (method != OURS))
        timed = own[(each & own["detail"].eq(way)) | alone].assign(metric="compute_kernel")
        parts.append(pd.concat([own[own["metric"].eq("check")], timed]).assign(method=way, world_size=1))
    found = pd.concat(parts, ignore_index=True)
    timed = found["metric"].eq("compute_kernel") & found["method"].ne("dense")
    return found if timed.any() else found.iloc[:0]


def one_gpu(frame: pd.DataFrame) -> Figure:
    more = " No collective; the slower of two GPUs that multiply at once."
    return which_to_use(on_one(frame), ONE, title="On one GPU", more=more)


def loss_curves(frame: pd.DataFrame) -> Figure:
    """The loss of each method and group against the step, a panel an optimizer, and its distance to B1's or A's."""
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
    title, told = "Loss against the step", []
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
        *(max(6.6, 0.9 + 3.9 * len(optimizers)), 2.7, title),
        *(setting, f"{rows['repeat'].max() + 1} steps, a line a method and group"),
        alt=f"Lines of the loss against the step. {' '.join(told)}",
        columns=len(optimizers),
        sharey=True,
    ) as (fig, grid):
        for ax, optimizer in zip(grid[0], optimizers, strict=True):
            case = rows[rows["optimizer"].eq(optimizer)].iloc[0]
            ax.set_title(listed(optimizer_name(optimizer), AXES.case(case)))
            ax.set_xlabel("step")
            for place, method in enumerate(methods):
                part = rows[rows["optimizer"].eq(optimizer) & rows["method"].eq(method)]
                for _, line in part.sort_values("repeat").groupby(["case", "run", "group"]):
                    every = (5 * place, max(1, len(line) // 8)) if len(line) > 5 * place else None
                    ax.plot(line["repeat"], line["value"], markevery=every, **_look(method, place))
            ax.set_yscale("log")
            ax.grid(True, axis="y")
        grid[0, 0].set_ylabel("loss (mean squared error)")
        handles = [grid[0, 0].plot([], [], **_look(m, i), label=AXES.label(m))[0] for i, m in enumerate(methods)]
        fig.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=8.5)
    return fig


def _look(method: str, place: int) -> dict:
    look = AXES.look(method)
    if method == A:
        return dict(color=look.colour, linewidth=4.5, alpha=0.35, zorder=2)
    dashes = dict(linewidth=1.3, linestyle=(3 * place, (5, 4)), zorder=3)
    return dict(color=look.colour, marker=look.marker, markersize=4, **dashes)
