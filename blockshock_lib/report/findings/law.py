"""The law beside the measurement, and where the time goes: records frame in, numbers out.

Speeds and ratios are of medians unless an interval stands beside them, and times are ms of the slowest rank.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from blockshock_lib.report import cells, verdicts
from blockshock_lib.report.training.ratios import training_ratios
from blockshock_lib.report.training.tables import PIECES

CLOSE = 0.03  # a residual that needs no reason
_SHORT = {"dense": "a", "row_parallel": "b1", "masked_dense": "c", "block_shock": "ours"}
BEYOND, OVER = "forward beyond its product", "parts less the whole"
NAME = {metric: name for name, (metric, _) in PIECES.items()}
STEPS = {"b1": "row_parallel", "t3": "block_shock", "t1": "block_shock_recompress"}


def forwards(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a case of phase 1 with A, B1 and Block-Shock, smallest first: the case's columns, `size`; medians of the
    products `a`, `b1`, `c`, `ours`, of the forwards `a_forward` and so on, and of B1's collective, `reduce`.
    """
    rows = cells.complete(frame)
    rows = rows[~rows["phase"].isin(["phase2", "phase3"])]
    table = pd.DataFrame()
    for metric, end in (("compute_kernel", ""), ("forward_kernel", "_forward"), ("reduce_kernel", "_reduce")):
        found = cells.summary(rows, metric)
        for method, short in _SHORT.items():
            part = found[found["method"].eq(method)].rename(columns={"median": f"{short}{end}"})
            part = part[[*cells.CASE, "size", f"{short}{end}"]]
            on = [*cells.CASE, "size"]
            table = part if table.empty else table.merge(part, on=on, how="left") if len(part) else table
    wanted = ["a", "b1", "ours", "b1_forward", "ours_forward", "b1_reduce"]
    if table.empty or not set(wanted) <= set(table):
        return pd.DataFrame(columns=[*cells.CASE, "size", *wanted, "reduce"])
    table = table.dropna(subset=wanted).rename(columns={"b1_reduce": "reduce"})
    return table.reindex(columns=[*table.columns, *({"c", "c_forward"} - set(table))]).sort_values(
        ["size", "batch"], kind="stable", ignore_index=True
    )


def law_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """`forwards` with the law beside the measurement, in "x".

    s = A's product / (Block-Shock's * ranks / 2): 2:4 over dense, the same size. `predicted` is what the law makes of
    it: B1's product takes 1 / ranks of A's, Block-Shock's 2 / (ranks s) of it, and both add the collective that B1
    was measured with. `ratio`, `low`, `high` are as measured. `residual` = ratio / predicted - 1, of which `half` is
    what B1's own product, that is no exact share of A's, makes of it, and `rest` what the whole forward is beyond the
    sum of its parts; `reason` names the larger. `bound` is what binds B1's product, "bytes" or "arithmetic", and
    `ideal` the ratio that the best 2:4 kernel would reach there: 9/8 of B1's bytes, or its arithmetic.
    """
    table = forwards(frame)
    if table.empty:
        return table.reindex(columns=[*table.columns, *_LAW])
    ratios = verdicts.ratio(frame, "row_parallel", "block_shock")
    table = table.merge(ratios[["case", "ratio", "low", "high"]], on="case")
    ranks, reduce = table["world_size"].astype(float), table["reduce"]
    table["s"] = table["a"] / table["ours"] / (ranks / 2)
    table["predicted"] = (table["a"] / ranks + reduce) / (table["ours"] + reduce)
    table["residual"] = table["ratio"] / table["predicted"] - 1
    table["half"] = (table["b1"] + reduce) / (table["a"] / ranks + reduce) - 1
    table["rest"] = (1 + table["residual"]) / (1 + table["half"]) - 1
    table["reason"] = [_reason(row, row.b1 * row.world_size / row.a) for row in table.itertuples(index=False)]
    table["bound"] = table["case"].map(_bounds(frame)).fillna("")
    slower = np.where(table["bound"].eq("bytes"), 9 / 8, 1.0)
    table["ideal"] = (table["b1"] + reduce) / (table["b1"] * slower + reduce)
    return table


_LAW = ["ratio", "low", "high", "s", "predicted", "residual", "half", "rest", "reason", "bound", "ideal"]


def _reason(row, times_half: float) -> str:
    if abs(row.residual) <= CLOSE:
        return f"none needed: within {CLOSE:.0%}"
    if abs(np.log1p(row.half)) >= abs(np.log1p(row.rest)):
        return f"B1's product takes {times_half:.2f} of its share of A's"
    return "the forward is no sum of its parts: overlap, gaps, clocks"


