"""The law beside the measurement, where the time goes, and what H2 rests on; medians, times in ms, slowest rank."""

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.interval import by_run, intervals
from blockshock_lib.report.tables import ABSENT, beside
from blockshock_lib.studies.linear.axes import AXES, optimizer_name
from blockshock_lib.studies.linear.report import build
from blockshock_lib.studies.linear.report.build import B1, OURS, PIECES, STOCK, T1, A, interval

BEYOND = "forward beyond its product"
STEPS = {"b1": B1, "t3": OURS, "t1": T1}
PHASE = {"pass": "phase2", "step": "phase3"}
_RATIOS = {"forward": "f", "recompress": "s1", "packed": "s3", "shrink": "s1/f", "keep": "s3/f", "gain": "T3 over T1"}


def rows_of(frame: pd.DataFrame, work: str) -> pd.DataFrame:
    """Rows of the phase that measures this work. A forward's: not of phases where it keeps what a backward needs."""
    frame = frames.complete(frame, AXES)
    return frame[~frame["phase"].isin(list(PHASE.values())) if work == "forward" else frame["phase"].eq(PHASE[work])]


def law_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a case of phase 1 with A, B1 and Block-Shock: medians (ms) of the products `a`, `b1`, `ours`, the forwards
    `a_forward` and so on, and B1's collective, `reduce`. `s`, with its 99% interval: how much faster a 2:4 product is
    than the dense one of the same size; with more than two ranks the terms are sharded, and A's product is taken to
    shrink in proportion. `predicted`: B1's product takes 1 / ranks of A's, Block-Shock's 2 / (ranks s) of it, and both
    add B1's collective: nan where it has no time. `residual` = ratio / predicted - 1.
    """
    times = {"": "compute_kernel", "_forward": "forward_kernel", "_reduce": "reduce_kernel"}
    found = frames.medians(rows_of(frame, "forward"), AXES, **times)
    table = found.drop_duplicates("case")[[*AXES.case_columns, "size"]]
    for short, method in {"a": A, "b1": B1, "ours": OURS}.items():
        own = found[found["method"].eq(method)].set_index("case")[[*times]]
        table = table.join(own.add_prefix(short), on="case")
    table = table.rename(columns={"b1_reduce": "reduce"})
    table = table.dropna(subset=["a", "b1", "ours", "b1_forward", "ours_forward"])
    table = table.merge(verdicts.ratio(frame, AXES, B1, OURS)[["case", "ratio", "low", "high"]], on="case")
    products = verdicts.ratio(frame, AXES, A, OURS, "compute_kernel").set_index("case")
    reduce, ranks = table["reduce"], table["world_size"].astype(float)
    share = table["a"] / ranks
    table["s"] = 2 * share / table["ours"]
    for end in ("low", "high"):
        table[f"s_{end}"] = table["case"].map(products[end]).astype(float) * 2 / ranks
    table["predicted"] = (share + reduce) / (table["ours"] + reduce)
    table["residual"] = table["ratio"] / table["predicted"] - 1
    return table


def law_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`law_rows` in words: the law beside the measurement, a row a case, and what is left between the two (%)."""
    table = law_rows(frame)
    if table.empty:
        return pd.DataFrame({"nothing to show": ["no valid times of A, B1 and Block-Shock: make phase1"]})
    inside = table["predicted"].between(table["low"], table["high"]).map({True: "yes", False: "no"})
    told = table["predicted"].notna() & table["low"].gt(0) & table["high"].le(100 * table["low"])
    columns = {
        "s": build.text(table["s"], "{:.2f}"),
        "the law says": build.text(table["predicted"], "{:.2f}x"),
        "measured": [interval(row) for row in table.to_dict("records")],
        "left (%)": (100 * table["residual"]).round(1),
        "law inside the interval": inside.where(told, ABSENT),
    }
    return build.about(table).assign(**columns)


