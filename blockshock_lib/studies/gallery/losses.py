"""What sparsity costs a model: losses of the arms less the dense model's of the same seed, and what is claimed of them.

An arm of a seed and the dense model see the same tokens in the same order from the same first weights. Of n differences
d the interval is mean(d) -+ t(n - 1) sd(d) / sqrt(n), Student's. Losses of different corpora are never compared. The
rules were written before any loss of a GPU was there. The seed's figures are accuracies: as exp(-loss) is the geometric
mean of the probability of what is right, a fall from a to b is held against log(a / b) nats.
"""

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from blockshock_lib.report import figures, frames
from blockshock_lib.report.figures import INK
from blockshock_lib.report.interval import LEVEL, t_quantile
from blockshock_lib.report.tables import ABSENT
from blockshock_lib.report.verdicts import NOT_APPLICABLE, REFUTED, SUPPORTED, UNDECIDED, Verdict
from blockshock_lib.studies.gallery.axes import AXES
from blockshock_lib.studies.gallery.methods import ARMS, DENSE, TRAINED
from blockshock_lib.studies.gallery.params import LATER

LEAST = 4  # paired seeds; fewer are points without an interval
LEAST_WIDTH = 384  # a narrower GPT shows that the code runs
SAME = ["n", "batch", "sparsity", "block", "trained", *LATER, "dtype", "task"]  # of arms that may be compared
SAM, DINO = float(np.log(0.5842 / 0.5331)), float(np.log(81.6 / 80.5))  # .0915 and .0136 nats


class Lost(NamedTuple):
    mean: float
    low: float  # nan where fewer than LEAST seeds tell
    high: float
    seeds: int

    def __str__(self) -> str:
        """ "+0.012 [+0.010, +0.014]"; without an interval "+0.012 (2 seeds)"."""
        few = f" ({self.seeds} seed{'s' * (self.seeds != 1)})"
        return f"{self.mean:+.3g}" + (few if np.isnan(self.low) else f" [{self.low:+.3g}, {self.high:+.3g}]")


