"""Tables of attention over ranks, of models and of the hybrid block, from their records."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.axes import CEILING
from blockshock_lib.report.tables import ABSENT, GIB, rounded, shown, smallest_first
from blockshock_lib.studies.attention.axes import AXES
from blockshock_lib.studies.attention.methods import METHODS
from blockshock_lib.studies.attention.report import fastest_dense, told
from blockshock_lib.studies.attention.scaling_hypotheses import HEADLINE, ONE, best, where

_CASE = ["k_len", "pattern", "world_size"]
PARTS = ("a share of one rank's time", "pieces", "merges", "imbalance", "exposed communication")
_HOOKED = tuple(name for name, method in METHODS.items() if method.dealt == "batch")
_MODELS = tuple(name for name, method in METHODS.items() if method.layer == "model")


def speeds(frame: pd.DataFrame) -> pd.DataFrame:
    """What several ranks add, a row a (case, strategy): ms in a CUDA graph and as called; the speed of a forward and of
    a step over one rank with the same kernel, which is named, and over the fastest dense kernel on one, kernel time
    where both have it; 99% intervals.
    """
    rows = frames.complete(frame, AXES)
    kernels = rows[rows["metric"].eq("kernel")].drop_duplicates("case").set_index("case")["detail"]
    return _against(frame, tuple(ONE), {"one rank": ONE, "best dense": fastest_dense}, kernel=kernels)


def models(frame: pd.DataFrame) -> pd.DataFrame:
    """The same of a model on all ranks over one that has the whole batch, call time. Waiting: what a call of
    DataParallel pays beside it here, for the other ranks to stand by.
    """
    return _against(frame, _MODELS[1:], {"one rank": "model"})


def _against(
    frame: pd.DataFrame, methods: tuple[str, ...], overs: dict[str, str | dict | Callable], **of_case: pd.Series
) -> pd.DataFrame:
    """`overs`: words -> a method, or what finds one for each case; `of_case`: further columns, of each case."""
    clocks = {"kernel": " (ms)", "call": ", called (ms)"}
    names = {f"{work}{unit}": f"{work}_{clock}" for work in ("forward", "step") for clock, unit in clocks.items()}
    names |= {"waiting (ms)": "wait_call"}
    table = frames.medians(where(frame, method=methods), AXES, **names)
    if table.empty:
        return pd.DataFrame({"speed-up": ["none was measured"]})
    columns = [name for name in names if table[name].notna().any()]
    for name, known in of_case.items():
        columns.append(name)
        own = [METHODS[name].dense for name in table["method"]]  # by a kernel that is named with the method
        table[name] = table["case"].map(known).astype(object).fillna(ABSENT).mask(own, ABSENT)
    for work in ("forward", "step"):
        for words, over in overs.items():
            columns.append(f"{work}, over {words}")
            table[columns[-1]] = told(frame, table, over(frame, work) if callable(over) else over, work)
    return rounded(shown(smallest_first(table, AXES), AXES, [*_CASE, "method", *columns]))


def parts(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a (case, strategy): PARTS of a step in ms, which add up to it, from five measurements: one rank's step over
    the ranks; a rank's step with the communication left out, the mean rank and the slowest; the merges alone; the step.
    `moved`: what travels alone; `balance` and `sent`: as recorded.
    """
    metrics = dict(step="step_call", own="own_call", merging="merged_call", moved="moved_call", balance="balance")
    table = frames.medians(frame, AXES, sent="sent_bytes", **metrics)
    alone = table.set_index(["case", "method"])["step"].to_dict()
    table = table[table["method"].isin(ONE)].dropna(subset=["own", "step"])
    alone = [alone.get(key, np.nan) for key in zip(table["case"], table["method"].map(ONE), strict=True)]
    share = np.array(alone, float) / table["world_size"].astype(float)  # of no rows it is of no type
    merges = table["merging"].fillna(0.0)
    mean = table["own"] * table["balance"]
    made = (share, mean - merges - share, merges, table["own"] - mean, table["step"] - table["own"])
    return table.assign(**dict(zip(PARTS, made, strict=True)))


