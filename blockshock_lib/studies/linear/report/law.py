"""The law beside the measurement, where the time goes, and what H2 rests on; medians, times in ms, slowest rank."""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.interval import Interval, by_run, intervals
from blockshock_lib.report.tables import ABSENT, rounded
from blockshock_lib.studies.linear.axes import AXES, optimizer_name
from blockshock_lib.studies.linear.report import build
from blockshock_lib.studies.linear.report.build import B1, KEYS, OURS, PIECES, STOCK, T1, A, C, interval

CLOSE = 0.03  # a residual that needs no reason
BEYOND, OVER = "forward beyond its product", "parts less the whole"
NAME = {stem: name for name, stem in PIECES.items()}
STEPS = {"b1": B1, "t3": OURS, "t1": T1}
PHASE = {"forward": "phase1", "step": "phase3"}
_TIMES = {"": "compute_kernel", "_forward": "forward_kernel", "_reduce": "reduce_kernel"}
_FORWARDS = ["a", "b1", "ours", "b1_forward", "ours_forward", "reduce"]
_LAW = ["a_forward", "ratio", "low", "high", "s", "predicted", "residual", "half", "rest", "reason", "bound", "ideal"]
_NEEDS = ["s_needed", "free", "link", "alone", "bus"]
_RATIOS = {"forward": "f", "recompress": "s1", "packed": "s3", "shrink": "s1/f", "keep": "s3/f", "gain": "T3 over T1"}
_ENDS = [name + end for name in _RATIOS for end in ("", "_low", "_high")]
# T1 - T3 of each: what recompression is, what T3 does in its place, and what else differs.
_RECOMPRESSION = ["remask_kernel", "compress_kernel"]
_OTHERS = {"refresh": "refresh_kernel", "optimizer step": "optimizer_kernel", "dW": "dw_kernel"}


def rows_of(frame: pd.DataFrame, work: str) -> pd.DataFrame:
    """Rows of the phase that measures this work. A forward's: not of phases where it keeps what a backward needs."""
    frame = frames.complete(frame, AXES)
    return frame[~frame["phase"].isin(["phase2", "phase3"]) if work == "forward" else frame["phase"].eq(PHASE[work])]


def law_points(frame: pd.DataFrame) -> pd.DataFrame:
    """`verdicts.ratio` over B1 with `s` = t(A's product) / (t(Block-Shock's product) * world_size / 2): how much faster
    a 2:4 product is than the dense one of the same size, and its 99% interval, `s_low` to `s_high`. With more than two
    ranks the terms are sharded, and A's product is taken to shrink in proportion.
    """
    sparse = verdicts.ratio(frame, AXES, A, OURS, "compute_kernel")
    ends = {"ratio": "s", "low": "s_low", "high": "s_high"}
    sparse[list(ends)] = sparse[list(ends)].astype(float).div(sparse["world_size"].astype(float) / 2, axis=0)
    return verdicts.ratio(frame, AXES, B1, OURS).merge(sparse.rename(columns=ends)[["case", *ends.values()]], on="case")


