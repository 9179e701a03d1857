"""What the gpt study claims of trained losses; each rule was written before any loss of a GPU was there."""

from collections.abc import Callable
from itertools import pairwise, takewhile
from typing import NamedTuple

import numpy as np
import pandas as pd

from blockshock_lib.report.interval import LEVEL
from blockshock_lib.report.verdicts import NO_CLAIM, NOT_APPLICABLE, REFUTED, SUPPORTED, UNDECIDED, Verdict
from blockshock_lib.studies.gpt import gaps, saved
from blockshock_lib.studies.gpt.axes import AXES
from blockshock_lib.studies.gpt.gaps import Gap
from blockshock_lib.studies.gpt.params import COLUMNS, LAYERS

# 20 headline cells, (work, length, width) by method: from three whole runs or more; others may be of one, and say so.
HEADLINE = {
    "cases": (
        *(("decode", 1024, 768), ("decode", 1024, 4096), ("prefill", 2048, 768), ("prefill", 2048, 4096)),
        ("step", 65536, 768),
    ),
    "methods": ("spd", "grouped_2", "grouped_4", "ladder"),
    "ranks": 4,
    "link": "fast",
    "dtype": "bf16",
}
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

_WHERE = (
    f" Judged at each size from {gaps.LEAST_WIDTH} wide on by what has {gaps.LEAST} seeds; the size with most of what "
    "is asked for decides, of several such the widest; undecided where two such as wide differ."
)
_GAP = (
    "gap = mean over seeds of an arm's validation loss less tensor parallelism's of the same seed, at the last step, "
    "with Student's 99% interval. "
)


class Weighed(NamedTuple):
    """What a rule says at one size. `asked`: every gap that it asks for, the first of them shown."""

    asked: list[Gap]
    verdict: str
    said: str


def s1(frame: pd.DataFrame) -> Verdict:
    def weigh(rows: pd.DataFrame) -> Weighed:
        found = gaps.gap(gaps.paired(rows, "spd"))
        verdict = SUPPORTED if found.high < COST else REFUTED if found.low > COST else UNDECIDED
        return Weighed([found], verdict, f"SPD {found} nats")

    claim = "S1: twelve synchronisations instead of 24 cost less than .01 nats."
    rule = f"SPD: supported if the interval lies below {COST} nats, refuted if above, else undecided."
    return _verdict(frame, claim, _GAP + rule, weigh)


def s2(frame: pd.DataFrame) -> Verdict:
    """`ratio`, `low` and `high` are of the last arm's gap."""

    def weigh(rows: pd.DataFrame) -> Weighed:
        steps = [gaps.gap(gaps.paired(rows, fewer, more)) for more, fewer in pairwise(FALLING)]
        each = {name: gaps.gap(gaps.paired(rows, name)) for name in FALLING[1:]}
        *_, last = each.values()
        all_there = not any(np.isnan(step.low) for step in steps)
        verdict = SUPPORTED if all_there and last.low > 0 else UNDECIDED
        verdict = REFUTED if any(step.high < 0 for step in steps) else verdict
        known = [name for name in each if each[name].seeds]
        above = [*takewhile(lambda name: each[name].low > 0, reversed(known))]
        first = f"from {gaps.syncs(above[-1])} syncs on all lie above 0" if above else "the last does not lie above 0"
        said = "; ".join(f"{gaps.syncs(name)} syncs {one}" for name, one in each.items())
        return Weighed([last, *each.values()], verdict, f"{first}: {said}")

    rule = (
        f"Over {', '.join(FALLING)}: refuted if any step to fewer syncs lowers the loss by an interval below 0; "
        "supported if all arms are there, none does, and the last one's gap lies above 0; else undecided."
    )
    return _verdict(frame, "S2: the loss grows as synchronisations fall.", _GAP + rule, weigh)