def waterfall(frame: pd.DataFrame) -> pd.DataFrame:
    """`parts` for a reader; below 0: faster than the piece it is compared with, or within the spread. "keys are": read
    from the peers' memory, or sent.
    """
    table = parts(frame)
    if table.empty:
        return pd.DataFrame({"parts": ["none was measured"]})
    moved = {"communication alone (ms)": table["moved"], "mean / slowest rank": table["balance"].round(3)}
    rows = frame[frame["metric"].eq("sent_bytes")].drop_duplicates(["case", "method"]).set_index(["case", "method"])
    ways = rows["detail"].str.partition(":")[0]
    moved["keys are"] = [ways.get(key, ABSENT) for key in zip(table["case"], table["method"], strict=True)]
    moved |= {"sent (MiB)": table["sent"] / 2**20, "a step": table["step"]}
    table = smallest_first(table.assign(**moved), AXES)
    table = shown(table, AXES, [*_CASE, "method", "a step", *PARTS, *moved][:-1])
    return rounded(table.rename(columns={name: f"{name} (ms)" for name in ("a step", *PARTS)}))


def memory(frame: pd.DataFrame) -> pd.DataFrame:
    """Peak of a step by rank, and the longest sequence that a GPU of this size trains with that much a position."""
    rows = frames.valid(frames.complete(frame, AXES))
    rows = rows[rows["metric"].isin(["rank_peak_bytes", "memory_bytes"])]
    rows = rows.assign(name=rows["metric"].mask(rows["metric"].eq("rank_peak_bytes"), rows["detail"]))
    ranks = sorted(name for name in set(rows["name"]) if name.startswith("rank "))
    if not ranks:
        return pd.DataFrame({"memory": ["no peak was measured: the CPU's allocator keeps none"]})
    wide = rows.pivot_table(index=["case", "method"], columns="name", values="value", aggfunc="max")
    wide = wide.reindex(columns=[*ranks, "memory_bytes"])
    made = {f"{name} (GiB)": (wide[name] / GIB).round(3) for name in ranks}
    about = rows.drop_duplicates(["case", "method"])[[*AXES.case_columns, "method"]]
    table = about.merge(wide.assign(most=wide[ranks].max(axis=1), **made).reset_index(), on=["case", "method"])
    longest = table["k_len"].astype(float) * table["memory_bytes"] / table["most"]
    table["longest (keys)"] = [f"{length / 1024:,.0f}K" if length > 0 else ABSENT for length in longest]
    return rounded(shown(smallest_first(table, AXES), AXES, [*_CASE, "method", *made, "longest (keys)"]))


def gradients(frame: pd.DataFrame) -> pd.DataFrame:
    """What hooks do to DDP's gradients, a row a (case, hook): a step, its speed over plain DDP, the hook without other
    ranks, what a rank sends, how far the result is from the mean gradient, and the bandwidth of a link at which what is
    saved on it takes as long as the compression: below that it pays. `link`: of an all-reduce, as measured.
    """
    metrics = {"step (ms)": "step_call", "hook (ms)": "compress_call"}
    table = frames.medians(frame, AXES, **metrics, sent="sent_bytes", error="gradient_error")
    table = table[table["method"].isin(_HOOKED)].dropna(subset="hook (ms)")
    if table.empty:
        return pd.DataFrame({"hooks": ["none was measured"]})
    plain = table[table["method"].eq("ddp")].set_index("case")
    saved = table["case"].map(plain["sent"]) - table["sent"]
    longer = table["hook (ms)"] - table["case"].map(plain["hook (ms)"])
    table["breaks even (GB/s)"] = (saved / longer / 1e6).where(saved.gt(0) & longer.gt(0))
    links = frames.valid(frame)
    links = links[links["method"].eq(CEILING) & links["metric"].eq("allreduce_bandwidth")]
    table["link (GB/s)"] = table["world_size"].map(links.groupby("world_size")["value"].median())
    table["over DDP"] = told(frame, table, "ddp", "step")
    table["sent (MiB)"], table["error of the gradient"] = table["sent"] / 2**20, table["error"]
    columns = ["step (ms)", "over DDP", "hook (ms)", "sent (MiB)", "error of the gradient", "breaks even (GB/s)"]
    return rounded(shown(smallest_first(table, AXES), AXES, [*_CASE, "method", *columns, "link (GB/s)"]))


