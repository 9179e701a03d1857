"""The law beside the measurement, where the time goes, and what H2 rests on; medians, times in ms, slowest rank."""

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.interval import by_run, intervals
from blockshock_lib.report.tables import ABSENT, rounded
from blockshock_lib.studies.linear.axes import AXES, optimizer_name
from blockshock_lib.studies.linear.report import build
from blockshock_lib.studies.linear.report.build import B1, OURS, PIECES, STOCK, T1, A, C, interval

CLOSE = 0.03  # a residual that needs no reason
BEYOND, OVER = "forward beyond its product", "parts less the whole"
NAME = {stem: name for name, stem in PIECES.items()}
PARTS = (NAME["compute"], BEYOND, *list(PIECES)[1:], OVER)
"""The columns of `pieces`."""
STEPS = {"b1": B1, "t3": OURS, "t1": T1}
PHASE = {"forward": "phase1", "step": "phase3"}
_TIMES = {"": "compute_kernel", "_forward": "forward_kernel", "_reduce": "reduce_kernel"}
_RATIOS = {"forward": "f", "recompress": "s1", "packed": "s3", "shrink": "s1/f", "keep": "s3/f", "gain": "T3 over T1"}
# T1 - T3 of each: what recompression is, what T3 does in its place, and what else differs.
_RECOMPRESSION = ("remask", "compress")
_AROUND = ("reduce", "reduce_dx", "optimizer", "remask", "compress", "refresh")  # the three products of a step
_OTHERS = {"refresh": "refresh", "optimizer step": "optimizer", "dW": "dw"}


def rows_of(frame: pd.DataFrame, work: str) -> pd.DataFrame:
    """Rows of the phase that measures this work. A forward's: not of phases where it keeps what a backward needs."""
    frame = frames.complete(frame, AXES)
    return frame[~frame["phase"].isin(["phase2", "phase3"]) if work == "forward" else frame["phase"].eq(PHASE[work])]


def law_rows(frame: pd.DataFrame, needs: tuple[str, ...] = ("reduce",)) -> pd.DataFrame:
    """A row a case of phase 1 with A, B1 and Block-Shock, smallest first: the law beside the measurement, in "x".

    Medians of the products `a`, `b1`, `ours`, of the forwards `a_forward` and so on, and of B1's collective, `reduce`.
    `s`, with its 99% interval: how much faster a 2:4 product is than the dense one of the same size; with more than two
    ranks the terms are sharded, and A's product is taken to shrink in proportion. `predicted`: B1's product takes
    1 / ranks of A's, Block-Shock's 2 / (ranks s) of it, and both add B1's collective.
    `residual` = ratio / predicted - 1, of which `half` is what B1's own product, that is no exact share of A's, makes
    of it, and `rest` what the whole forward is beyond the sum of its parts. `bound` is what binds B1's product, `ideal`
    the ratio that the best 2:4 kernel would reach there: 9/8 of B1's bytes, or its arithmetic.

    What parity takes, all else held, nan where nothing does: `s_needed`; `link`, a bus bandwidth: both send the same
    bytes, so that a slower link brings the ratio towards 1 and never across; `free`, the ratio if communication cost
    nothing. `alone`: the bandwidth (GB/s) from which Block-Shock beats A on one GPU; `bus`: the one reached.
    With `needs` empty, cases without a collective's time stay, as those of emulated ranks; nan what needs it.
    """
    table = build.wide(rows_of(frame, "forward"), _TIMES, {"a": A, "b1": B1, "ours": OURS})
    table = table.rename(columns={"b1_reduce": "reduce"})
    table = table.dropna(subset=["a", "b1", "ours", "b1_forward", "ours_forward", *needs])
    table = table.merge(verdicts.ratio(frame, AXES, B1, OURS)[["case", "ratio", "low", "high"]], on="case")
    products = verdicts.ratio(frame, AXES, A, OURS, "compute_kernel").set_index("case")
    reduce, ranks = table["reduce"], table["world_size"].astype(float)
    share = table["a"] / ranks
    table["s"] = 2 * share / table["ours"]
    for end in ("low", "high"):
        table[f"s_{end}"] = table["case"].map(products[end]).astype(float) * 2 / ranks
    table["predicted"] = (share + reduce) / (table["ours"] + reduce)
    table["residual"] = table["ratio"] / table["predicted"] - 1
    table["half"] = (table["b1"] + reduce) / (share + reduce) - 1
    table["rest"] = (1 + table["residual"]) / (1 + table["half"]) - 1
    table["reason"] = [_reason(row) for row in table.itertuples(index=False)]
    table["bound"] = table["case"].map(_bounds(frame)).astype(object).fillna("")
    slower = np.where(table["bound"].eq("bytes"), 9 / 8, 1.0)
    table["ideal"] = (table["b1"] + reduce) / (table["b1"] * slower + reduce)
    left = table["b1_forward"] - (table["ours_forward"] - table["ours"])
    table["s_needed"] = (2 * share / left).where(left > 0)
    table["free"] = table["b1"] / table["ours"]
    table["link"] = np.where(table["free"] >= 1, 0.0, np.nan)
    sent = build.summary(frame, "bytes_sent")
    moved = table["case"].map(sent[sent["method"].eq(OURS)].set_index("case")["median"]).astype(float) / 1e6
    spare = table["a_forward"] - table["ours"]
    table["bus"], table["alone"] = moved / reduce, (moved / spare).where(spare > 0)
    return table


