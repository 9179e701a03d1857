"""The study's answer in words, of the shipped records: products, and a whole model's next token."""

import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.studies.gallery import report
from blockshock_lib.studies.gallery.axes import TOKENS


def answer(frame: pd.DataFrame) -> str:
    speeds, tokens = (frame[frame["phase"].eq(f"gallery_{name}")] for name in ("speed", "decode"))
    return " ".join([report.answer(speeds), *[decoded(tokens)] * bool(len(tokens))])


def decoded(frame: pd.DataFrame) -> str:
    """The tokens a second of the compiled 2:4 model over those of the fastest dense one, by batch."""
    timed = set(frames.samples(frame, frames.time_metric(frame, f"{TOKENS.stem}_kernel"))["method"])
    rivals = [name for name in report.DECODE_DENSE if name in timed]
    table = report.beside(frame, rivals, TOKENS.under) if rivals else frame.iloc[:0]
    if table.empty or (why := frames.no_claim(table)):
        return f"A whole model: {'no case holds valid times' if table.empty else why}."
    names = [name for name in ("weight", "context") if table[name].nunique() > 1]
    rows = table.sort_values([*names, "batch"]).to_dict("records")
    each = ", ".join(
        " ".join([verdicts.interval_text(row), f"at B={row['batch']}", *(f"{name} {row[name]}" for name in names)])
        for row in rows
    )
    return f"A whole 2:4 model's tokens a second over the fastest dense one's: {each}."
