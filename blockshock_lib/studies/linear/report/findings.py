"""All phases' records of one machine in one frame: the answer, and what would change it, all else held as measured."""

from functools import partial

import pandas as pd

from blockshock_lib.report import verdicts
from blockshock_lib.report.tables import ABSENT
from blockshock_lib.studies.linear.hypotheses import HYPOTHESES
from blockshock_lib.studies.linear.report import build, law
from blockshock_lib.studies.linear.report.build import interval, text

_MISSING = {"nothing to show": ["no valid times of A, B1 and Block-Shock: make phase1"]}
words = partial(verdicts.words, rules=HYPOTHESES)
numbers = partial(verdicts.numbers, rules=HYPOTHESES)


def law_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`law.law_rows` in words: the law beside the measurement, a row a case, and what is left between the two (%)."""
    table = law.law_rows(frame)
    if table.empty:
        return pd.DataFrame(_MISSING)
    inside = table["predicted"].between(table["low"], table["high"]).map({True: "yes", False: "no"})
    columns = {
        "s": text(table["s"], "{:.2f}"),
        "the law says": text(table["predicted"], "{:.2f}x"),
        "measured": [interval(row) for row in table.to_dict("records")],
        "left (%)": (100 * table["residual"]).round(1),
        "law inside the interval": inside.where(table["low"].gt(0) & table["high"].le(100 * table["low"]), ABSENT),
    }
    return build.about(table).assign(**columns)


def needs_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What parity with B1 would take, in words."""
    table = law.law_rows(frame)
    if table.empty:
        return pd.DataFrame(_MISSING)
    columns = {
        "s measured": text(table["s"], "{:.2f}"),
        "s needed": text(table["s_needed"], "{:.2f}", "none: communication alone is too long"),
        "s needed / measured": text(table["s_needed"] / table["s"], "{:.2f}x"),
        "with free communication": text(table["free"], "{:.2f}x"),
        "link for parity with B1": text(table["link"], "any", "none: even free communication loses"),
        "link to beat A on one GPU (GB/s)": text(table["alone"], "{:.0f}", "none: its product alone is slower"),
        "link reached (GB/s)": text(table["bus"], "{:.0f}"),
    }
    return build.about(table).assign(**columns)
