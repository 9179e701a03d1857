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
SAME = [*COLUMNS, "trained", "dtype", "corpus"]  # of arms that may be compared


class Gap(NamedTuple):
    mean: float
    low: float  # nan where fewer than LEAST seeds tell
    high: float
    seeds: int

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        """ "+0.012 [+0.010, +0.014]"; without an interval "+0.012 (2 seeds)"."""
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
    return rows[rows["repeat"].eq(rows["trained"] // (rows["batch"] * rows["context"]))].reset_index(drop=True)


def paired(rows: pd.DataFrame, method: str, other: str = BASELINE) -> pd.Series:
    """`method`'s value less `other`'s, by seed, of the seeds that both have. `rows`: of one setting, a row an arm."""
    table = rows.pivot_table(index="seed", columns="method", values="value")
    if not {method, other} <= set(table):
        return pd.Series(dtype=float)
    return (table[method] - table[other]).dropna()


def setting(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the setting that most can be said of: the widest with LEAST seeds of two arms, else the widest with
    most arms.
    """
    best, chosen = (-1,), rows.iloc[:0]
    for _, part in rows.groupby(SAME, sort=False):
        counts = part.groupby("method")["seed"].nunique()
        width = int(part["width"].iloc[0])
        if (found := (bool(counts.ge(LEAST).sum() > 1), width, int(counts.sum()))) > best:
            best, chosen = found, part
    return chosen


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """A row an arm of one setting, the most syncs first: `method`, `syncs`, `loss` (mean, nats), `gap` (a Gap), and the
    smallest gap that these seeds could show: half the interval's width.
    """
    found = []
    for method in AXES.ordered(rows["method"]):
        own = gap(paired(rows, method)) if method != BASELINE else Gap(0.0, 0.0, 0.0, rows["seed"].nunique())
        loss = rows.loc[rows["method"].eq(method), "value"].mean()
        found.append({"method": method, "syncs": syncs(method), "loss": loss, "gap": own, "seeds": own.seeds})
    return pd.DataFrame(found, columns=["method", "syncs", "loss", "gap", "seeds"])


def tokens_to(curve: pd.DataFrame, loss: float) -> float:
    """Optimizer steps at which the mean curve of the baseline came to `loss`, linear between validations; nan where it
    never did.
    """
    mean = curve.groupby("repeat")["value"].mean().sort_index()
    under = mean[mean.le(loss)]
    if under.empty:
        return np.nan
    after = under.index[0]
    before = mean.index[mean.index < after]
    if before.empty:
        return float(after)
    last = before[-1]
    return float(last + (after - last) * (mean[last] - loss) / (mean[last] - mean[after]))
