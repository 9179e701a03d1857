"""The answer of the study in Markdown: every number is read from the records of one machine."""

import numpy as np
import pandas as pd

from blockshock_lib.report import verdicts
from blockshock_lib.report.tables import markdown
from blockshock_lib.studies.linear.axes import AXES, optimizer_name
from blockshock_lib.studies.linear.hypotheses import h1, h2, h3
from blockshock_lib.studies.linear.report import build, law
from blockshock_lib.studies.linear.report.build import B1, OURS, STOCK, T1, A, C

_D, _B2 = "permuted_dense", "column_parallel"
_DOES_NOT_SAY = """\
- *Refuted* means: in the cases that were measured, on that machine, with those libraries. Beyond them only the law
  argues.
- It is one linear layer with random weights. Whether a model learns as well is another question.
- An interval is over the fresh groups of processes of one run on one machine. Another run, on other GPUs, may differ by
  more.
- Phases may be measured with different code, as the findings say: compare within one phase alone.
- In a model the all-reduce can hide behind other layers' work, for every method alike."""


_HOW = """\
`1.20x [1.18, 1.22]` is a speed, above 1 where the one that is named first is faster, with its 99% interval; of kernel
time unless it says *called eagerly*. [How it is measured](../measuring.md) and [which methods there are](../methods.md)
have pages of their own. s1/f and s3/f are what T1's and T3's step keep of the forward's speed over B1."""


def page(frame: pd.DataFrame) -> str:
    """The page in Markdown, behind its title."""
    forward, step = law.rows_of(frame, "forward"), law.rows_of(frame, "step")
    claims = [f"- **{v.hypothesis.rstrip('.')}: {v.verdict}.** {v.why}." for v in (h1(frame), h3(frame), h2(frame))]
    pairs = ((B1, OURS), (B1, T1), (STOCK, OURS))
    steps = [_span(verdicts.ratio(step, AXES, *pair, "step_kernel")["ratio"], 2) for pair in pairs]
    answer = [
        "- **Against the other rivals:** the same split dense without its zeros (D) is "
        f"{_count(forward, OURS, _D)} Dense on one GPU (A) is {_count(forward, OURS, A)} "
        f"Column-parallel (B2) is {_count(forward, B1, _B2, 'B1')}",
        f"- **Called eagerly** Block-Shock is {_count(forward, B1, OURS, 'B1', 'forward_call')} "
        f"Where both run through a layer's CUDA graph it is {_count(forward, B1, OURS, 'B1', 'forward_graph_call')}",
        f"- **Training:** T3's step has {steps[0]} of B1's speed, T1's {steps[1]}; the same by PyTorch's stock ops "
        f"takes {steps[2]} times as long as T3.",
    ]
    why = (
        "B1 multiplies half of the columns, Block-Shock all columns at half density. By arithmetic parity needs a 2:4 "
        "product that is s = 2 times as fast as the dense one of the same size; "
        f"s = {_span(law.law_rows(frame)['s'], 2)} was measured. Where bytes bind, B1 reads 8/9 of Block-Shock's. Both "
        "add the same all-reduce, which brings the ratio towards 1 and never across."
    )
    lines = ["## The answer", "", *claims, *answer, "", "## How to read it", "", _HOW, ""]
    lines += ["## Why it loses", "", why, ""]
    return "\n".join([*lines, *_tables(frame), "## What this does not say", "", _DOES_NOT_SAY])


def _count(
    frame: pd.DataFrame, over: str, under: str, against: str = "Block-Shock", metric: str = "forward_kernel"
) -> str:
    """ "faster than B1 in 3 of 20 cells and slower in 5; 1.20 [1.18, 1.22] in the largest." """
    table = verdicts.ratio(frame, AXES, over, under, metric)
    if table.empty:
        return f"not measured against {against}."
    row = table.loc[AXES.work(table).idxmax()]
    found = [int(table["outcome"].eq(name).sum()) for name in ("faster", "slower")]
    counts = f"faster than {against} in {found[0]} of {len(table)} cells and slower in {found[1]}"
    return f"{counts}; {build.interval(row)} at {AXES.case(row)}."


def _tables(frame: pd.DataFrame) -> list[str]:
    """Every ratio with its 99% interval: a row a B, a column a size."""
    head = "Kernel time; above 1 Block-Shock is faster; [ , ] is the 99% interval over groups."
    lines = ["## Every ratio", "", head, ""]
    asked = [(f"The forward over {name}", "forward", over, OURS) for name, over in (("B1", B1), ("C", C), ("D", _D))]
    asked += [("Forward and dX over B1", "pass", B1, OURS)]
    asked += [(f"The step of {name} over B1", "step", B1, ours) for name, ours in (("T3", OURS), ("T1", T1))]
    for title, work, over, under in asked:
        table = verdicts.ratio(law.rows_of(frame, work), AXES, over, under, f"{work}_kernel")
        for optimizer in AXES.sort("optimizer", table["optimizer"]):
            part = table[table["optimizer"].eq(optimizer)]
            part = part.assign(text=[build.interval(row) for row in part.to_dict("records")])
            wide = part.pivot(index="batch", columns="shape", values="text")[list(dict.fromkeys(part["shape"]))]
            name = f"{title}, {optimizer_name(optimizer)}" if optimizer else title
            lines += [f"**{name}**", "", *markdown(wide.fillna("–").rename_axis("B").reset_index()), ""]
    return lines


def _span(values: pd.Series, digits: int = 0) -> str:
    """ "0.65 to 0.98": the least and the most; three digits, or `digits` behind the point."""
    ends = [np.nanmin(values), np.nanmax(values)] if pd.Series(values).notna().any() else []
    return " to ".join(dict.fromkeys(f"{end:.{digits}f}" if digits else f"{end:.3g}" for end in ends)) or "not measured"