def pieces(frame: pd.DataFrame) -> pd.DataFrame:
    """Where the time goes, ms, a row a case, `work` and method; of a forward (phase 1) the product and BEYOND it."""
    product, found = "forward product", []
    forward = frames.medians(rows_of(frame, "forward"), AXES, **{product: "compute_kernel", BEYOND: "forward_kernel"})
    forward = forward.dropna(subset=[product, BEYOND])
    forward[BEYOND] = (forward[BEYOND] - forward[product]).clip(lower=0)
    for work in ("pass", "step"):
        parts = frames.medians(rows_of(frame, work), AXES, **{name: f"{stem}_kernel" for name, stem in PIECES.items()})
        found.append(parts.assign(work=work))
    return build.stacked([forward.assign(work="forward"), *found])


def training_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Speeds over B1 of Block-Shock's `forward`, of T1's step (`recompress`) and T3's (`packed`), and their quotients
    `shrink`, `keep` and `gain`, with 99% intervals (`_low`, `_high`) by which verdicts are said. A row a case, in
    order, of the `groups` of processes of `runs` that have all times; these beside them, means in ms.
    """
    forward, step = frames.time_metric(frame, "forward_kernel"), frames.time_metric(frame, "step_kernel")
    times = {name: (step, method) for name, method in STEPS.items()} | {"of_b1": (forward, B1), "ours": (forward, OURS)}
    ratios = {
        "forward": lambda t: t["of_b1"] / t["ours"],
        "recompress": lambda t: t["b1"] / t["t1"],
        "packed": lambda t: t["b1"] / t["t3"],
        "shrink": lambda t: t["b1"] / t["t1"] / (t["of_b1"] / t["ours"]),
        "keep": lambda t: t["b1"] / t["t3"] / (t["of_b1"] / t["ours"]),
        "gain": lambda t: t["t1"] / t["t3"],
    }
    medians, samples = [], {metric: frames.samples(frame, metric) for metric in (forward, step)}
    for metric, method in times.values():
        rows = samples[metric]
        of_groups = rows[rows["method"].eq(method)].groupby(["case", "run", "group"], sort=False)
        medians.append(of_groups["value"].median())
    every = pd.concat(medians, axis=1, join="inner", keys=times)
    cells = {case: part.droplevel("case") for case, part in every.groupby(level="case", sort=False)}
    found = np.exp(np.log(every).groupby(level=["case", "run"]).mean().groupby(level="case").mean())
    counts = {case: (len(part), part.index.get_level_values("run").nunique()) for case, part in cells.items()}
    found = found.join(pd.DataFrame.from_dict(counts, orient="index", columns=["groups", "runs"]))
    for name, ratio in ratios.items():
        logs = [np.log(ratio(part)) for part in cells.values()]
        ends = [both.mean for both in intervals([by_run(one.index, one.to_numpy(float)) for one in logs])]
        found = found.join(pd.DataFrame(ends, list(cells), [name, f"{name}_low", f"{name}_high"], dtype=float))
    cases = frames.complete(frame, AXES).drop_duplicates("case")[AXES.case_columns]
    table = cases.merge(found, left_on="case", right_index=True)
    table = table.assign(size=AXES.size(table), forward_metric=forward, step_metric=step)
    return build.in_order(table, "size", "batch", "optimizer")


def ratios_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`training_ratios` in words, a row a case, smallest first, and the speed of T3 over the stock T1."""
    table = training_ratios(frame)
    found = {words: [interval(row, name) for row in table.to_dict("records")] for name, words in _RATIOS.items()}
    stock = beside(frame, AXES, STOCK, [OURS], frames.time_metric(frame, "step_kernel")).set_index("case")["ratio"]
    about = {"optimizer": table["optimizer"].map(optimizer_name), "shape": table["shape"], "B": table["batch"]}
    return pd.DataFrame(about | found | {"T3 over stock T1": table["case"].map(stock).astype(object).fillna(ABSENT)})