def _reason(row) -> str:
    if abs(row.residual) <= CLOSE:
        return f"none needed: within {CLOSE:.0%}"
    if abs(np.log1p(row.half)) >= abs(np.log1p(row.rest)):
        return f"B1's product takes {row.b1 * row.world_size / row.a:.2f} of its share of A's"
    return "the forward is no sum of its parts: overlap, gaps, clocks"


def _bounds(frame: pd.DataFrame) -> dict[str, str]:
    """Case -> what binds B1's product, by the ceilings of the case's own run."""
    rows = frames.valid(frames.complete(frame, AXES))
    rows = rows[rows["method"].isin([B1, frames.CEILING])]
    by = rows.pivot_table(index="case", columns="metric", values="value", aggfunc="median")
    by = by.reindex(columns=["bytes_read", "bytes_written", "copy_bandwidth", "flops", "gemm_rate"])
    moved = (by["bytes_read"] + by["bytes_written"]) / by["copy_bandwidth"] / 1e6
    found = pd.DataFrame({"bytes": moved, "arithmetic": by["flops"] / by["gemm_rate"] / 1e9}).dropna()
    return found.idxmax(axis=1).to_dict() if len(found) else {}


def step_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """`training_ratios` with the law's `predicted_shrink` and `predicted_gain`: B1's three products take 1 / ranks of
    A's each; Block-Shock's forward and dX 2 / (ranks s), its dW as B1's, or twice that if "full". All else as measured.
    """
    table = training_ratios(frame)
    parts = step_pieces(frame).set_index("case").reindex(table["case"]).reset_index(drop=True)
    dw = frames.samples(frame, "dw_kernel").query("detail == 'full'").groupby("method")["case"].agg(set)
    a, step, forward = parts["a_compute"] / table["world_size"], {}, {}
    for short, method in STEPS.items():
        product = a if short == "b1" else parts[f"{short}_compute"]
        # Only Block-Shock's full dW computes twice what it keeps; B1's keeps all of it.
        full = table["case"].isin(dw.get(method, ()) if short != "b1" else ())
        step[short] = 2 * product + (1 + full) * a + parts[[f"{short}_{stem}" for stem in _AROUND]].sum(axis=1)
        forward[short] = product + parts[f"{short}_reduce"].fillna(0.0)
    shrink = step["b1"] / step["t1"] / (forward["b1"] / forward["t3"])
    return table.assign(predicted_shrink=shrink, predicted_gain=step["t1"] / step["t3"])


