"""What the gpt study claims of trained losses; each rule was written before any loss of a GPU was there."""

from itertools import pairwise

import numpy as np
import pandas as pd

from blockshock_lib.report.interval import LEVEL
from blockshock_lib.report.verdicts import NOT_APPLICABLE, REFUTED, SUPPORTED, UNDECIDED, Verdict
from blockshock_lib.studies.gpt import gaps, saved
from blockshock_lib.studies.gpt.gaps import Gap

LEAST_WIDTH = 384  # a smaller GPT shows that the code runs
COST = 0.01  # nats that twelve syncs may cost: S1
DROP_COST = 0.02  # nats that the least sensitive half may cost after training: S4
FALLING = ("tensor_parallel", "spd", "grouped_2", "grouped_3", "grouped_4", "grouped_6")  # 24, 12, 6, 4, 3, 2 syncs
# The seed's predictions as gaps to its own baseline, in nats: syncs -> arm, lowest, highest.
PREDICTED = {
    12: ("spd", 0.01, 0.01),
    6: ("grouped_2", 0.07, 0.07),
    4: ("grouped_3", 0.12, 0.22),
    3: ("grouped_4", 0.32, 0.52),
}
ROUNDED = 0.005  # a predicted gap of two digits stands for those that round to it
WITHIN = 0.02  # of the baseline's loss: "6 to 9 syncs stay within 2%"

_RULE = (
    "gap = mean over seeds of an arm's validation loss less tensor parallelism's of the same seed, at the last step "
)
_RULE += "of the widest GPT with at least 4 seeds, 384 wide at least, with Student's 99% interval. "
_RULE_S1 = _RULE + f"SPD: supported if the interval lies below {COST} nats, refuted if above, else undecided."
_RULE_S2 = _RULE + (
    f"Over {', '.join(FALLING)}: refuted if any step to fewer syncs lowers the loss by an interval below 0; "
    "supported if all arms are there, none does, and the last one's gap lies above 0; else undecided."
)
_RULE_S4 = (
    "cost = validation loss of the trained tensor-parallel model without the 12 least sensitive of its 24 syncs, less "
    "its own with all, paired by seed, with Student's 99% interval, at least 4 seeds, 384 wide at least. Supported if "
    f"the interval lies below {DROP_COST} nats and that of the cost after distillation reaches 0; refuted if either "
    f"interval lies above its bound ({DROP_COST} and 0); else undecided."
)
_RULE_S3 = (
    "gap = a schedule's validation loss at its last step less tensor parallelism's after the steps that it makes in as "
    "much time, by the medians of a training step at that width and as many ranks on this link, paired by seed; its "
    "learning rate has not fallen as far there, which favours the claim. Student's intervals, at 99% for all schedules "
    "together, of those with fewer syncs and 4 seeds, 384 wide at least. Supported if any lies below 0, refuted if all "
    "lie above it, else undecided."
)
_RULE_S5 = _RULE + (
    f"Each prediction (12 syncs +.01, 6 +.07, 4 +.12 to +.22, 3 +.32 to +.52, each to {ROUNDED}; 6 syncs within "
    f"{WITHIN:.0%} of the baseline's loss) is refuted where the interval excludes it. Supported if all are there and "
    "none is refuted; refuted if any is; else undecided."
)


def s1(frame: pd.DataFrame) -> Verdict:
    claim = "S1: twelve synchronisations instead of 24 cost less than .01 nats."
    rows, why = _judged(frame)
    found = gaps.gap(gaps.paired(rows, "spd")) if why == "" else _NONE
    return _verdict(claim, _RULE_S1, found, why or _few(found, "SPD"), _side(found, COST), f"SPD {found} nats", rows)


def s2(frame: pd.DataFrame) -> Verdict:
    """`ratio`, `low` and `high` are of the last arm's gap."""
    claim = "S2: the loss grows as synchronisations fall."
    rows, why = _judged(frame)
    if why:
        return _verdict(claim, _RULE_S2, _NONE, why, UNDECIDED, "", rows)
    steps = [gaps.gap(gaps.paired(rows, fewer, more)) for more, fewer in pairwise(FALLING)]
    each = {name: gaps.gap(gaps.paired(rows, name)) for name in FALLING[1:]}
    last = each[FALLING[-1]]
    if any(step.high < 0 for step in steps):
        verdict = REFUTED
    else:
        verdict = SUPPORTED if last.low > 0 and not any(np.isnan(step.low) for step in steps) else UNDECIDED
    leaves = [f"it leaves the noise at {gaps.syncs(name)} syncs ({one})" for name, one in each.items() if one.low > 0]
    said = "; ".join(f"{gaps.syncs(name)} syncs {one}" for name, one in each.items())
    return _verdict(claim, _RULE_S2, last, "", verdict, f"{[*leaves, 'no gap leaves the noise'][0]}: {said}", rows)


def s3(frame: pd.DataFrame, link: str) -> Verdict:
    """From records of both phases; `ratio`, `low` and `high` are of the schedule that gains most."""
    where = {"fast": "NVLink", "slow": "the slower link"}[link]
    claim = f"S3 {link}: in equal time a schedule with fewer synchronisations reaches a lower loss on {where}."
    rows, why = _judged(frame)
    found = {} if why else _in_equal_time(frame, rows, link)
    if not found:
        why = why or f"no training step of that width, ranks and {link} link was timed beside these losses"
        return _verdict(claim, _RULE_S3, _NONE, why, UNDECIDED, "", rows)
    told = {name: one for name, one in found.items() if not np.isnan(one.low)}
    best = min(told or found, key=lambda name: found[name].mean)
    lower, higher = (any(one.high < 0 for one in told.values()), all(one.low > 0 for one in told.values()))
    verdict = SUPPORTED if lower else REFUTED if told and higher else UNDECIDED
    said = "; ".join(f"{name} {one} nats" for name, one in found.items())
    return _verdict(claim, _RULE_S3, found[best], _few(found[best], best), verdict, said, rows)