def block(frame: pd.DataFrame) -> pd.DataFrame:
    """Where a forward of the hybrid block goes, ms and shares of it, each piece measured alone: attention with its
    projections, the MLP, both sums over ranks, and the rest: norms, residuals and what pieces lose or gain apart.
    """
    names = ("attention", "mlp", "reduce")
    table = frames.medians(frame, AXES, forward="forward_call", step="step_call", **{n: f"{n}_call" for n in names})
    table = table.dropna(subset="attention")
    if table.empty:
        return pd.DataFrame({"block": ["none was measured"]})
    table["rest"] = table["forward"] - table[list(names)].sum(axis=1)
    words = {"attention": "attention", "mlp": "MLP", "reduce": "all-reduces", "rest": "rest"}
    made = {"forward (ms)": table["forward"], "a step (ms)": table["step"]}
    made |= {f"{word} (ms)": table[name] for name, word in words.items()}
    made |= {f"{word} (%)": (100 * table[name] / table["forward"]).round(1) for name, word in words.items()}
    steps = table[table["method"].eq("block")].set_index("case")["step"]
    made["speed-up of a step (x)"] = table["case"].map(steps) / table["step"]
    return rounded(shown(smallest_first(table.assign(**made), AXES), AXES, [*_CASE, "method", *made]))


def furthest(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The records of A3's cells, where there are none all; and of the largest length there the row of `best` by ranks,
    of several `cases` the one that gains least; `beside`: over the fastest dense kernel on one rank, and the outcome.
    """
    table = best(headline := where(frame, **HEADLINE, batch=1))
    frame, table = (headline, table) if len(table) else (frame, best(frame))
    table = table[table["k_len"].eq(table["k_len"].max())].sort_values("ratio", kind="stable")
    table = table.assign(cases=table["world_size"].map(table["world_size"].value_counts()))
    table, dense = table.drop_duplicates("world_size").sort_values("world_size"), fastest_dense(frame, "step")
    table["alike"] = table["method"].map(ONE).eq(table["case"].map(dense))  # then the same kernel is the rival
    beside = zip(table.to_dict("records"), told(frame, table, dense, "step"), strict=True)
    own = lambda row, text: f"{verdicts.interval_text(row)} {text.rpartition(' ')[2]}"  # noqa: E731
    return frame, table.assign(beside=[own(row, text) if row["alike"] else text for row, text in beside])


def answer(frame: pd.DataFrame, rival: bool = True) -> str:
    """The answer of the phase in a sentence: the fastest strategy of `furthest`; beside it, with `rival`, over the
    fastest dense kernel on one.
    """
    frame, table = furthest(frame)
    if table.empty:
        return "Not answered: no case holds valid times of a strategy and of the same kernel on one rank."
    if why := frames.no_claim(table):
        return f"Not answered here ({why})."
    called = told(frame[frame["metric"].ne("step_kernel")], table, fastest_dense(frame, "step"), "step")
    ran = frames.medians(where(frame, method=tuple(ONE)), AXES, ms="step_call").groupby("world_size")["method"].agg(set)
    each = []
    for row, call in zip(table.to_dict("records"), called, strict=True):
        ranks, about = row["world_size"], [AXES.short(row["method"]), row["pattern"]]
        about += [f"the least of {row['cases']} cases"] * bool(row["cases"] > 1)
        about += [f"{AXES.short(name)} not run" for name in AXES.ordered(set().union(*ran) - ran[ranks])]
        what = f"on {ranks} GPUs ({', '.join(about)})"
        own, (ratio, _, outcome) = verdicts.interval_text(row), row["beside"].rpartition(" ")
        said = [f"{own} as fast as on one with the same kernel"] * (not rival or not row["alike"])
        over = f"{ratio} as fast as the fastest dense kernel on one ({outcome}; as called {call})"
        each.append(f"{what} is {', '.join(said + [over] * (rival and row['beside'] != ABSENT))}")
    return f"At {table['k_len'].iloc[0]} keys a step {', '.join(each)}."