def step_pieces(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a case of phase 3: `b1`, `t3`, `t1`, medians of their steps, and of the pieces, as `t1_compress`; ms."""
    rows = rows_of(frame, "step")
    metrics = {"": frames.time_metric(rows, "step_kernel")} | {f"_{stem}": f"{stem}_kernel" for stem in NAME}
    return build.wide(rows, metrics, STEPS | {"a": A})


def pieces(frame: pd.DataFrame) -> pd.DataFrame:
    """Where the time goes, a row a (case, `work`, method), a column a part, ms. Of a forward (phase 1): the product,
    and BEYOND = forward - product. Of a step (phase 3): its pieces as each was measured alone, and OVER = their sum -
    the step: above 0 by overlap or higher clocks, below by gaps, or what no piece holds.
    """
    product = NAME["compute"]
    forward = build.medians(rows_of(frame, "forward"), {product: "compute_kernel", BEYOND: "forward_kernel"})
    forward = forward.dropna(subset=[product, BEYOND])
    forward[BEYOND] = (forward[BEYOND] - forward[product]).clip(lower=0)
    metrics = {name: f"{stem}_kernel" for name, stem in PIECES.items()} | {OVER: "step_kernel"}
    step = build.medians(rows_of(frame, "step"), metrics)
    step[OVER] = step[list(PIECES)].sum(axis=1, min_count=1) - step[OVER]
    return pd.concat([forward.assign(work="forward"), step.assign(work="step")], ignore_index=True)


def codes(frame: pd.DataFrame) -> dict[str, str]:
    """Work ("forward", "step") -> the code that measured it; {} where all have one digest, whatever the commit."""
    rows = frames.complete(frame, AXES)
    found = {work: set(rows.loc[rows["phase"].eq(phase), "code"]) for work, phase in PHASE.items()}
    digests = {frozenset(code.rpartition("/")[2] for code in codes) for codes in found.values() if codes}
    if len(digests) < 2:
        return {}
    return {work: " and ".join(sorted(filter(None, codes))) or "unknown" for work, codes in found.items() if codes}


def codes_sentence(works: dict[str, str]) -> str:
    words = ", ".join(f"{work} {code}" for work, code in works.items())
    return f"Measured with different code ({words}): compare within one work alone." if works else ""


def quotients(
    frame: pd.DataFrame, times: Mapping[str, tuple[str, str]], ratios: Mapping[str, Callable]
) -> pd.DataFrame:
    """`ratios` of `times`, each (metric, method), in "x" with 99% intervals (`_low`, `_high`), by which verdicts are
    said: a row a case, in order, of the `groups` of processes of `runs` that have all `times`. The times: means in ms.
    """
    medians = []
    for metric, method in times.values():
        rows = frames.samples(frame, metric)
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
    return build.in_order(table.assign(size=AXES.size(table)), "size", "batch", "optimizer")


def training_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Six `quotients`: speeds over B1 of Block-Shock's `forward`, of T1's step (`recompress`) and T3's (`packed`);
    `shrink` = recompress / forward, `keep` = packed / forward, `gain` = packed / recompress.
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
    return quotients(frame, times, ratios).assign(forward_metric=forward, step_metric=step)


def ratios_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`training_ratios` in words, a row a case, smallest first, and the speed of T3 over the stock T1."""
    table = training_ratios(frame)
    found = {words: [interval(row, name) for row in table.to_dict("records")] for name, words in _RATIOS.items()}
    stock = build.speeds(frame, STOCK, [OURS], frames.time_metric(frame, "step_kernel")).set_index("case")["speed"]
    return _about(table).assign(**found, **{"T3 over stock T1": table["case"].map(stock).astype(object).fillna(ABSENT)})


def gap_table(frame: pd.DataFrame) -> pd.DataFrame:
    """How much longer T1's step takes than T3's, and in which pieces: medians in ms, the largest case of each
    optimizer; "rest" is what the pieces leave. "s1/f without" is s1/f had T1's step taken neither re-mask nor compress.
    """
    table = build.largest(training_ratios(frame)).reset_index(drop=True)
    if table.empty:
        return pd.DataFrame()
    forward, step = table.loc[0, ["forward_metric", "step_metric"]]
    times = {"b1": (step, B1), "t1": (step, T1), "of_b1": (forward, B1), "ours": (forward, OURS)}
    times |= {stem: (f"{stem}_kernel", T1) for stem in _RECOMPRESSION}
    without = {"s": lambda t: t["b1"] / (t["t1"] - t["remask"] - t["compress"]) / (t["of_b1"] / t["ours"])}
    largest = quotients(frame[frame["case"].isin(table["case"])], times, without)
    left = {row["case"]: interval(row, "s") for row in largest.to_dict("records")}
    parts = step_pieces(frame).fillna(0.0).set_index("case").loc[table["case"]].reset_index(drop=True)
    found = {"T1 - T3 (ms)": parts["t1"] - parts["t3"]}
    found["re-mask + compress"] = sum(parts[f"t1_{stem}"] - parts[f"t3_{stem}"] for stem in _RECOMPRESSION)
    found |= {words: parts[f"t1_{stem}"] - parts[f"t3_{stem}"] for words, stem in _OTHERS.items()}
    whole, *known = found.values()
    found |= {"rest": whole - sum(known), "s1/f without": table["case"].map(left).fillna("not measured")}
    return rounded(_about(table).assign(**found))


def _about(table: pd.DataFrame) -> pd.DataFrame:
    optimizers = table["optimizer"].map(optimizer_name)
    return pd.DataFrame({"optimizer": optimizers, "shape": table["shape"], "B": table["batch"]})


def break_even_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Whether t(compress) + t(2:4 product), both of T1, is less than t(dense product), of C, a row a case; "pays after"
    how many products, each a forward or a dX, that one compression of both packed copies must serve.
    """
    times = {"dense product": ("compute_kernel", C), "2:4 product": ("compute_kernel", T1)}
    times["compress"] = ("compress_kernel", T1)
    table = quotients(frame, times, {"both": lambda t: t["dense product"] / (t["2:4 product"] + t["compress"])})
    if table.empty:
        return pd.DataFrame()
    saved = table["dense product"] - table["2:4 product"]
    pays = np.select([table["both_low"] > 1, table["both_high"] < 1], ["yes", "no"], "undecided")
    columns = {f"{name} (ms)": rounded(table[name]) for name in times}
    columns["dense / (both)"] = [interval(row, "both") for row in table.to_dict("records")]
    columns["pays within one"] = np.where(frames.kind(table).eq("gpu"), pays, "no claim")
    after = np.ceil(table["compress"] / saved.where(saved > 0))
    columns["pays after (products)"] = build.text(after, "{:.0f}", "never")
    return build.shown(table.assign(method=T1), columns, method=False)
