"""The answer of the study in Markdown: every number is read from the records of one machine."""

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.studies.linear.axes import AXES, optimizer_name
from blockshock_lib.studies.linear.hypotheses import h1, h2, h3
from blockshock_lib.studies.linear.report import build, law, limit
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
        f"- **Memory of the weights** in the largest case: {_weights(forward)}.",
    ]
    why = (
        "B1 multiplies half of the columns, Block-Shock all columns at half density. By arithmetic parity needs a 2:4 "
        "product that is s = 2 times as fast as the dense one of the same size; "
        f"s = {_span(law.law_rows(frame)['s'], 2)} was measured. Where bytes bind, B1 reads 8/9 of Block-Shock's. Both "
        "add the same all-reduce, which brings the ratio towards 1 and never across."
    )
    lines = ["## The answer", "", *claims, *answer, "", "## How to read it", "", *_how(frame), ""]
    lines += ["## Why it loses", "", why, ""]
    lines += ["## The 2:4 engine", "", *markdown(_engine(forward)), "", *_tables(frame)]
    return "\n".join([*lines, "## What this does not say", "", _DOES_NOT_SAY])


def _how(frame: pd.DataFrame) -> list[str]:
    groups = frame[frame["phase"].ne("phase0")].groupby("phase")["group"].nunique()
    many = ", ".join(f"{count} in {phase}" for phase, count in groups.items())
    labels = ", ".join(AXES.label(name) for name in AXES.methods if name not in (T1, STOCK))
    return [
        "- A *cell* is a weight, N x N, and a batch of B rows. `1.20x [1.18, 1.22]` is a speed, above 1 where the one "
        "that is named first is faster, with its 99% interval ([how it is made](../measuring.md)); *faster* and "
        "*slower* are said only where that excludes 1, else a cell is undecided.",
        "- Times are kernel times, of a CUDA graph over copies of the weight that miss the L2 cache, on the slowest "
        "rank. *Called eagerly* is what a user's call takes, the host's work in it.",
        f"- The [methods](../methods.md): {labels}. T3 is Block-Shock in training: its packed values are the "
        "parameter; T1 compresses a dense master anew after each step.",
        "- In H2, s1/f is T1's step over B1's, over what the forward is over B1's: below 1 training keeps less of the "
        "ratio. s3/f is the same of T3; s3/s1 says how many times as fast T3's step is as T1's.",
        f"- Everything is repeated in fresh groups of processes: {many}.",
    ]


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


def _weights(frame: pd.DataFrame) -> str:
    rows = frames.valid(frame)
    rows = rows[rows["metric"].eq("weight_bytes") & rows["case"].eq(rows.loc[AXES.work(rows).idxmax(), "case"])]
    most = rows.groupby("method")["value"].max() / 2**30
    return ", ".join(f"{most[name]:.4g} GiB a GPU for {AXES.label(name)}" for name in AXES.ordered(most.index))


def _engine(rows: pd.DataFrame) -> pd.DataFrame:
    """The pieces of the 2:4 engine against what they replace."""
    packed, reduce, host = (table(rows) for table in (limit.compression_table, limit.reduce_table, limit.host_table))
    gain = [verdicts.ratio(rows, AXES, STOCK, OURS, f"forward_{kind}")["ratio"] for kind in ("kernel", "call")]
    faster = f"kernels {_span(gain[0])} times as fast, eager calls {_span(gain[1])}"
    found = [("whole forward", "the same by the stock op", faster)]
    ways = build.speed_of_way(rows[rows["method"].eq(OURS)], "product_by_kernel", "cslt", "small")
    for batch, part in ways.groupby("batch"):
        best = f"{_span(part['ratio'])} times as fast"
        found.append((f"small-batch product, B = {batch}", "cuSPARSELt's best algorithm", best))
    if "time / floor" in packed:
        for name, part in packed.groupby("compression", sort=False):
            found.append((f"compressor {name}", "its byte floor", f"{_span(part['time / floor'])} times"))
    ours = [name for name in reduce if name.endswith("(µs)") and not name.startswith("nccl")]
    if ours and "nccl (µs)" in reduce:
        best = reduce["nccl (µs)"] / reduce[ours].min(axis=1)
        found.append(("all-reduce", "NCCL", f"{_span(best)} times as fast, by the fastest of its ways"))
    for row in host.to_dict("records") if "host (µs)" in host else ():
        time = f"{row['host (µs)']:.3g} µs ({row['p10–p90 (µs)']})"
        found.append((f"host time of a call: {row['product']}", "", time))
    return pd.DataFrame(found, columns=["piece", "against", "measured"])


def _tables(frame: pd.DataFrame) -> list[str]:
    """Every ratio with its 99% interval: a row a B, a column a size."""
    head = "Kernel time; above 1 Block-Shock is faster; [ , ] is the 99% interval over groups."
    lines = ["## Every ratio", "", head, ""]
    asked = [(f"The forward over {name}", "forward", over, OURS) for name, over in (("B1", B1), ("C", C), ("D", _D))]
    asked += [("Forward and dX over B1", "pass", B1, OURS)]
    asked += [(f"The step of {name} over B1", "step", B1, ours) for name, ours in (("T3", OURS), ("T1", T1))]
    for title, work, over, under in asked:
        rows = frame[frame["phase"].eq("phase2")] if work == "pass" else law.rows_of(frame, work)
        table = verdicts.ratio(rows, AXES, over, under, f"{work}_kernel")
        for optimizer in AXES.sort("optimizer", table["optimizer"]):
            part = table[table["optimizer"].eq(optimizer)]
            part = part.assign(text=[build.interval(row) for row in part.to_dict("records")])
            wide = part.pivot(index="batch", columns="shape", values="text")[list(dict.fromkeys(part["shape"]))]
            name = f"{title}, {optimizer_name(optimizer)}" if optimizer else title
            lines += [f"**{name}**", "", *markdown(wide.fillna("–").rename_axis("B").reset_index()), ""]
    return lines


def markdown(table: pd.DataFrame) -> list[str]:
    rows = [list(table), ["---"] * table.shape[1], *table.astype(str).to_numpy().tolist()]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _span(values: pd.Series, digits: int = 0) -> str:
    """ "0.65 to 0.98": the least and the most; three digits, or `digits` behind the point."""
    ends = [np.nanmin(values), np.nanmax(values)] if pd.Series(values).notna().any() else []
    return " to ".join(dict.fromkeys(f"{end:.{digits}f}" if digits else f"{end:.3g}" for end in ends)) or "not measured"
