"""The study's answer in words, of the shipped records: products, and a whole model's next token."""

import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.studies.gallery import report
from blockshock_lib.studies.gallery.axes import TOKENS


def answer(frame: pd.DataFrame) -> str:
    speeds, tokens = (frame[frame["phase"].eq(f"gallery_{name}")] for name in ("speed", "decode"))
    return " ".join([report.answer(speeds), *[decoded(tokens)] * bool(len(tokens))])


def decoded(frame: pd.DataFrame) -> str:
    """The tokens a second of the compiled 2:4 model over those of the fastest dense one, by batch; the dense ones and
    the cases that have no times are named.
    """
    timed = frames.samples(frame, frames.time_metric(frame, f"{TOKENS.stem}_kernel"))
    rivals = [name for name in report.DECODE_DENSE if name in set(timed["method"])]
    table = report.beside(frame, rivals, TOKENS.under) if rivals else frame.iloc[:0]
    if table.empty or (why := frames.no_claim(table)):
        return f"A whole model: {'no case holds valid times' if table.empty else why}."
    names = [name for name in ("weight", "context") if table[name].nunique() > 1]
    words = {"weight": "", "context": "context "}
    same = [f"{words[name]}{table[name].iloc[0]}" for name in words if name not in names]
    rows = table.sort_values([*names, "batch"]).to_dict("records")
    texts = [verdicts.interval_text(row) for row in rows]
    each = ", ".join(
        " ".join([text, f"at B={row['batch']}", *(f"{name} {row[name]}" for name in names)])
        for text, row in zip(texts, rows, strict=True)
    )
    lacks = [f"without {TOKENS.short(name)}" for name in report.DECODE_DENSE if name not in rivals]
    left = timed["case"].nunique() - len(rows)
    lacks += [f"{left} case{'s' * (left > 1)} left out, for a model has no time there"] * bool(left)
    points = any("[no interval]" in text for text in texts)
    said = "No claim of a whole model, for an interval is missing; by the points a" if points else "A"
    about = f" ({'; '.join([*same, *lacks])})" if same or lacks else ""
    return f"{said} 2:4 model's tokens a second over the fastest dense one's: {each}{about}."
