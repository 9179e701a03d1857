"""What H2 rests on: speeds over B1 of forward and step, and where the step that recompresses takes longer."""

from __future__ import annotations

import numpy as np
import pandas as pd

from blockshock_lib.report import cells, labels, verdicts
from blockshock_lib.report.interval import quotient_interval
from blockshock_lib.report.tables import ABSENT, rounded
from blockshock_lib.report.training.ratios import DENSE, PACKED, RECOMPRESS, training_ratios

STOCK = "block_shock_torch"
# T1 - T3 of each: what recompression is, what T3 does in its place, and what else differs.
_STAGES = ("remask_kernel", "compress_kernel")
_OTHERS = {"refresh": "refresh_kernel", "optimizer step": "optimizer_kernel", "dW": "dw_kernel"}


def ratios_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Every ratio of H2 with its 99% interval, a row a case, smallest first, and the speed of T3 over the stock T1.

    f is the forward's speed over B1, s1 and s3 those of the steps of T1 and T3; T3 over T1 is s3/s1.
    """
    table = training_ratios(frame)
    names = {"f": "forward", "s1": "recompress", "s3": "packed"}
    names |= {"s1/f": "shrink", "s3/f": "keep", "T3 over T1": "gain"}
    found = {text: [verdicts.quotient_text(row, name) for _, row in table.iterrows()] for text, name in names.items()}
    stock = verdicts.ratio(frame, STOCK, PACKED, cells.time_metric(frame, "step_kernel"))
    over = {row["case"]: verdicts.interval_text(row) for _, row in stock.iterrows()}
    found["T3 over stock T1"] = [over.get(case, ABSENT) for case in table["case"]]
    return pd.DataFrame(_about(table) | found)


def gap_table(frame: pd.DataFrame) -> pd.DataFrame:
    """How much longer T1's step takes than T3's, and in which pieces: ms, the largest case of each optimizer.

    Medians of T1 less those of T3, pieces measured alone; "rest" is what they leave of the gap, a minus says that T1
    is the faster one there. "s1/f without" is s1/f had T1's step taken neither re-mask nor compress, with its 99%
    interval over fresh groups.
    """
    table = training_ratios(frame)
    work = table["size"] * table["batch"].astype(float)
    table = table[np.isclose(work, work.groupby(table["optimizer"]).transform("max"))] if len(table) else table
    step, forward = cells.time_metric(frame, "step_kernel"), cells.time_metric(frame, "forward_kernel")
    found = []
    for case in table["case"]:
        rows = frame[frame["case"].eq(case)]
        sides = {name: {m: _middles(rows, m, name) for m in (PACKED, RECOMPRESS)} for name in (step, *_STAGES)}
        less = {text: _difference(rows, metric) for text, metric in _OTHERS.items()}
        gap, stages = _difference(rows, step), sum(_difference(rows, metric) for metric in _STAGES)
        row = {"T1 - T3 (ms)": gap, "re-mask + compress": stages, **less}
        row["rest"] = gap - stages - sum(less.values())
        groups = {"b1": _middles(rows, DENSE, step), "t1": sides[step][RECOMPRESS]}
        groups |= {"b1f": _middles(rows, DENSE, forward), "f": _middles(rows, PACKED, forward)}
        taken = [sides[metric][RECOMPRESS] for metric in _STAGES]
        shared = [key for key in groups["b1"] if all(key in side for side in (*groups.values(), *taken))]
        without = [np.array([groups["t1"][key] - sum(side[key] for side in taken)]) for key in shared]
        b1, b1f, f = ([np.array([groups[name][key]]) for key in shared] for name in ("b1", "b1f", "f"))
        left = (
            quotient_interval((b1, without), (b1f, f))._asdict() if shared else {"ratio": np.nan, "low": 0, "high": 0}
        )
        row["s1/f without"] = verdicts.interval_text(pd.Series(left))
        found.append(row)
    return rounded(pd.DataFrame(_about(table) | pd.DataFrame(found).to_dict("list"))) if found else pd.DataFrame()


def _about(table: pd.DataFrame) -> dict:
    about = {"optimizer": table["optimizer"].map(labels.optimizer), "shape": table["shape"], "B": table["batch"]}
    return {name: list(values) for name, values in about.items()}


def _middles(rows: pd.DataFrame, method: str, metric: str) -> dict[tuple, float]:
    """Median ms of each fresh group of processes, by (run, group); empty where the method has no such piece."""
    found = cells.samples(rows, metric)
    return {key: float(np.median(values)) for key, values in cells.groups(found[found["method"].eq(method)]).items()}


def _difference(rows: pd.DataFrame, metric: str) -> float:
    """Median ms of T1 less that of T3; a piece that one of them lacks takes it nothing."""
    middle = cells.summary(rows, metric).set_index("method")["median"]
    return float(middle.get(RECOMPRESS, 0.0) - middle.get(PACKED, 0.0))
