"""What a layer can do in several ways, each of them timed: the strategies for dW, the orders of the backward."""

from __future__ import annotations

import pandas as pd

from blockshock_lib.report import cells
from blockshock_lib.report.tables import ABSENT, rounded
from blockshock_lib.report.training.tables import shown

STRATEGIES = ("full", "periodic", "exchange")
ORDERS = ("overlapped", "in turn")


def dw_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Median ms of dW by each strategy that can run, its exchange included, a row a (case, method), and which one the
    layer took.
    """
    return ways_table(frame, "dw_strategy_kernel", STRATEGIES, "dw_kernel")


def order_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Median ms of the backward with dX's collective beside dW and before it, a row a (case, method), and which order
    was taken; "in turn / overlapped" is above 1 where overlapping pays.
    """
    return ways_table(frame, "backward_order_kernel", ORDERS, "backward_kernel")


def ways_table(frame: pd.DataFrame, metric: str, ways: tuple[str, ...], chosen: str) -> pd.DataFrame:
    """What was timed each way: a column a way; where there are two, the second's time over the first's."""
    rows = cells.complete(frame)
    others = rows["metric"].eq(metric)
    table = pd.DataFrame()
    for name in ways:
        part = cells.summary(rows[~others | rows["detail"].eq(name)], metric)
        if len(part):
            part = part.rename(columns={"median": f"{name} (ms)"}).drop(columns=["p10", "p90"])
            keys = [key for key in part if not key.endswith("(ms)")]
            table = part if table.empty else table.merge(part, on=keys, how="outer")
    if table.empty:
        return table
    table = table.merge(_taken(cells.samples(rows, chosen)), on=["case", "method"], how="left").fillna(
        {"taken": ABSENT}
    )
    times = [name for name in table if name.endswith("(ms)")]
    ratio = []
    if len(ways) == 2 and len(times) == 2:
        first, second = (table[name].astype(float) for name in times)
        ratio = [f"{ways[1]} / {ways[0]}"]
        table[ratio[0]] = rounded(second / first, digits=3)
    table[times] = rounded(table[times].astype(float))
    return shown(table, [*times, *ratio, "taken"])


def _taken(rows: pd.DataFrame) -> pd.DataFrame:
    """The way that a case's method took, a row a (case, method); where its groups differ, in how many of them each."""
    found = []
    for (case, method), one in rows.groupby(["case", "method"], sort=False):
        counts = one.groupby("detail")["group"].nunique().sort_values(ascending=False, kind="stable")
        words = [f"{way} in {count} of {counts.sum()}" if len(counts) > 1 else way for way, count in counts.items()]
        found.append((case, method, ", ".join(words)))
    return pd.DataFrame(found, columns=["case", "method", "taken"])
