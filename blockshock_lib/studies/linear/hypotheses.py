"""What the linear study claims, by phase; each rule was written before its data, but for what the first reference runs
called for: the "not applicable" and the test of s3/f in H2, and H4.
"""

from functools import partial

import numpy as np
import pandas as pd

from blockshock_lib.report import answer, frames, verdicts
from blockshock_lib.report.verdicts import NO_CLAIM, NOT_APPLICABLE, REFUTED, SUPPORTED, UNDECIDED, Verdict
from blockshock_lib.studies.linear.axes import AXES, optimizer_name
from blockshock_lib.studies.linear.report import build
from blockshock_lib.studies.linear.report.law import rows_of, training_ratios

KEPT = 0.95  # of the forward's speed over B1: less is said to have shrunk
_RULE_H2 = (
    "f = Block-Shock's forward speed over B1; s1, s3 = speed over B1 of a whole training step that recompresses (T1) "
    "and of one that trains the packed values (T3); kernel time, same case, 99% intervals over whole runs, of a "
    "single run over its fresh groups of processes. A case is left out where f lies below 1: it has no advantage to "
    "shrink; not applicable if none is left. Else supported if in the largest case left of each optimizer that has "
    f"one f and s3/s1 lie above 1, s1/f below 1 and s3/f above {KEPT}: what recompresses shrinks, what does not keeps "
    f"{KEPT:.0%} of f; "
    f"refuted if in every case s1/f lies above 1, or in every case s3/s1 below 1, or in every case s3/f below {KEPT}; "
    "undecided otherwise, and always on a CPU or where one GPU plays all ranks."
)


def h1(frame: pd.DataFrame) -> Verdict:
    claim = "H1: Block-Shock's forward is faster than two-GPU dense row-parallel (B1) for sufficiently large N and B."
    return _faster_than(build.B1, frame, claim)


def h3(frame: pd.DataFrame) -> Verdict:
    return _faster_than(build.C, frame, "H3: the same masked split multiplied densely (C) is slower than Block-Shock.")


def h4(frame: pd.DataFrame) -> Verdict:
    return _faster_than(build.D, frame, "H4: the 2:4 kernels beat the permuted dense product of the same mask (D).")


def _faster_than(rival: str, frame: pd.DataFrame, claim: str) -> Verdict:
    return verdicts.speed_verdict(rows_of(frame, "forward"), AXES, claim, rival, build.OURS)


def h2(frame: pd.DataFrame) -> Verdict:
    """`ratio`, `low` and `high` are of s1/f in the largest case, of the optimizer whose interval reaches highest;
    `cells` is the table of `training_ratios` with `outcome`.
    """
    claim = "H2: in training Block-Shock's speed over B1 shrinks, unless recompression is small."
    table = training_ratios(frame)
    if table.empty:
        why = "no case holds valid times of a forward and a step of B1, Block-Shock and its recompressing variant (T1)"
        return Verdict(claim, _RULE_H2, np.nan, np.nan, np.nan, UNDECIDED, why, table.assign(outcome=""))
    holds = table["shrink_high"].lt(1) & table["keep_low"].gt(KEPT)
    holds &= table[["forward_low", "gain_low"]].gt(1).all(axis=1)
    states = [frames.kind(table).ne("gpu"), table["forward_high"].lt(1), holds]
    table["outcome"] = np.select(states, [NO_CLAIM, NOT_APPLICABLE, "supports"], UNDECIDED)
    real = table[table["outcome"].ne(NO_CLAIM)]
    asked = real[real["outcome"].ne(NOT_APPLICABLE)]
    largest = build.largest(next((part for part in (asked, real) if len(part)), table))
    row = largest.loc[largest["shrink_high"].idxmax()]
    if real.empty:
        verdict, why = UNDECIDED, frames.no_claim(table)
    elif not (real["step_metric"].eq("step_kernel") & real["forward_metric"].eq("forward_kernel")).all():
        verdict, why = UNDECIDED, "only call time was measured, and the rule asks for kernel time"
    else:
        verdict, why = _decide(asked, largest, row, len(real) - len(asked))
    return Verdict(
        claim, _RULE_H2, row["shrink"], row["shrink_low"], row["shrink_high"], verdict, why, table, row["runs"]
    )