def _in_equal_time(frame: pd.DataFrame, rows: pd.DataFrame, link: str) -> dict[str, Gap]:
    """Schedule -> its gap to tensor parallelism after as much time; only real GPUs' steps count."""
    one = rows.iloc[0]
    steps = saved.ratios(frame)
    same = steps["work"].eq("step") & steps["link"].eq(link) if len(steps) else []
    steps = steps[same] if len(steps) else steps
    same = steps["width"].eq(one["width"]) & steps["ranks"].eq(one["ranks"]) & steps["outcome"].ne("no claim")
    ratio = steps[same].groupby("method")["ratio"].mean()
    fewer = [
        name for name in ratio.index if name in set(rows["method"]) and gaps.syncs(name) < gaps.syncs(gaps.BASELINE)
    ]
    curve = gaps.curves(frame).merge(rows[gaps.SAME].drop_duplicates(), on=gaps.SAME)
    base, found = curve[curve["method"].eq(gaps.BASELINE)].sort_values("repeat"), {}
    for name in fewer:
        own = rows[rows["method"].eq(name)].set_index("seed")["value"]
        at = base["repeat"].max() / ratio[name]
        then = {seed: np.interp(at, part["repeat"], part["value"]) for seed, part in base.groupby("seed")}
        found[name] = gaps.gap((own - pd.Series(then)).dropna(), 1 - (1 - LEVEL) / len(fewer))
    return found


def s4(frame: pd.DataFrame) -> Verdict:
    claim = "S4: after training the least sensitive half of the syncs can go for less than .02 nats, and distillation "
    claim += "recovers it."
    rows, why = _judged(frame)
    if why:
        return _verdict(claim, _RULE_S4, _NONE, why, UNDECIDED, "", rows)
    half = gaps.syncs(gaps.BASELINE) // 2
    dropped, distilled = (gaps.gap(_cost(frame, rows, metric, half)) for metric in ("dropped_loss", "distilled_loss"))
    above = dropped.low > DROP_COST or distilled.low > 0
    below = dropped.high < DROP_COST and distilled.low <= 0
    verdict = REFUTED if above else SUPPORTED if below else UNDECIDED
    said = f"{half} of {2 * half} syncs dropped cost {dropped} nats, {distilled} after distillation"
    return _verdict(claim, _RULE_S4, dropped, _few(dropped, "dropped syncs"), verdict, said, rows)


def s5(frame: pd.DataFrame) -> Verdict:
    """`ratio`, `low` and `high` are of the arm with 6 syncs."""
    claim = "S5: the seed's predictions of the loss hold as gaps to our baseline."
    rows, why = _judged(frame)
    if why:
        return _verdict(claim, _RULE_S5, _NONE, why, UNDECIDED, "", rows)
    words, states = [], []
    for count, (name, least, most) in PREDICTED.items():
        found = gaps.gap(gaps.paired(rows, name))
        off = found.high < least - ROUNDED or found.low > most + ROUNDED
        states.append(UNDECIDED if np.isnan(found.low) else REFUTED if off else SUPPORTED)
        words.append(f"{count} syncs {found}, predicted {least:+g}" + f" to {most:+g}" * (most > least))
    six, base = gaps.gap(gaps.paired(rows, "grouped_2")), rows.loc[rows["method"].eq(gaps.BASELINE), "value"].mean()
    states.append(REFUTED if six.low > WITHIN * base else SUPPORTED if six.high <= WITHIN * base else UNDECIDED)
    words.append(f"6 syncs {six.mean / base:+.1%} of the loss, predicted within {WITHIN:.0%}")
    verdict = REFUTED if REFUTED in states else SUPPORTED if set(states) == {SUPPORTED} else UNDECIDED
    return _verdict(claim, _RULE_S5, six, "", verdict, "; ".join(words), rows)


_NONE = Gap(np.nan, np.nan, np.nan, 0)


def _judged(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The last losses of the setting that is judged, and why there is none to judge."""
    rows = gaps.setting(gaps.finals(frame))
    if rows.empty:
        return rows, "no arm was trained to its end"
    width = int(rows["width"].iloc[0])
    return rows, f"{width} wide shows that the code runs; judged from {LEAST_WIDTH} on" * (width < LEAST_WIDTH)


def _cost(frame: pd.DataFrame, rows: pd.DataFrame, metric: str, dropped: int) -> pd.Series:
    """Loss with `dropped` syncs left out less that with all of the same trained model, by seed."""
    after = gaps.curves(frame, metric)
    after = after.merge(rows[gaps.SAME].drop_duplicates(), on=gaps.SAME)
    after = after[after["repeat"].eq(dropped) & after["method"].eq(gaps.BASELINE)].set_index("seed")["value"]
    own = rows[rows["method"].eq(gaps.BASELINE)].set_index("seed")["value"]
    return (after - own).dropna()


def _side(found: Gap, bound: float) -> str:
    return SUPPORTED if found.high < bound else REFUTED if found.low > bound else UNDECIDED


def _few(found: Gap, what: str) -> str:
    return f"{what}: {found.seeds} paired seeds, {gaps.LEAST} are needed" if np.isnan(found.low) else ""


def _verdict(claim: str, rule: str, found: Gap, why: str, verdict: str, said: str, rows: pd.DataFrame) -> Verdict:
    missing = NOT_APPLICABLE if "judged from" in why else UNDECIDED
    runs = rows["run"].nunique() if len(rows) else 0
    return Verdict(claim, rule, found.mean, found.low, found.high, missing if why else verdict, why or said, rows, runs)
