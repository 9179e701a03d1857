"""The answer of the study in Markdown: every number is read from the records of one machine."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from jinja2 import StrictUndefined, Template

from blockshock_lib.report import reruns, tables, verdicts
from blockshock_lib.report.axes import TWIN
from blockshock_lib.report.plots import fastest, fastest_words
from blockshock_lib.report.tables import ABSENT, markdown
from blockshock_lib.studies.linear.axes import AXES, optimizer_name
from blockshock_lib.studies.linear.hypotheses import h1, h2, h3, h4
from blockshock_lib.studies.linear.phases import LINES
from blockshock_lib.studies.linear.report import TABLES, build, law, plots
from blockshock_lib.studies.linear.report.build import B1, OURS, STOCK, T1, A, C, D

_B2 = "column_parallel"


def page(frame: pd.DataFrame) -> str:
    """The page in Markdown, behind its title: results.md filled in."""
    forward, step = law.rows_of(frame, "forward"), law.rows_of(frame, "step")
    table = verdicts.ratio(forward, AXES, B1, OURS)
    open_ = table[table["outcome"].eq(verdicts.UNDECIDED)].to_dict("records")
    pairs = {"T3": (B1, OURS), "T1": (B1, T1), "stock": (STOCK, OURS)}
    text = Path(__file__).with_name("results.md").read_text(encoding="utf-8")
    return Template(text, trim_blocks=True, undefined=StrictUndefined).render(
        claims=[rule(frame) for rule in (h1, h3, h4, h2)],
        ours_over={"D": _count(forward, OURS, D), "A": _count(forward, OURS, A)},
        b2_over_b1=_count(forward, B1, _B2, "B1"),
        undecided="; ".join(map(AXES.case, open_)) if len(open_) < len(table) else "",
        control=_control(forward),
        reruns=[next(iter(reruns.sentences(rows, AXES)), "one run, foretold by none") for rows in (forward, step)],
        eagerly=_called(forward, "forward_call"),
        by_graph=_called(forward, "forward_graph_call"),
        steps={name: _span(verdicts.ratio(step, AXES, *pair, "step_kernel")["ratio"]) for name, pair in pairs.items()},
        s=_span(law.law_rows(frame)["s"]),
        which=_which(forward, step),
        tables=_tables(frame),
        lines=[*_lines(forward)],
        limits=[markdown(TABLES[name](forward)) for name in ("products", "all-reduce")],
    )


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


def _control(frame: pd.DataFrame) -> str:
    """How many times of B1's twin lie no further from B1's than the smallest difference in kernel time to claim."""
    again, smallest, told = frame.replace({"method": {TWIN: verdicts.AGAIN}}), verdicts.twin(frame, AXES)[1], []
    for kind in ("kernel", "call"):
        cells = reruns.cells(again, B1, verdicts.AGAIN, f"forward_{kind}").values()
        if len(off := np.abs([logs.mean() for cell in cells for logs in cell.values()])):
            inside = f"{(off <= np.log1p(smallest)).sum()} of {len(off)} {kind} times"
            told.append(f"{inside}, the furthest {np.exp(off.max()):.2f}x apart")
    lead = f"B1's twin lies within {smallest:.1%} of B1, the smallest difference to claim in kernel time, in "
    return f"{lead}{' and in '.join(told)}" if told else "none: B1 was not timed twice"


def _called(frame: pd.DataFrame, metric: str) -> str:
    """`_count` of a call's time over B1; only that it tells nothing where B1's twin differs from it in that time."""
    twin = verdicts.ratio(frame.replace({"method": {TWIN: verdicts.AGAIN}}), AXES, B1, verdicts.AGAIN, metric)
    if differs := int(twin["outcome"].isin(["faster", "slower"]).sum()):
        return f"not told from B1: B1 timed twice differs from itself in {differs} of {len(twin)} cells."
    return _count(law.rows_of(frame, "forward"), B1, OURS, "B1", metric)


def _tables(frame: pd.DataFrame) -> Iterator[tuple[str, list[str]]]:
    """Every ratio with its 99% interval, by its title: a row a B, a column a size."""
    asked = [(f"The forward over {name}", "forward", over, OURS) for name, over in (("B1", B1), ("C", C), ("D", D))]
    asked += [("Forward and dX over B1", "pass", B1, OURS)]
    asked += [(f"The step of {name} over B1", "step", B1, ours) for name, ours in (("T3", OURS), ("T1", T1))]
    for title, work, over, under in asked:
        table = verdicts.ratio(law.rows_of(frame, work), AXES, over, under, f"{work}_kernel")
        for optimizer in AXES.sort("optimizer", table["optimizer"]):
            part = table[table["optimizer"].eq(optimizer)]
            named = build.listed(title, optimizer_name(optimizer) if optimizer else "")
            yield named, _wide(part, build.interval)


def _which(forward: pd.DataFrame, step: pd.DataFrame) -> Iterator[tuple[str, list[str]]]:
    """Which method to use, by what it is that takes least."""
    asked = [
        ("A forward", forward, AXES, "forward_kernel"),
        ("A forward, energy", tables.widest(forward, AXES), AXES, "energy"),
        ("A product on one GPU", plots.on_one(forward), plots.ONE, "compute_kernel"),
    ]
    for optimizer in AXES.sort("optimizer", step["optimizer"]):
        rows = step[step["optimizer"].eq(optimizer)]
        asked.append((f"A step, {optimizer_name(optimizer)}", rows, AXES, "step_kernel"))
    for title, rows, axes, metric in asked:
        found = fastest(rows, axes, metric)
        if len(found):
            yield title, _wide(found, partial(fastest_words, axes=axes))


def _lines(frame: pd.DataFrame) -> Iterator[tuple[str, list[str]]]:
    """The reference lines of phase 1 in kernel time, and what an eager user pays for B1 in each way."""
    lines, calls = (TABLES[name](frame).rename(columns={"B": "batch"}) for name in ("reference lines", "calls"))
    if "vs B1" not in lines:
        return
    timed, errors = lines[lines["vs B1"].ne(ABSENT)], lines["RMS error of y"]
    off = (
        f" (y of fp8 lies {errors[errors.ne(ABSENT)].min()} to {errors[errors.ne(ABSENT)].max()}, RMS, from the truth)"
    )
    yield f"Speed over B1{off}, kernel time", _wide(timed, lambda row: row["vs B1"], "method")
    calls = pd.concat([calls.rename(columns={"eager call (µs)": "call (µs)"}), lines], ignore_index=True)
    calls = calls[calls["call (µs)"].notna() & calls["method"].isin([*map(AXES.label, (B1, OURS)), *LINES.values()])]
    yield "An eager call (µs)", _wide(calls, lambda row: f"{row['call (µs)']:g}", "method")


def _wide(table: pd.DataFrame, words: Callable[[dict], str], *lead: str) -> list[str]:
    """`words` of each row, a row a B, a column a size; one a value of the column `lead` too."""
    table = table.assign(text=[words(row) for row in table.to_dict("records")])
    wide = table.pivot(index=[*lead, "batch"], columns="shape", values="text")[list(dict.fromkeys(table["shape"]))]
    wide = wide.reindex(list(dict.fromkeys(table[lead[0]])), level=0) if lead else wide
    return markdown(wide.rename_axis([*lead, "B"]).reset_index())


def _span(values: pd.Series) -> str:
    """ "0.65 to 0.98": the least and the most."""
    ends = [values.min(), values.max()] if values.notna().any() else []
    return " to ".join(dict.fromkeys(f"{end:.2f}" for end in ends)) or "not measured"
