"""What a training step that is 2:4 takes beside the dense one, piece by piece; and what is claimed of it. The rule was
written before any time of a GPU was there.
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from blockshock_lib.report import figures, frames, verdicts
from blockshock_lib.report.answer import counted
from blockshock_lib.report.figures import INK
from blockshock_lib.report.interval import LEVEL
from blockshock_lib.report.tables import ABSENT, rounded, shown, smallest_first
from blockshock_lib.report.verdicts import FASTER, Verdict
from blockshock_lib.studies.gallery.axes import AXES
from blockshock_lib.studies.gallery.hypotheses import NOTHING, somewhere
from blockshock_lib.studies.gallery.methods import WAYS
from blockshock_lib.studies.gallery.phases import STEP
from blockshock_lib.studies.gallery.report import counts, fastest, ratios

DENSE = "step_dense"
LEAST = 1.10  # the seed: 10 to 20% end to end
COLOURS = dict(zip(STEP, ("#D55E00", "#56B4E9", "#0072B2"), strict=False))
_CASE = ["pattern", "weight", "batch"]


def speeds(frame: pd.DataFrame, level: float = LEVEL) -> pd.DataFrame:
    """`ratios` of the step of every way over the dense one; of calls where a graph can hold no sparsify."""
    ways = [name for name in WAYS if name != DENSE]
    kernel, call = (ratios(frame, [DENSE], ways, f"step_{kind}", level) for kind in ("kernel", "call"))
    table = pd.concat([one for one in (kernel, call) if len(one)] or [kernel], ignore_index=True)
    return table.drop_duplicates(["case", "method"], ignore_index=True)


def pieces(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a (case, way), ms of each piece of STEP: kernel time, or of calls where a graph can hold none of it."""
    names = {f"{part}_{kind}": f"{part}_{kind}" for part in STEP for kind in ("kernel", "call")}
    table = frames.medians(frame, AXES, **names)
    table = table[table["method"].isin(WAYS)] if len(table) else table
    for part in STEP:
        table[part] = table[f"{part}_kernel"].fillna(table[f"{part}_call"])
    return table.dropna(subset="step")


def times(frame: pd.DataFrame) -> pd.DataFrame:
    """Median ms of the pieces of a step, kernel time or, "calls", what an eager user pays; its speed over the dense."""
    table = pieces(frame)
    if table.empty:
        return pd.DataFrame({"steps": ["none was measured"]})
    made = {f"{part} (ms)": rounded(table[part]) for part in STEP}
    made["calls"] = [", ".join(part for part in STEP if np.isnan(row[f"{part}_kernel"])) for _, row in table.iterrows()]
    words = {(row["case"], row["method"]): verdicts.interval_text(row) for row in speeds(frame).to_dict("records")}
    made["vs dense"] = [words.get(key, ABSENT) for key in zip(table["case"], table["method"], strict=True)]
    return shown(smallest_first(table.assign(**made), AXES), AXES, [*_CASE, "method", *made])


def held(frame: pd.DataFrame) -> pd.DataFrame:
    """Bytes over the dense ones: of the weight in training and in inference, and of what a backward reads again."""
    names = ("weight_training", "weight_inference", "activations")
    table = frames.medians(frame, AXES, **{name: name for name in names})
    if table.empty:
        return pd.DataFrame({"held": ["none was weighed"]})
    dense = table[table["method"].eq(DENSE)].set_index("case")
    made = {f"{name.replace('_', ', ')} over dense": table[name] / table["case"].map(dense[name]) for name in names}
    made = {name: over.astype(float).round(4) for name, over in made.items()}
    return shown(smallest_first(table.assign(**made), AXES), AXES, [*_CASE, "method", *made])


def answer(frame: pd.DataFrame) -> str:
    """The answer of the phase in a sentence, of the 2:4 step that judges each case."""
    best = fastest(speeds(frame), "case")
    said, wins = counted(best, "the dense step"), best.loc[best["outcome"].eq(FASTER), "method"]
    names = f" ({counts(wins)})" * bool(len(wins))
    return said if frames.no_claim(best) or best.empty else f"The fastest 2:4 step{names} beside the dense one: {said}"


def break_even(frame: pd.DataFrame) -> Figure:
    """A bar a way of the largest case: making it 2:4, then its products, over the whole dense step."""
    title, table = "Does making it 2:4 pay for itself?", pieces(frame)
    table = table[table["batch"].eq(table["batch"].max())].sort_values("n", kind="stable")
    table = table[table["case"].eq(table["case"].iloc[-1])].set_index("method") if len(table) else table
    if DENSE not in table.index:
        return figures.empty(title, "no case holds valid times of a dense step")
    order = [name for name in AXES.ordered(table.index)[::-1]]
    over = table[list(STEP)].div(table.loc[DENSE, "step"])
    with figures.drawing(
        *(8, 0.9 + 0.35 * len(order), title, frames.no_claim(table), AXES.case(table.iloc[0])),
        alt=" ".join(f"{AXES.label(name)}: {over.loc[name, 'step']:.2f} of the dense step." for name in order[::-1]),
        note="Left of the line a step pays. Bars: pieces measured alone; the mark: the whole step. The nonlinearity is "
        "part of what makes it 2:4. Hatched: times of calls, for a CUDA graph cannot hold that piece.",
    ) as (fig, grid):
        ax, left = grid[0, 0], np.zeros(len(order))
        for part in STEP[:-1]:
            width = over.loc[order, part].fillna(0).to_numpy()
            bars = ax.barh(range(len(order)), width, left=left, color=COLOURS[part], label=part, height=0.6)
            for bar, name in zip(bars, order, strict=True):
                bar.set_hatch("//" if np.isnan(table.loc[name, f"{part}_kernel"]) else "")
            left += width
        ax.plot(over.loc[order, "step"], range(len(order)), "|", color=INK, markersize=16, label="step")
        ax.axvline(1, color=INK, linewidth=1, linestyle=":")
        ax.set_xlabel("time over that of a dense step")
        ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
        figures.lines(ax, [AXES.label(name) for name in order])
    return fig


def p5(frame: pd.DataFrame) -> Verdict:
    """`ratio`, `low` and `high`: see `somewhere`."""
    claim = f"P5: 2:4 training pays: a step is at least {LEAST:g} times as fast as the dense one somewhere."
    rule = (
        "speed = median t(dense step) / median t(2:4 step), f, sparsify, y, dH and dW, with intervals at 99% for all "
        "ways and cases together; kernel time, or calls of both where no graph holds it; the dense step's products are "
        f"the best that a search found. Supported if an interval lies at or above {LEAST:g}; refuted if all lie below; "
        "undecided otherwise, and always on a CPU."
    )
    table = speeds(frame)
    table = speeds(frame, 1 - (1 - LEVEL) / len(table)) if len(table) else table
    return somewhere(claim, rule, table, NOTHING, LEAST, calls=True)