def finals(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a (arm, seed) at its last step, with `task`, the digest of the corpus or "teacher": of an arm that several
    runs trained the newest, and the dense models of the runs that they are of, for each is paired with the one beside
    it. Of the setting that may be judged, then of the most seeds, the most rows and the widest.
    """
    rows = frames.valid(frames.complete(frame, AXES))
    corpora = rows[rows["metric"].eq("corpus")].drop_duplicates(["run", "case"])[["run", "case", "detail"]]
    corpora["task"] = corpora.pop("detail").str.replace(r"^teacher-.*", "teacher", regex=True)
    rows = rows[rows["metric"].eq("validation_loss")].merge(corpora, on=["run", "case"])
    rows = rows[rows["repeat"].eq((rows["trained"] // (rows["batch"] * rows["context"])).clip(lower=1))]
    rows = rows.drop_duplicates(["run", *SAME, "method", "seed"], keep="last")
    rows = rows.sort_values("run", kind="stable")
    dense, seed = rows["method"].eq(DENSE), [*SAME, "seed"]
    arms = rows[~dense].drop_duplicates(["method", *seed], keep="last")
    beside = rows[dense].merge(arms[["run", *seed]].drop_duplicates())
    alone = rows[dense].drop_duplicates(seed, keep="last").merge(beside[seed].drop_duplicates(), "left", indicator=True)
    alone = alone[alone.pop("_merge").eq("left_only")]
    parts = [part for _, part in pd.concat([arms, beside, alone]).groupby(SAME, sort=False)]
    order = [(not toy(part), part["seed"].nunique(), len(part), part["n"].iloc[0]) for part in parts]
    return parts[order.index(max(order))] if parts else rows


def toy(rows: pd.DataFrame) -> bool:
    """Whether they show no more than that the code runs."""
    return rows["task"].iloc[0] == "teacher" or rows["n"].iloc[0] < LEAST_WIDTH


def lost(rows: pd.DataFrame, method: str, level: float = LEVEL, over: str = DENSE) -> Lost:
    """Nats more than `over`, paired by the seeds that both have in one run."""
    wide = rows.pivot_table(index=["run", "seed"], columns="method", values="value")
    pairs = (wide[method] - wide[over]).dropna() if {method, over} <= set(wide) else pd.Series(dtype=float)
    mean, half = pairs.mean() if len(pairs) else np.nan, np.nan
    if len(pairs) >= LEAST:
        half = t_quantile((1 + level) / 2, len(pairs) - 1) * pairs.std(ddof=1) / len(pairs) ** 0.5
    return Lost(float(mean), float(mean - half), float(mean + half), len(pairs))


def about(rows: pd.DataFrame) -> str:
    one = rows.iloc[0]
    size = f"{one['n']} wide, {one['layers']} layers, {one['trained'] / 1e6:.3g}M tokens of {one['task']}"
    return f"{size}, {one['dtype']}, {rows['seed'].nunique()} seeds at most"


def losses(frame: pd.DataFrame) -> pd.DataFrame:
    """A row an arm: the mean of its last validation losses, the nats that it lost with their 99% interval, the seconds
    that pruning took, and what was published of GPT-2 124M.
    """
    rows = finals(frame)
    if rows.empty:
        return pd.DataFrame({"losses": ["no arm was trained to its end"]})
    seconds = frames.valid(frame).query("metric == 'prune_time'").merge(rows[["run", "case", "method"]])
    seconds = seconds.groupby("method")["value"].median()
    found = []
    for method in AXES.ordered(rows["method"]):
        own, arm = rows[rows["method"].eq(method)], ARMS[method]
        found.append(
            {
                "arm": arm.label,
                "seeds": own["seed"].nunique(),
                "loss (nats)": round(own.groupby("seed")["value"].mean().mean(), 4),
                "lost (nats)": ABSENT if method == DENSE else str(lost(rows, method)),
                "published at 124M": ABSENT if arm.published is None else f"{arm.published:+.3f}",
                "pruned in (s)": round(seconds[method], 2) if method in seconds else ABSENT,
            }
        )
    return pd.DataFrame(found).set_index("arm")


def answer(frame: pd.DataFrame) -> str:
    """In a sentence the arms that none beats, at 99% for all together: by differences paired by seeds, or, for these
    scatter with the worse of two, where their own intervals lie apart.
    """
    rows = finals(frame)
    arms = {name: lost(rows, name) for name in AXES.ordered(rows["method"]) if name != DENSE}
    arms = {name: one for name, one in arms.items() if one.seeds}
    if not arms:
        return "Not answered: no arm was trained to its end beside the dense model."
    if toy(rows):
        return f"Not answered here: it shows that the code runs ({about(rows)})."
    parts = {
        "Pruned at once": [n for n in arms if n not in TRAINED],
        "trained 2:4 from scratch": [n for n in arms if n in TRAINED],
    }
    said, level = [], 1 - (1 - LEVEL) / max(1, sum(len(names) * (len(names) - 1) // 2 for names in parts.values()))
    for how, names in parts.items():
        own = {a: lost(rows, a, 1 - (1 - LEVEL) / len(arms)) for a in names}
        lowest = min((one.high for one in own.values() if one.seeds >= LEAST), default=np.inf)
        close = [a for a in names if not own[a].low > lowest]
        best = [a for a in close if not any(lost(rows, a, level, b).low > 0 for b in names if b != a)]
        each = " or ".join(f"{AXES.short(a)}, {arms[a]} nats" for a in sorted(best, key=lambda a: arms[a].mean))
        least = "it is undecided which loses least: " if len(best) > 1 else "least is lost by " * (len(names) > 1)
        said += [f"{how}, {least}{each}"] * bool(names)
    return f"{'; '.join(said)} ({about(rows)})."


def nats_lost(frame: pd.DataFrame) -> Figure:
    """A line an arm: the nats that it lost, an interval over seeds or a point a seed, beside what was published."""
    title, rows = "Nats lost by pattern and method", finals(frame)
    arms = [name for name in AXES.ordered(rows["method"])[::-1] if name != DENSE and lost(rows, name).seeds]
    if not arms:
        return figures.empty(title, "no arm was trained to its end beside the dense model")
    found = {name: lost(rows, name) for name in arms}
    wide = rows.pivot_table(index=["run", "seed"], columns="method", values="value")
    with figures.drawing(
        *(7.5, 0.8 + 0.27 * len(arms), title, about(rows)),
        alt=" ".join(f"{AXES.label(name)}: {found[name]} nats." for name in arms[::-1]),
        note="Validation loss less the dense model's of the same seed; half of the weights are left out. Bars: 99% "
        f"intervals over seeds; open marks: single seeds, where fewer than {LEAST}. Lines: published for GPT-2 124M.",
    ) as (fig, grid):
        ax = grid[0, 0]
        for y, name in enumerate(arms):
            look, one = AXES.look(name), found[name]
            kind = dict(color=look.colour, marker=look.marker, linestyle="", markersize=6)
            if np.isnan(one.low):
                pairs = (wide[name] - wide[DENSE]).dropna()
                ax.plot(pairs, [y] * len(pairs), **kind, markerfacecolor="none")
            else:
                ax.errorbar(one.mean, y, xerr=one.high - one.mean, capsize=3, **kind)
            if ARMS[name].published is not None:
                ax.plot([ARMS[name].published] * 2, [y - 0.4, y + 0.4], color=INK, linewidth=1)
        ax.axvline(0, color=INK, linewidth=1)
        ax.set_xscale("symlog", linthresh=0.1)
        ax.set_xlabel("lost (nats)")
        figures.lines(ax, [AXES.label(name) for name in arms])
    return fig


_PAIRED = (
    "lost = validation loss less the dense model's of the same seed and run, at the last step, on text, from "
    f"{LEAST_WIDTH} wide and {LEAST} seeds on, with Student's 99% interval over seeds. "
)


def p6a(frame: pd.DataFrame) -> Verdict:
    claim = f"P6a: pruned 2:4 a model loses no more than in the seed, where SAM fell .5842 to .5331: {SAM:.3f} nats."
    rule = "2:4 by SparseGPT: supported if the interval lies at or below that, refuted if above, else undecided."
    return _verdict(frame, claim, rule, ("sparsegpt_24",), SAM)


def p6b(frame: pd.DataFrame) -> Verdict:
    claim = f"P6b: trained 2:4 a model loses no more than in the seed, where DINO fell 81.6 to 80.5: {DINO:.3f} nats."
    rule = (
        f"Of {', '.join(TRAINED)}, with intervals at 99% for all together: supported if one lies at or below that, "
        "refuted if all are there and lie above, else undecided."
    )
    return _verdict(frame, claim, rule, TRAINED, DINO)


def _verdict(frame: pd.DataFrame, claim: str, rule: str, arms: tuple[str, ...], most: float) -> Verdict:
    """`ratio`, `low` and `high` are of the arm whose interval ends lowest."""
    rows = finals(frame)
    if rows.empty or toy(rows):
        judged = f"{about(rows)}: judged on text from {LEAST_WIDTH} wide on" if len(rows) else ""
        why = judged or "no arm was trained to its end"
        state = UNDECIDED if rows.empty else NOT_APPLICABLE
        return Verdict(claim, _PAIRED + rule, *[np.nan] * 3, state, why, rows)
    found = {name: lost(rows, name, 1 - (1 - LEVEL) / len(arms)) for name in arms}
    state = REFUTED if all(one.low > most for one in found.values()) else UNDECIDED
    state = SUPPORTED if any(one.high <= most for one in found.values()) else state
    best = min(found.values(), key=lambda one: tuple(np.nan_to_num([one.high, one.mean], nan=np.inf)))
    why = "; ".join(f"{AXES.short(name)} {one}" for name, one in found.items() if one.seeds) or "none of it was trained"
    return Verdict(
        claim, _PAIRED + rule, *best[:3], state, f"{why}{' nats' * bool(best.seeds)}", rows, rows["run"].nunique()
    )