def law_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a case of phase 1 with A, B1 and Block-Shock, smallest first: the law beside the measurement, in "x".

    Medians of the products `a`, `b1`, `ours`, of the forwards `a_forward` and so on, and of B1's collective, `reduce`.
    `predicted`: B1's product takes 1 / ranks of A's, Block-Shock's 2 / (ranks s) of it, and both add B1's collective.
    `residual` = ratio / predicted - 1, of which `half` is what B1's own product, that is no exact share of A's, makes
    of it, and `rest` what the whole forward is beyond the sum of its parts. `bound` is what binds B1's product, `ideal`
    the ratio that the best 2:4 kernel would reach there: 9/8 of B1's bytes, or its arithmetic.

    What parity takes, all else held, nan where nothing does: `s_needed`; `link`, a bus bandwidth: both send the same
    bytes, so that a slower link brings the ratio towards 1 and never across; `free`, the ratio if communication cost
    nothing. `alone`: the bandwidth (GB/s) from which Block-Shock beats A on one GPU; `bus`: the one reached.
    """
    rows, found = build.medians(rows_of(frame, "forward"), _TIMES), {}
    for case, part in rows.groupby("case", sort=False):
        by, methods = part.set_index("method"), {"a": A, "b1": B1, "ours": OURS}
        found[case] = {f"{short}{end}": by[end].get(m, np.nan) for end in _TIMES for short, m in methods.items()}
    table = build.by_case(frame, found, [*_FORWARDS, *_LAW, *_NEEDS]).rename(columns={"b1_reduce": "reduce"})
    table = table.dropna(subset=_FORWARDS)
    if table.empty:
        return table
    table = table.merge(verdicts.ratio(frame, AXES, B1, OURS)[["case", "ratio", "low", "high"]], on="case")
    reduce, share = table["reduce"], table["a"] / table["world_size"].astype(float)
    table["s"] = 2 * share / table["ours"]
    table["predicted"] = (share + reduce) / (table["ours"] + reduce)
    table["residual"] = table["ratio"] / table["predicted"] - 1
    table["half"] = (table["b1"] + reduce) / (share + reduce) - 1
    table["rest"] = (1 + table["residual"]) / (1 + table["half"]) - 1
    table["reason"] = [_reason(row) for row in table.itertuples(index=False)]
    table["bound"] = table["case"].map(_bounds(frame)).fillna("")
    slower = np.where(table["bound"].eq("bytes"), 9 / 8, 1.0)
    table["ideal"] = (table["b1"] + reduce) / (table["b1"] * slower + reduce)
    left = table["b1_forward"] - (table["ours_forward"] - table["ours"])
    table["s_needed"] = (2 * share / left).where(left > 0)
    table["free"] = table["b1"] / table["ours"]
    table["link"] = np.where(table["free"] >= 1, 0.0, np.nan)
    sent = build.summary(frame, "bytes_sent")
    moved = table["case"].map(sent[sent["method"].eq(OURS)].set_index("case")["median"]) / 1e6
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
    table, parts, shrink, gain = training_ratios(frame), pieces(frame), [], []
    after = ("reduce", "reduce_dx", "optimizer", "remask", "compress", "refresh")
    for row in table.itertuples(index=False):
        mine, step, forward = parts[parts["case"].eq(row.case)], {}, {}
        by = by_part(mine)
        a = by.get((A, NAME["compute"]), np.nan) / row.world_size
        # Only Block-Shock's full dW computes twice what it keeps; B1's keeps all of it.
        full = set(mine.loc[mine["detail"].eq("full") & mine["method"].str.startswith(OURS), "method"])
        for short, method in STEPS.items():
            product = a if short == "b1" else by.get((method, NAME["compute"]), np.nan)
            step[short] = 2 * product + (2 if method in full else 1) * a
            step[short] += sum(by.get((method, NAME[stem]), 0.0) for stem in after)
            forward[short] = product + by.get((method, NAME["reduce"]), 0.0)
        shrink.append((step["b1"] / step["t1"]) / (forward["b1"] / forward["t3"]))
        gain.append(step["t1"] / step["t3"])
    return table.assign(predicted_shrink=shrink, predicted_gain=gain)


def by_part(parts: pd.DataFrame) -> dict[tuple[str, str], float]:
    """(method, part) -> ms, of the rows of one case of `pieces`."""
    return dict(zip(zip(parts["method"], parts["part"], strict=True), parts["ms"], strict=True))


def pieces(frame: pd.DataFrame) -> pd.DataFrame:
    """Where the time goes, a row a (case, `work`, method, `part`): `ms`, and of dW `detail`, its strategy. Of a forward
    (phase 1): the product, and BEYOND = forward - product. Of a step (phase 3): its pieces as each was measured alone,
    and OVER = their sum - the step: above 0 by overlap or higher clocks, below by gaps, or what no piece holds.
    """
    forward = build.medians(rows_of(frame, "forward"), {NAME["compute"]: "compute_kernel", BEYOND: "forward_kernel"})
    forward = forward.dropna(subset=[NAME["compute"], BEYOND])
    forward[BEYOND] = (forward[BEYOND] - forward[NAME["compute"]]).clip(lower=0)
    last = rows_of(frame, "step")
    step = build.medians(last, {name: f"{stem}_kernel" for name, stem in PIECES.items()} | {OVER: "step_kernel"})
    step[OVER] = step[list(PIECES)].sum(axis=1, min_count=1) - step[OVER]
    about, found = [*AXES.case_columns, "size", "method"], []
    for work, table in (("forward", forward), ("step", step)):
        found.append(table.melt(about, var_name="part", value_name="ms").dropna(subset="ms").assign(work=work))
    dw = frames.samples(last, "dw_kernel").drop_duplicates(KEYS)[[*KEYS, "detail"]]
    table = build.stacked(found).merge(dw.assign(part=NAME["dw"], work="step"), on=[*KEYS, "part", "work"], how="left")
    return table.fillna({"detail": ""})[[*AXES.case_columns, "size", "work", "method", "part", "ms", "detail"]]


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


def _by_group(frame: pd.DataFrame, *wanted: tuple[str, str]) -> dict[str, pd.DataFrame]:
    """Case -> a column a (metric, method), by its place: medians of the (run, group) that have all of them, ms."""
    medians = []
    for metric, method in wanted:
        rows = frames.samples(frame, metric)
        of_groups = rows[rows["method"].eq(method)].groupby(["case", "run", "group"], sort=False)
        medians.append(of_groups["value"].median())
    table = pd.concat(medians, axis=1, join="inner", keys=range(len(wanted)))
    return {case: part.droplevel("case") for case, part in table.groupby(level="case", sort=False)}


def _intervals(groups: dict[str, pd.DataFrame], ratio: Callable[[pd.DataFrame], pd.Series]) -> list[Interval]:
    """By which verdicts are said: of `ratio` of the columns of each case."""
    logs = [np.log(ratio(part)) for part in groups.values()]
    return [both.mean for both in intervals([by_run(one.index, one.to_numpy(float)) for one in logs])]


def training_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Six ratios in "x" with 99% intervals (`_low`, `_high`), a row a case that holds all their times: speeds over B1
    of Block-Shock's `forward`, of T1's step (`recompress`) and T3's (`packed`); `shrink` = recompress / forward,
    `keep` = packed / forward, `gain` = packed / recompress, each from the same fresh `groups` of processes of `runs`.
    """
    forward, step = frames.time_metric(frame, "forward_kernel"), frames.time_metric(frame, "step_kernel")
    b1, t3, t1, b1_forward, ours = range(5)
    groups = _by_group(frame, (step, B1), (step, OURS), (step, T1), (forward, B1), (forward, OURS))
    ratios = {
        "forward": lambda t: t[b1_forward] / t[ours],
        "recompress": lambda t: t[b1] / t[t1],
        "packed": lambda t: t[b1] / t[t3],
        "shrink": lambda t: t[b1] / t[t1] / (t[b1_forward] / t[ours]),
        "keep": lambda t: t[b1] / t[t3] / (t[b1_forward] / t[ours]),
        "gain": lambda t: t[t1] / t[t3],
    }
    columns = [_intervals(groups, ratios[name]) for name in _RATIOS]
    found = {}
    for (case, part), *row in zip(groups.items(), *columns, strict=True):
        found[case] = dict(zip(_ENDS, (value for one in row for value in one), strict=True))
        found[case] |= {"groups": len(part), "runs": part.index.get_level_values("run").nunique()}
        found[case] |= {"forward_metric": forward, "step_metric": step}
    return build.by_case(frame, found, [*_ENDS, "groups", "runs", "forward_metric", "step_metric"])


