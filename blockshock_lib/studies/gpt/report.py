"""Tables and sentences of the gpt study, from its records."""

import numpy as np
import pandas as pd

from blockshock_lib.report import frames
from blockshock_lib.report.tables import ABSENT
from blockshock_lib.studies.gpt import gaps
from blockshock_lib.studies.gpt.axes import AXES

NATS_A_BIT = np.log(2)


def words_of(rows: pd.DataFrame) -> str:
    """Of one setting: "384 wide, 4 ranks, 100M tokens, corpus 1a2b3c4d5e6f, 4 seeds"."""
    one = rows.iloc[0]
    words = f"{one['width']} wide, {one['ranks']} ranks, {one['trained'] / 1e6:.3g}M tokens, {one['dtype']}, "
    return words + f"corpus {one['corpus'][:12]}, {rows['seed'].nunique()} seeds at most"


def counts(frame: pd.DataFrame) -> pd.DataFrame:
    """All-reduces that were counted in a forward and its backward, and the share of weights that were trained."""
    names = {"syncs forward": "syncs_forward", "syncs backward": "syncs_backward", "weights used": "weights_used"}
    table = frames.medians(frame, AXES, **names)
    if table.empty:
        return pd.DataFrame({"syncs": ["none was counted"]})
    table = table.assign(method=table["method"].map(AXES.label), **{"weights used": table["weights used"].round(3)})
    return table[["method", "width", "ranks", *names]].set_index("method")


def losses(frame: pd.DataFrame) -> pd.DataFrame:
    """A row an arm: the last validation loss in nats and bits a byte; the gap to tensor parallelism, paired by seed,
    with its 99% interval; the smallest gap that these seeds could show; and the tokens it took over those after which
    the baseline had its loss.
    """
    rows = gaps.setting(gaps.finals(frame))
    if rows.empty:
        return pd.DataFrame({"losses": ["no arm was trained to its end"]})
    bytes_ = gaps.curves(frame, "bytes_per_token").drop_duplicates("case").set_index("case")["value"]
    per_byte = 1 / (NATS_A_BIT * float(rows["case"].map(bytes_).iloc[0]))
    curve = gaps.curves(frame).merge(rows[gaps.SAME].drop_duplicates(), on=gaps.SAME)
    base = curve[curve["method"].eq(gaps.BASELINE)]
    found = []
    for row in gaps.table(rows).itertuples():
        steps = gaps.tokens_to(base, row.loss)
        ratio = base["repeat"].max() / steps
        own = row.method == gaps.BASELINE
        found.append(
            {
                "schedule": AXES.label(row.method),
                "syncs": row.syncs,
                "seeds": row.seeds,
                "loss (nats)": round(row.loss, 4),
                "loss (bits/byte)": round(row.loss * per_byte, 4),
                "gap (nats)": ABSENT if own else str(row.gap),
                "gap (bits/byte)": ABSENT if own else f"{row.gap.mean * per_byte:+.4f}",
                "smallest to show (nats)": ABSENT if own or np.isnan(row.gap.half) else round(row.gap.half, 4),
                "tokens over baseline's": "never" if np.isnan(ratio) else f"{ratio:.3g}x",
            }
        )
    return pd.DataFrame(found).set_index("schedule")


def rates(frame: pd.DataFrame) -> pd.DataFrame:
    """Tokens a second of each arm's training, and over tensor parallelism's on one device: what the tracks cost."""
    table = frames.medians(frame, AXES, rate="token_rate")
    if table.empty:
        return pd.DataFrame({"rates": ["none was measured"]})
    by = table.groupby(["width", "method"])["rate"].median().reset_index()
    base = by[by["method"].eq(gaps.BASELINE)].set_index("width")["rate"]
    by["over TP"] = (by["rate"] / by["width"].map(base)).round(3)
    by["tokens/s"] = by["rate"].round()
    note = frames.no_claim(table)
    return by.assign(method=by["method"].map(AXES.label), note=note or "").set_index("method")[
        ["width", "tokens/s", "over TP", *(["note"] if note else [])]
    ]


def answer(frame: pd.DataFrame) -> str:
    """The answer of the training phase in a sentence."""
    rows = gaps.setting(gaps.finals(frame))
    table = gaps.table(rows)
    table = table[table["method"].ne(gaps.BASELINE) & table["seeds"].gt(0)]
    if table.empty:
        return "Not answered: no schedule was trained to its end beside tensor parallelism."
    what = words_of(rows)
    if table["gap"].map(lambda one: np.isnan(one.low)).all():
        least = table.loc[table["gap"].map(lambda one: one.mean).idxmin()]
        return (
            f"Not answered: fewer than {gaps.LEAST} seeds ({what}); {AXES.short(least['method'])} is nearest to tensor "
            f"parallelism, {least['gap'].mean:+.3f} nats."
        )
    told = table[~table["gap"].map(lambda one: np.isnan(one.low))]
    free = told[told["gap"].map(lambda one: one.low <= 0)]
    if free.empty:
        least = told.loc[told["gap"].map(lambda one: one.mean).idxmin()]
        return f"None for nothing: {AXES.short(least['method'])} costs least, {least['gap']} nats ({what})."
    few = free.loc[free["syncs"].idxmin()]
    return (
        f"From 24 down to {few['syncs']}: {AXES.short(few['method'])} costs {few['gap']} nats, which these seeds "
        f"cannot tell from nothing ({what})."
    )


def summary(frame: pd.DataFrame) -> list[str]:
    """Sentences at the end of a run's verdict line."""
    rows = gaps.finals(frame)
    return [f"{rows['method'].nunique()} schedules trained with {rows['seed'].nunique()} seeds"] if len(rows) else []