def _bounds(frame: pd.DataFrame) -> dict[str, str]:
    # What binds B1's product, by the ceilings of the case's own run.
    rows = cells.valid(frame)
    by = {name: rows[rows["metric"].eq(name)].groupby("case")["value"].median() for name in _CEILINGS}
    part = rows[rows["method"].eq("row_parallel")]
    work = {name: part[part["metric"].eq(name)].groupby("case")["value"].median() for name in _WORK}
    bytes_ms = (work["bytes_read"] + work["bytes_written"]) / by["copy_bandwidth"] / 1e6
    found = pd.DataFrame({"bytes": bytes_ms, "arithmetic": work["flops"] / by["gemm_rate"] / 1e9}).dropna()
    return found.idxmax(axis=1).to_dict() if len(found) else {}


_CEILINGS, _WORK = ("copy_bandwidth", "gemm_rate"), ("flops", "bytes_read", "bytes_written")


def step_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """`training_ratios` with the law's `predicted_shrink` and `predicted_gain` beside `shrink` and `gain`.

    The law of a step: B1's three products take 1 / ranks of A's each; Block-Shock's forward and dX 2 / (ranks s), and
    its dW as much as B1's, or twice that by the strategy "full". Collectives, the optimizer and the stages after it are
    added as measured.
    """
    table = training_ratios(frame)
    if table.empty:
        return table.assign(predicted_shrink=np.nan, predicted_gain=np.nan)
    parts = pieces(frame)
    said = [_step_law(parts[parts["case"].eq(row.case)], row.world_size) for row in table.itertuples(index=False)]
    table["predicted_shrink"], table["predicted_gain"] = zip(*said, strict=True)
    return table


def _step_law(parts: pd.DataFrame, ranks: int) -> tuple[float, float]:
    by = {(row.method, row.part): row.ms for row in parts.itertuples(index=False)}
    a = by.get(("dense", NAME["compute_kernel"]), np.nan)
    # Only Block-Shock's full dW computes twice what it keeps; B1's keeps all of it.
    ours = parts["method"].str.startswith("block_shock")
    full = ours & parts["detail"].eq("full") & parts["part"].eq(NAME["dw_kernel"])
    ms, forward = {}, {}
    for short, method in STEPS.items():
        product = a / ranks if short == "b1" else by.get((method, NAME["compute_kernel"]), np.nan)
        twice = 2 if method in set(parts.loc[full, "method"]) else 1
        added = sum(by.get((method, NAME[f"{metric}_kernel"]), 0.0) for metric in _ADDED)
        ms[short] = 2 * product + twice * a / ranks + added
        forward[short] = product + by.get((method, NAME["reduce_kernel"]), 0.0)
    shrink = (ms["b1"] / ms["t1"]) / (forward["b1"] / forward["t3"])
    return float(shrink), float(ms["t1"] / ms["t3"])


_ADDED = ("reduce", "reduce_dx", "optimizer", "remask", "compress", "refresh")


def pieces(frame: pd.DataFrame) -> pd.DataFrame:
    """Where the time goes, a row a (case, method, part): CASE columns, `size`, `work`, `method`, `part`, `ms` and
    `detail`.

    Of a forward (phase 1): the product, and BEYOND = forward - product: what of the collective the product does not
    hide, and a method's other work. Of a step (phase 3): its pieces as each was measured alone, and OVER = their sum -
    the whole step. Above 0 the pieces overlap, or one ran at a higher clock in the step than alone; below 0 it was a
    lower clock, there are gaps, or the step does what no piece holds.
    """
    found = []
    rows = cells.complete(frame)
    first = rows[~rows["phase"].isin(["phase2", "phase3"])]
    product, whole = (cells.summary(first, f"{name}_kernel") for name in ("compute", "forward"))
    if len(whole) and len(product):
        both = product.merge(whole[["case", "method", "median"]], on=["case", "method"], suffixes=("", "_whole"))
        found.append(both.assign(part=NAME["compute_kernel"], ms=both["median"], work="forward"))
        beyond = (both["median_whole"] - both["median"]).clip(lower=0)
        found.append(both.assign(part=BEYOND, ms=beyond, work="forward"))
    last = rows[rows["phase"].eq("phase3")]
    parts = []
    for name, (metric, _) in PIECES.items():
        part = cells.summary(last, metric)
        if len(part):
            text = cells.samples(last, metric).drop_duplicates(["case", "method"])[["case", "method", "detail"]]
            parts.append(part.merge(text, on=["case", "method"]).assign(part=name, ms=part["median"], work="step"))
    found += parts
    step = cells.summary(last, "step_kernel")
    if parts and len(step):
        total = pd.concat(parts).groupby(["case", "method"])["ms"].sum().rename("total").reset_index()
        step = step.merge(total, on=["case", "method"])
        found.append(step.assign(part=OVER, ms=step["total"] - step["median"], work="step"))
    columns = [*cells.CASE, "size", "work", "method", "part", "ms", "detail"]
    if not found:
        return pd.DataFrame(columns=columns)
    table = pd.concat([part if "detail" in part else part.assign(detail="") for part in found], ignore_index=True)
    return table[columns]


def largest(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the largest case (N * B) of each optimizer."""
    work = table["size"].astype(float) * table["batch"].astype(float)
    return table[np.isclose(work, work.groupby(table["optimizer"]).transform("max"))] if len(table) else table
