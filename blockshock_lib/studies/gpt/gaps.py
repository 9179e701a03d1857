"""What a schedule costs: losses of trained arms beside tensor parallelism's, paired by seed, with 99% intervals.

An arm of a seed and the baseline of that seed see the same tokens in the same order from the same first weights: what
a seed does to both cancels. Of n differences d the interval is mean(d) -+ t(n - 1) sd(d) / sqrt(n), Student's. Losses
of different corpora are never compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from blockshock_lib.layers.gpt.schedules import named
from blockshock_lib.report import frames
from blockshock_lib.report.interval import LEVEL, t_quantile
from blockshock_lib.studies.gpt.axes import AXES
from blockshock_lib.studies.gpt.methods import METHODS
from blockshock_lib.studies.gpt.params import COLUMNS, LAYERS

BASELINE = AXES.over
LEAST = 4  # paired seeds; fewer are points without an interval
LEAST_WIDTH = 384  # a smaller GPT shows that the code runs
SAME = [*COLUMNS, "trained", "dtype", "recipe", "corpus"]  # of arms that may be compared


class Gap(NamedTuple):
    mean: float
    low: float  # nan where fewer than LEAST seeds tell
    high: float
    seeds: int

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        """ "+0.012 [+0.010, +0.014]"; without an interval "+0.012 (2 seeds)"; of no seed "not trained"."""
        if not self.seeds:
            return "not trained"
        few = f" ({self.seeds} seed{'s' * (self.seeds != 1)})"
        return f"{self.mean:+.3g}" + (few if np.isnan(self.low) else f" [{self.low:+.3g}, {self.high:+.3g}]")


def gap(differences: Sequence[float], level: float = LEVEL) -> Gap:
    d = np.asarray(differences, dtype=float)
    if len(d) < LEAST:
        return Gap(float(d.mean()) if len(d) else np.nan, np.nan, np.nan, len(d))
    reach = t_quantile((1 + level) / 2, len(d) - 1) * d.std(ddof=1) / len(d) ** 0.5
    return Gap(float(d.mean()), float(d.mean() - reach), float(d.mean() + reach), len(d))


def syncs(method: str) -> int:
    """All-reduces of a forward of 12 layers."""
    return len(named(METHODS[method].schedule, LAYERS).syncs)


def curves(frame: pd.DataFrame, metric: str = "validation_loss") -> pd.DataFrame:
    """A row a (arm, seed, `repeat`) of a valid arm with its `value`, `corpus` digest and SAME; the newest run counts
    where an arm was trained twice.
    """
    rows = frames.valid(frames.complete(frame, AXES))
    corpora = rows[rows["metric"].eq("corpus")].drop_duplicates(["run", "case"], keep="last")
    rows = rows[rows["metric"].eq(metric)]
    rows = rows.merge(corpora[["run", "case", "detail"]].rename(columns={"detail": "corpus"}), on=["run", "case"])
    rows = rows.sort_values("run", kind="stable")
    return rows.drop_duplicates([*SAME, "method", "seed", "repeat", "detail"], keep="last")


def finals(frame: pd.DataFrame) -> pd.DataFrame:
    """`curves` at the last step of arms that came to it: a row a (arm, seed)."""
    rows = curves(frame)
    steps = (rows["trained"] // (rows["batch"] * rows["context"])).clip(lower=1)  # as training takes at least one
    return rows[rows["repeat"].eq(steps)].reset_index(drop=True)


def paired(rows: pd.DataFrame, method: str, other: str = BASELINE) -> pd.Series:
    """`method`'s value less `other`'s, by seed, of the seeds that both have. `rows`: of one setting, a row an arm."""
    table = rows.pivot_table(index="seed", columns="method", values="value")
    if not {method, other} <= set(table):
        return pd.Series(dtype=float)
    return (table[method] - table[other]).dropna()


def settings(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """`rows` by what may be compared, the widest first."""
    parts = [part for _, part in rows.groupby(SAME, sort=False)]
    return sorted(parts, key=lambda part: (int(part["width"].iloc[0]), len(part)), reverse=True)


def setting(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the setting that most can be said of: with most arms of LEAST seeds, of several such the widest."""
    told = lambda part: int(part.groupby("method")["seed"].nunique().ge(LEAST).sum())  # noqa: E731
    return max(settings(rows), key=told, default=rows)


def size_of(rows: pd.DataFrame, among: Sequence[pd.DataFrame] = ()) -> str:
    """ "384 wide, 100M tokens"; where one `among` others is as large, with all that sets them apart."""
    said = f"{rows['width'].iloc[0]} wide, {rows['trained'].iloc[0] / 1e6:.3g}M tokens"
    alike = [one for one in among if size_of(one) == said]
    apart = [name for name in SAME if len({one[name].iloc[0] for one in alike}) > 1]
    return ", ".join([said, *(f"{name} {rows[name].iloc[0]}" for name in apart)])


def words_of(rows: pd.DataFrame) -> str:
    """Of one setting: "384 wide, 100M tokens, 4 ranks, bf16, corpus 1a2b3c4d5e6f, up to 4 seeds"."""
    one = rows.iloc[0]
    words = f"{size_of(rows)}, {one['ranks']} ranks, {one['dtype']}, corpus {one['corpus'][:12]}"
    return f"{words}, up to {rows['seed'].nunique()} seeds"


def along(frame: pd.DataFrame, rows: pd.DataFrame, metric: str = "validation_loss") -> pd.DataFrame:
    """`curves` of the setting of `rows`."""
    return curves(frame, metric).merge(rows[SAME].drop_duplicates(), on=SAME)


def after(frame: pd.DataFrame, rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """`along`, of losses of trained models that lost syncs; `cost`: less that of the same model with all of them."""
    model = ["run", "case", "seed"]
    own = rows.loc[rows["method"].eq(BASELINE), [*model, "value"]].rename(columns={"value": "own"})
    table = along(frame, rows, metric).merge(own, on=model)
    return table.assign(cost=table["value"] - table["own"])


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """A row an arm of one setting, the most syncs first: `method`, `syncs`, its `gap`, the `seeds` that tell it, and
    the means over these of its `loss` and of the `base`line's.
    """
    found, wide = [], rows.pivot_table(index="seed", columns="method", values="value")
    for method in AXES.ordered(rows["method"]):
        own, less = wide[method].dropna(), paired(rows, method)
        seeds = list(own.index if method == BASELINE else less.index)
        about = {"syncs": syncs(method), "seeds": seeds, "loss": own[seeds].mean(), "gap": gap(less)}
        found.append({"method": method, **about, "base": about["loss"] - about["gap"].mean})
    return pd.DataFrame(found, columns=["method", "syncs", "seeds", "loss", "gap", "base"])


def steps_to(curve: pd.DataFrame, loss: float) -> float:
    """Optimizer steps at which the mean of the curves came to `loss`, linear between the validations that all seeds
    had; nan where it never did.
    """
    by = curve.groupby("repeat")
    mean = by["value"].mean()[by["seed"].nunique().eq(curve["seed"].nunique())].sort_index()
    under = mean[mean.le(loss)]
    if under.empty:
        return np.nan
    before = mean[mean.index < under.index[0]].iloc[-1:]
    ends = [(float(value), float(at)) for part in (under.iloc[:1], before) for at, value in part.items()]
    return float(np.interp(loss, *zip(*ends, strict=True)))