def s3(frame: pd.DataFrame, link: str) -> Verdict:
    """From records of both phases; `ratio`, `low` and `high` are of the schedule that is lowest."""

    def weigh(rows: pd.DataFrame) -> Weighed:
        found = _in_equal_time(frame, rows, link)
        counted = {name: found[name] for name in found if not saved.overlaps(name)}
        if not counted:
            return Weighed([], UNDECIDED, f"no training step of this very shape was timed over the {link} link")
        said = [
            f"{AXES.short(name)} " + "overlaps, apart: " * saved.overlaps(name) + one.said
            for name, one in found.items()
        ]
        least = min(counted.values(), key=lambda one: np.nan_to_num(one.sooner.mean, nan=np.inf))
        lower = any(one.later.high < 0 for one in counted.values())
        higher = all(one.sooner.low > 0 for one in counted.values())
        verdict = SUPPORTED if lower else REFUTED if higher else UNDECIDED
        return Weighed([least.sooner, *(one.sooner for one in counted.values())], verdict, "; ".join(said))

    claim = f"S3 {link}: in equal time a schedule with fewer synchronisations reaches a lower loss on "
    rule = (
        "A schedule's last validation loss less tensor parallelism's (TP) after as much time, paired by seed, with "
        "Student's intervals at 99% for all schedules together. Time: by the interval of the ratio of their "
        f"training steps, of this very shape, batch, context and ranks, on the {link} link. Supported if any schedule "
        "lies, by its interval, below a TP that was trained for as many steps or more to its own end, its rate fallen. "
        "Refuted if every schedule lies above the lowest loss that TP has had in as many steps or fewer, its rate "
        "fallen or not: that can only favour the claim. Else undecided. Of schedules with fewer syncs and no overlap; "
        "overlapped ones are said apart and decide nothing."
    )
    return _verdict(frame, claim + {"fast": "NVLink.", "slow": "the slower link."}[link], rule, weigh)


class EqualTime(NamedTuple):
    """A schedule's gap to what tensor parallelism had reached in no more steps than the time allows, and to one that
    was trained to its end for as many or more.
    """

    sooner: Gap
    later: Gap
    said: str


def _in_equal_time(frame: pd.DataFrame, rows: pd.DataFrame, link: str) -> dict[str, EqualTime]:
    one, steps = rows.iloc[0], saved.ratios(frame)
    shape, same = [*COLUMNS, "dtype"], [name for name in gaps.SAME if name != "trained"]
    steps = steps[steps["work"].eq("step") & steps["link"].eq(link) & steps["outcome"].ne(NO_CLAIM)]
    steps = steps[(steps[shape] == one[shape]).all(axis=1) & steps["layers"].eq(LAYERS) & steps["low"].gt(0)]
    known = [name for name in AXES.ordered(steps["method"]) if name in set(rows["method"])]
    known = [name for name in known if gaps.syncs(name) < gaps.syncs(gaps.BASELINE)]
    level = 1 - (1 - LEVEL) / max(1, sum(not saved.overlaps(name) for name in known))
    ends = gaps.finals(frame).merge(rows[same].drop_duplicates(), on=same)
    ends = ends[ends["method"].eq(gaps.BASELINE)]
    course = gaps.along(frame, rows)
    reached = pd.concat([ends, course[course["method"].eq(gaps.BASELINE)]])
    found = {}
    for name in known:
        own, ratio = rows[rows["method"].eq(name)].set_index("seed")["value"], steps[steps["method"].eq(name)]
        least, most = one["repeat"] / ratio["high"].max(), one["repeat"] / ratio["low"].min()
        sooner = own - reached[reached["repeat"].le(least)].groupby("seed")["value"].min()
        longer = ends[ends["repeat"].ge(most)]
        at = longer["repeat"].min()
        later = own - longer[longer["repeat"].eq(at)].set_index("seed")["value"]
        sooner, later = (gaps.gap(part.dropna(), level) for part in (sooner, later))
        said = (
            f"{sooner} nats over TP's lowest in up to {least:.0f} steps" if sooner.seeds else "TP has no loss as early"
        )
        said += f", {later} over one that ends after {at:.0f}" if later.seeds else ""
        tokens = int(np.ceil(most)) * one["batch"] * one["context"]
        more = "" if at < 1.02 * most else f" (to support, train TP alone on {tokens} tokens)"
        found[name] = EqualTime(sooner, later, said + more)
    return found