def _decide(table: pd.DataFrame, largest: pd.DataFrame, row: pd.Series, without: int) -> tuple[str, str]:
    names = {"s1/f": "shrink", "s3/f": "keep", "s3/s1": "gain"}
    why = ", ".join(f"{words} {build.interval(row, name)}" for words, name in names.items())
    why += f" with {optimizer_name(row['optimizer'])} at {AXES.case(row)}"
    count = f"{int(table['outcome'].eq('supports').sum())} of {len(table)} cases"
    if table.empty:
        return NOT_APPLICABLE, f"f lies below 1 in all {without} cases, no advantage was there to shrink; {why}"
    why += f"; {without} cases without an advantage left out" * bool(without)
    if largest["outcome"].eq("supports").all():
        return SUPPORTED, f"{why}; {count} agree"
    if table["shrink_low"].gt(1).all() or table["gain_high"].lt(1).all() or table["keep_high"].lt(KEPT).all():
        return REFUTED, f"{why}; in all {len(table)} cases"
    alone = "; a single group of processes gives no interval" if (table["groups"] < 2).any() else ""
    return UNDECIDED, f"{why}; {count} support it{alone}"


HYPOTHESES = {"phase1": (h1, h3, h4), "phase3": (h2,)}
words = partial(verdicts.words, rules=HYPOTHESES)
numbers = partial(verdicts.numbers, rules=HYPOTHESES)


def summary(frame: pd.DataFrame) -> list[str]:
    """Phase 2 in a sentence: the speed of Block-Shock's forward and dX over B1's in the largest cell."""
    if "phase2" not in verdicts.phases(frame):
        return []
    table = verdicts.ratio(frame, AXES, build.B1, build.OURS, frames.time_metric(frame, "pass_kernel"))
    real = table[table["outcome"].ne(NO_CLAIM)]
    if real.empty:
        why = "no case holds valid times of both" if table.empty else frames.no_claim(table)
        return [f"forward + dX against B1: {why}"]
    row = real.loc[AXES.work(real).idxmax()]
    speed = f"{verdicts.interval_text(row)} of B1's speed at {AXES.case(row)}, {row['outcome']}"
    return [f"forward + dX of Block-Shock: {speed}"]


def _speed(frame: pd.DataFrame, work: str, behind: str = "", rival: str = "tensor parallelism (B1)", **how) -> str:
    """The answer about `work`'s speed, continuing the sentence `behind`."""
    said = answer.speed(frame, AXES, f"{work}_kernel", rival, **how)
    return f"{behind} {said[0].lower()}{said[1:]}" if behind else said


def _pass_answer(frame: pd.DataFrame) -> str:
    right = "It is wrong where a check failed" if verdicts.check_verdict(frame)[1] else "It stays right"
    return _speed(frame, "pass", f"{right}; forward and dX:")


def _step_answer(frame: pd.DataFrame) -> str:
    said = _speed(frame, "step")
    if said.startswith("Not answered"):
        return said
    return f"{said} {_speed(frame, 'step', 'With recompression in each step:', 'it', under=build.T1)}"


def _whole_answer(frame: pd.DataFrame) -> str:
    step = _speed(rows_of(frame, "step"), "step", "in training,", "it")
    return f"{_speed(rows_of(frame, 'forward'), 'forward').removesuffix('.')}; {step}"


ANSWERS = {
    "phase0": lambda frame: answer.checked(frame, "the sum equals the dense product to within rounding"),
    "phase1": lambda frame: _speed(frame, "forward"),
    "phase2": _pass_answer,
    "phase3": _step_answer,
    "": _whole_answer,
}
"""Of a phase, and of all records of a machine: the answer in a sentence."""