def ratios_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`training_ratios` in words, a row a case, smallest first, and the speed of T3 over the stock T1."""
    table = training_ratios(frame)
    found = {words: [interval(row, name) for row in table.to_dict("records")] for name, words in _RATIOS.items()}
    stock = build.speeds(frame, STOCK, [OURS], frames.time_metric(frame, "step_kernel")).set_index("case")["speed"]
    return _about(table).assign(**found, **{"T3 over stock T1": [stock.get(case, ABSENT) for case in table["case"]]})


def gap_table(frame: pd.DataFrame) -> pd.DataFrame:
    """How much longer T1's step takes than T3's, and in which pieces: medians in ms, the largest case of each
    optimizer; "rest" is what the pieces leave. "s1/f without" is s1/f had T1's step taken neither re-mask nor compress.
    """
    table = build.largest(training_ratios(frame)).reset_index(drop=True)
    if table.empty:
        return pd.DataFrame()
    step, forward = frames.time_metric(frame, "step_kernel"), frames.time_metric(frame, "forward_kernel")
    names = [step, *_RECOMPRESSION, *_OTHERS.values()]
    wanted = [(step, B1), (step, T1), (forward, B1), (forward, OURS), *((name, T1) for name in _RECOMPRESSION)]
    groups = _by_group(frame[frame["case"].isin(table["case"])], *wanted)
    without = _intervals(groups, lambda t: t[0] / (t[1] - t[4] - t[5]) / (t[2] / t[3]))
    left = {case: interval(one._asdict()) for case, one in zip(groups, without, strict=True)}
    found = []
    for case in table["case"]:
        rows = frame[frame["case"].eq(case)]
        medians = build.medians(rows, {name: name for name in names}).set_index("method")[names].fillna(0.0)
        less = medians.loc[T1] - medians.loc[OURS]
        row = {"T1 - T3 (ms)": less[step], "re-mask + compress": less[_RECOMPRESSION].sum()}
        row |= {words: less[name] for words, name in _OTHERS.items()} | {"rest": less[step] - less.drop(step).sum()}
        found.append(row | {"s1/f without": left.get(case, "not measured")})
    return rounded(_about(table).join(pd.DataFrame(found)))


def _about(table: pd.DataFrame) -> pd.DataFrame:
    optimizers = table["optimizer"].map(optimizer_name)
    return pd.DataFrame({"optimizer": optimizers, "shape": table["shape"], "B": table["batch"]})


def break_even_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Whether t(compress) + t(2:4 product), both of T1, is less than t(dense product), of C, a row a case; "pays after"
    how many products, each a forward or a dX, that one compression of both packed copies must serve.
    """
    times = {"dense product (ms)": ("compute_kernel", C), "2:4 product (ms)": ("compute_kernel", T1)}
    times["compress (ms)"] = ("compress_kernel", T1)
    groups, found = _by_group(frame, *times.values()), {}
    for case, ratio in zip(groups, _intervals(groups, lambda t: t[0] / (t[1] + t[2])), strict=True):
        dense, sparse, compress = middle = np.exp(np.log(groups[case]).groupby("run").mean().mean()).tolist()
        row = dict(zip(times, rounded(pd.Series(middle)), strict=True))
        row |= ratio._asdict() | {"dense / (both)": interval(ratio._asdict())}
        row["pays after (products)"] = f"{math.ceil(compress / (dense - sparse))}" if sparse < dense else "never"
        found[case] = row
    if not found:
        return pd.DataFrame()
    table = build.by_case(frame, found).assign(method=T1)
    pays = np.select([table["low"] > 1, table["high"] < 1], ["yes", "no"], "undecided")
    table["pays within one"] = np.where(frames.kind(table).eq("gpu"), pays, "no claim")
    columns = [*times, "dense / (both)", "pays within one", "pays after (products)"]
    return build.shown(table, table[columns], method=False)
