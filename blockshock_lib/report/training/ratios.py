"""What training does to Block-Shock's speed over B1: the step against the forward, and no recompression against it."""

from __future__ import annotations

import pandas as pd

from blockshock_lib.report import cells
from blockshock_lib.report.interval import quotient_interval, ratio_interval

DENSE, PACKED, RECOMPRESS = "row_parallel", "block_shock", "block_shock_recompress"
_RATIOS = ("forward", "recompress", "packed", "shrink", "keep", "gain")
COLUMNS = [
    *cells.CASE,
    "size",
    *(name + end for name in _RATIOS for end in ("", "_low", "_high")),
    "groups",
    "forward_metric",
    "step_metric",
]


def training_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Six ratios in "x" with their 99% intervals (`_low`, `_high`), a row a case that holds all their times.

    `forward`, `recompress` and `packed` are speeds over B1: of Block-Shock's forward, of a training step that
    recompresses (T1) and of one that trains the packed values (T3). `shrink` = recompress / forward, `keep` =
    packed / forward, `gain` = packed / recompress: from the same fresh groups of processes, so that what a group shares
    cancels. `groups` counts them.
    """
    metrics = cells.time_metric(frame, "forward_kernel"), cells.time_metric(frame, "step_kernel")
    forward, step = (cells.samples(frame, metric) for metric in metrics)
    found = []
    for case, rows in step.groupby("case", sort=False):
        before = forward[forward["case"].eq(case)]
        sides = {name: cells.groups(rows[rows["method"].eq(name)]) for name in (DENSE, PACKED, RECOMPRESS)}
        sides |= {("forward", name): cells.groups(before[before["method"].eq(name)]) for name in (DENSE, PACKED)}
        shared = [key for key in sides[DENSE] if all(key in side for side in sides.values())]
        if not shared:
            continue
        b1, t3, t1, b1_forward, forward_t3 = ([side[key] for key in shared] for side in sides.values())
        intervals = (
            ratio_interval(b1_forward, forward_t3),
            ratio_interval(b1, t1),
            ratio_interval(b1, t3),
            quotient_interval((b1, t1), (b1_forward, forward_t3)),
            quotient_interval((b1, t3), (b1_forward, forward_t3)),
            ratio_interval(t1, t3),
        )
        row = rows.iloc[0][cells.CASE].to_dict()
        for name, interval in zip(_RATIOS, intervals, strict=True):
            row |= {name: interval.ratio, f"{name}_low": interval.low, f"{name}_high": interval.high}
        found.append(row | {"groups": len(shared), "forward_metric": metrics[0], "step_metric": metrics[1]})
    table = pd.DataFrame(found, columns=[name for name in COLUMNS if name != "size"])
    table["size"] = cells.size(table)
    order = ["size", "batch", "optimizer"]
    return table[COLUMNS].sort_values(order, ascending=[True, True, False], kind="stable").reset_index(drop=True)
