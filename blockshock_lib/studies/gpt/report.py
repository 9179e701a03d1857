"""Tables and sentences of the gpt study, from its records."""

import numpy as np
import pandas as pd

from blockshock_lib.report import frames
from blockshock_lib.report.interval import LEVEL, t_quantile
from blockshock_lib.report.tables import ABSENT
from blockshock_lib.studies.gpt import gaps
from blockshock_lib.studies.gpt.axes import AXES
from blockshock_lib.studies.gpt.hypotheses import COST
from blockshock_lib.studies.gpt.params import weights

POWER = 0.9, (1 + LEVEL) / 2  # of what a gap shows in nine runs of ten: quantiles of Student's t


def counts(frame: pd.DataFrame) -> pd.DataFrame:
    """All-reduces that were counted in a forward and its backward, and the share of weights that were trained."""
    names = {f"all-reduces {way}": f"syncs_{way}" for way in ("forward", "backward")} | {"weights used": "weights_used"}
    table = frames.medians(frame, AXES, **names)
    if table.empty:
        return pd.DataFrame({"all-reduces": ["none was counted"]})
    table = table.assign(method=table["method"].map(AXES.label), **{"weights used": table["weights used"].round(3)})
    return table[["method", "width", "ranks", *names]].set_index("method")


def losses(frame: pd.DataFrame) -> pd.DataFrame:
    """A row an arm of each size, the widest first: the last validation loss over the arm's seeds in nats and bits a
    byte; the gap to tensor parallelism of the same seeds with its 99% interval; the smallest that these seeds show in
    nine of ten such runs; the gap of the mean losses on the training text since the validation before; and the tokens
    it took over those after which the baseline, whose rate had not fallen yet, had its loss.
    """
    found, every = [], gaps.settings(gaps.finals(frame))
    for rows in every:
        bytes_ = gaps.along(frame, rows, "bytes_per_token")["value"]
        per_byte = 1 / (np.log(2) * bytes_.iloc[0]) if len(bytes_) else np.nan  # shards of a user tell no bytes
        base = gaps.along(frame, rows)
        base = base[base["method"].eq(gaps.BASELINE)]
        trained = gaps.along(frame, rows, "train_loss")
        trained = trained[trained["repeat"].eq(trained["repeat"].max())]
        for row in gaps.table(rows).itertuples():
            ratio = base["repeat"].max() / gaps.steps_to(base[base["seed"].isin(row.seeds)], row.loss)
            own, told = row.method == gaps.BASELINE or not len(row.seeds), not np.isnan(row.gap.low)
            ends = f" [{row.gap.low * per_byte:+.4f}, {row.gap.high * per_byte:+.4f}]" if told else ""
            shows = row.gap.half * (1 + np.divide(*(t_quantile(p, len(row.seeds) - 1) for p in POWER))) if told else 0
            found.append(
                {
                    "GPT": gaps.size_of(rows, every),
                    "schedule": AXES.label(row.method),
                    "all-reduces a forward": row.syncs,
                    "seeds": len(row.seeds),
                    "loss (nats)": round(row.loss, 4),
                    "loss (bits/byte)": round(row.loss * per_byte, 4),
                    "gap (nats)": ABSENT if own else str(row.gap),
                    "gap (bits/byte)": ABSENT if own else f"{row.gap.mean * per_byte:+.4f}{ends}",
                    "smallest gap to show (nats)": ABSENT if own or not told else round(shows, 4),
                    "gap on training text (nats)": ABSENT if own else str(gaps.gap(gaps.paired(trained, row.method))),
                    "tokens over baseline's": ABSENT if own else "fewer" if np.isnan(ratio) else f"{ratio:.3g}x",
                }
            )
    if not found:
        return pd.DataFrame({"losses": ["no arm was trained to its end"]})
    return pd.DataFrame(found).set_index(["GPT", "schedule"])


def rates(frame: pd.DataFrame) -> pd.DataFrame:
    """Tokens a second of each arm's training, over tensor parallelism's on one device: what the tracks cost; and at 6
    FLOP a token and weight over the rate of a large product that the same device was measured at.
    """
    table = frames.medians(frame, AXES, rate="token_rate", dense="gemm_rate").dropna(subset="rate")  # timed alone: none
    if table.empty:
        return pd.DataFrame({"rates": ["none was measured"]})
    table["of a GEMM's rate"] = 6e-12 * weights(table["width"], table["vocab"]) * table["rate"] / table["dense"]
    by = table.groupby(["width", "method"])[["rate", "of a GEMM's rate"]].median().reset_index()
    by["of a GEMM's rate"] = by["of a GEMM's rate"].map(lambda share: ABSENT if np.isnan(share) else f"{share:.1%}")
    base = by[by["method"].eq(gaps.BASELINE)].set_index("width")["rate"]
    by["over tensor parallel's"] = (by["rate"] / by["width"].map(base)).round(3)
    by["tokens/s"] = by["rate"].round().astype(int)
    note = frames.no_claim(table)
    by = by.assign(method=by["method"].map(AXES.label), note=note).set_index("method")
    return by[["width", "tokens/s", "over tensor parallel's", "of a GEMM's rate", *["note"] * bool(note)]]


def answer(frame: pd.DataFrame) -> str:
    """The answer of the training phase in a sentence, of the setting that most can be said of."""
    rows = gaps.setting(gaps.finals(frame))
    arms = [row for row in gaps.table(rows).itertuples() if row.method != gaps.BASELINE and len(row.seeds)]
    if not arms:
        return "Not answered: no schedule was trained to its end beside tensor parallelism."
    told = [row for row in arms if not np.isnan(row.gap.low)]
    best, what, one = min(told or arms, key=lambda row: row.gap.mean), gaps.words_of(rows), rows.iloc[0]
    costs = f"{AXES.short(best.method)} costs least, {best.gap} nats ({what})."
    if one["width"] < gaps.LEAST_WIDTH:
        return f"Not answered here: it shows that the code runs ({what})."
    if not told:
        return f"Not answered with fewer than {gaps.LEAST} seeds: {costs}"
    if all(row.gap.low > 0 for row in told):
        return f"None for nothing: {costs}"
    # Of as many syncs the schedule with the least upper end counts; a count above the fewest that fails is told.
    best = {row.syncs: row for row in sorted(told, key=lambda row: -row.gap.high)}
    passed, of = [count for count in sorted(best) if best[count].gap.high < COST], gaps.syncs(gaps.BASELINE)
    if passed:
        few, more = best[passed[0]], [count for count in sorted(best) if count > passed[0] and count not in passed]
        about = f"{one['ranks']} ranks, {one['dtype']}, corpus {one['corpus'][:12]}, {len(few.seeds)} seeds"
        but = " and ".join(f"{of - count} by {AXES.short(best[count].method)}" for count in more)
        held = f"{of - few.syncs} of {of} all-reduces a forward can go for a loss less than {COST} nats over tensor "
        held += f"parallelism's: {AXES.short(few.method)} {few.gap} nats (99%) at {gaps.size_of(rows)} ({about})"
        return f"{held}{'; not shown for ' * bool(more)}{but}."
    most = max(best.values(), key=lambda row: row.gap.high)
    end = f"the 99% end of {AXES.short(most.method)}'s {most.gap}; less than {COST} is shown for no count"
    return f"Down to {min(best)} of {of} all-reduces a forward for at most {most.gap.high:.2g} nats, {end} ({what})."