def s4(frame: pd.DataFrame) -> Verdict:
    half = gaps.syncs(gaps.BASELINE) // 2

    def weigh(rows: pd.DataFrame) -> Weighed:
        lost, taught = (gaps.after(frame, rows, f"{how}_loss") for how in ("dropped", "distilled"))
        lost, taught = (gaps.gap(part[part["repeat"].eq(half)].set_index("seed")["cost"]) for part in (lost, taught))
        above = lost.low > DROP_COST or taught.low > 0
        verdict = REFUTED if above else SUPPORTED if lost.high < DROP_COST and taught.low <= 0 else UNDECIDED
        said = f"{half} of {2 * half} syncs dropped cost {lost} nats, {taught} after distillation"
        return Weighed([lost, taught], verdict, said)

    claim = "S4: after training the least sensitive half of the syncs can go for less than .02 nats, and distillation "
    rule = (
        "cost = validation loss of the trained tensor-parallel model without the 12 least sensitive of its 24 syncs, "
        "less its own with all, paired by seed, with Student's 99% interval; sensitivities are of the same validation "
        f"text, which favours the claim. Supported if the interval lies below {DROP_COST} nats and that of the cost "
        f"after distillation reaches 0; refuted if either lies above its bound ({DROP_COST} and 0); else undecided."
    )
    return _verdict(frame, f"{claim}recovers it.", rule, weigh)


def s5(frame: pd.DataFrame) -> Verdict:
    """`ratio`, `low` and `high` are of the arm with 6 syncs."""

    def weigh(rows: pd.DataFrame) -> Weighed:
        words, states, asked = [], [], []
        for count, (name, least, most) in PREDICTED.items():
            found = gaps.gap(gaps.paired(rows, name))
            off = found.high < least - ROUNDED or found.low > most + ROUNDED
            states.append(UNDECIDED if np.isnan(found.low) else REFUTED if off else SUPPORTED)
            words.append(f"{count} syncs {found}, predicted {least:+g}" + f" to {most:+g}" * (most > least))
            asked.append(found)
        six, base = asked[1], rows.loc[rows["method"].eq(gaps.BASELINE), "value"].mean()
        states.append(REFUTED if six.low > WITHIN * base else SUPPORTED if six.high <= WITHIN * base else UNDECIDED)
        of = "not trained" if np.isnan(six.mean) else f"{six.mean / base:+.1%} of the loss"
        words.append(f"6 syncs {of}, predicted within {WITHIN:.0%}")
        verdict = REFUTED if REFUTED in states else SUPPORTED if set(states) == {SUPPORTED} else UNDECIDED
        return Weighed([six, *asked], verdict, "; ".join(words))

    rule = (
        f"Each prediction (12 syncs +.01, 6 +.07, 4 +.12 to +.22, 3 +.32 to +.52, each to {ROUNDED}; 6 syncs within "
        f"{WITHIN:.0%} of the baseline's loss) is refuted where the interval excludes it. Supported if all are there, "
        "none is refuted and the 2% hold the whole interval; refuted if any is; else undecided."
    )
    return _verdict(frame, "S5: the seed's predictions of the loss hold as gaps to our baseline.", _GAP + rule, weigh)


def _verdict(frame: pd.DataFrame, claim: str, rule: str, weigh: Callable[[pd.DataFrame], Weighed]) -> Verdict:
    """Of the size that decides; `why` says the others, too."""
    every = gaps.settings(gaps.finals(frame))
    found = [(rows, weigh(rows)) for rows in every if rows["width"].iloc[0] >= gaps.LEAST_WIDTH]
    if not found:
        why = (
            f"{every[0]['width'].iloc[0]} wide shows that the code runs; judged from {gaps.LEAST_WIDTH} on"
            if every
            else ""
        )
        state, cells = NOT_APPLICABLE if every else UNDECIDED, every[0] if every else pd.DataFrame()
        return Verdict(claim, rule + _WHERE, *[np.nan] * 3, state, why or "no arm was trained to its end", cells)
    told = lambda weighed: sum(not np.isnan(gap.low) for gap in weighed.asked)  # noqa: E731
    found.sort(key=lambda one: told(one[1]), reverse=True)
    rows, one = found[0]
    equal = [
        other for part, other in found if (part["width"].iloc[0], told(other)) == (rows["width"].iloc[0], told(one))
    ]
    state = one.verdict if len({other.verdict for other in equal}) == 1 else UNDECIDED
    names = [gaps.size_of(part, every) for part, _ in found]
    beside = [
        f"{name}: {other.said}" for name, (_, other) in zip(names, found, strict=True) if other is one or told(other)
    ]
    ends = one.asked[0][:3] if one.asked else [np.nan] * 3
    return Verdict(claim, rule + _WHERE, *ends, state, "; beside it ".join(beside), rows, rows["run"].nunique())
