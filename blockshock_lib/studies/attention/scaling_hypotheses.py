"""What is claimed of several GPUs: A3, each claim of the seeds (A4) and A5; rules written before any time of a GPU, but
for A3's choice among strategies that are equally fast within their intervals.
"""

from collections.abc import Callable
from operator import truediv
from typing import NamedTuple

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.interval import LEVEL
from blockshock_lib.report.tables import GIB
from blockshock_lib.report.verdicts import FASTER, NOT_APPLICABLE, REFUTED, SLOWER, SUPPORTED, UNDECIDED, Verdict
from blockshock_lib.studies.attention.axes import AXES
from blockshock_lib.studies.attention.methods import METHODS
from blockshock_lib.studies.attention.report import against, speed, told

HEADLINE = {"pattern": "causal", "shape": "16 heads of 128", "block": 128, "dtype": "bf16"}
RANKS, SHARE = (2, 4), 0.9  # A3: of so many GPUs at least so much of a proportional speed-up
CLAIMED = {"pattern": "blocks 0.05", "shape": "8 heads of 64", "dtype": "bf16"}  # A4 and A5: 95% sparse, as there
NEAR = 0.8, 1.25  # of a stated number
HOOKS = tuple(name for name, method in METHODS.items() if method.hook)
MODELS = ("model", "dp", "ddp", "model_ring")
# Of each strategy: the method on one rank that has its kernel.
ONE = {name: "dense_fa4" if method.dense else "alone" for name, method in METHODS.items() if method.strategy}

_OVER = "99% intervals over whole runs, of a single run over its fresh groups of processes"
_ELSE = "undecided otherwise; not applicable on a CPU or where one GPU plays all ranks"
_RULE_A3 = (
    f"Speed-up of a step by the fastest strategy over one GPU with the same kernel ({_OVER}; causal, batch 1, "
    f"{HEADLINE['shape']}, blocks of {HEADLINE['block']}, bf16); of those not slower, by the interval, that with the "
    "largest lower end, at 99% for all strategies together. L* of p GPUs: from this length on the interval lies above "
    f"{SHARE} p at each one. Supported if 2 and 4 GPUs have an L*, refuted if at the longest of 2 or of 4 the "
    f"intervals of all those lie below; {_ELSE}."
)
_STATED = (
    f"Measured over stated ({_OVER}; memory: least and most, of one a point). Supported if the interval lies within "
    f"{NEAR[0]} and {NEAR[1]}, refuted if it lies wholly outside, {_ELSE}. 2 GPUs, {CLAIMED['shape']}, 5% of the "
    "blocks, bf16"
)
_BEST = (
    f"Of one GPU, DataParallel, DDP and ring the named one has the fastest step at each length in the range ({_OVER}). "
    f"Supported if it is faster than each other in all cells, none missing, refuted if slower in a cell, {_ELSE}. "
    f"{CLAIMED['shape']}, 5% of the blocks, bf16."
)
_RULE_A5 = (
    f"A step under DDP with a hook over one without ({_OVER}; cells of A4). Supported if one hook is faster in every "
    f"cell, refuted if every hook is slower in one cell at least and faster in none, {_ELSE}."
)
NONE = "no record of these cells"


def real(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of real GPUs, where there are any."""
    gpu = frames.kind(frame).eq("gpu") if len(frame) else []
    return frame[gpu] if any(gpu) else frame


def where(frame: pd.DataFrame, **values: object) -> pd.DataFrame:
    """The rows with these values; a tuple: one of them."""
    frame = frames.complete(frame, AXES)
    for name, value in values.items():
        frame = frame[frame[name].isin(value if isinstance(value, tuple) else (value,))]
    return frame


def over_one(frame: pd.DataFrame) -> pd.DataFrame:
    """The speed of each strategy's step over the same kernel's on one rank, with intervals for all of them together."""
    level = 1 - (1 - LEVEL) / max(1, len(set(ONE) & set(frame["method"])))  # Bonferroni, for one of them is chosen
    rows = [against(frame, over, own, level=level) for over, own in pd.Series(ONE).groupby(ONE).groups.items()]
    return pd.concat(rows, ignore_index=True)


def best(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each case, the shortest sequence first, the row of the strategy with the fastest step: of those not slower, by
    the interval, the one with the largest `low`; `most`: their largest `high`. In kernel time where all have it.
    """
    every = frames.medians(where(frame, method=(*ONE, *ONE.values())), AXES, kernel="step_kernel", call="step_call")
    call = every.loc[every["kernel"].isna(), "case"]
    frame = frame[~(frame["metric"].eq("step_kernel") & frame["case"].isin(call))]
    every["ms"] = every["kernel"].mask(every["case"].isin(call), every["call"])
    table = over_one(frame).merge(every[["case", "method", "ms"]], "left").sort_values("ms", kind="stable")
    first = table.drop_duplicates("case").set_index("case")["method"]
    near = [not said.endswith(SLOWER) for said in told(frame, table, first, "step")]
    table = table[np.array(near, bool)].sort_values("low", ascending=False, kind="stable")
    table["most"] = table.groupby("case")["high"].transform("max")
    return table.drop_duplicates("case").sort_values(["world_size", "k_len"])


def a3(frame: pd.DataFrame) -> Verdict:
    claim = f"A3: p GPUs give at least {SHARE} p from a length L* on."
    table = best(where(frame := real(frame), **HEADLINE, batch=1))
    states, words = [], []
    for ranks, part in table[table["world_size"].isin(RANKS)].groupby("world_size"):
        enough = part["low"].ge(SHARE * ranks).to_numpy()
        last = part.iloc[-1]
        longest = np.append(np.flatnonzero(~enough), -1).max() + 1  # the first of those from which on all are enough
        states.append(SUPPORTED if enough[-1] else REFUTED if last["most"] < SHARE * ranks else UNDECIDED)
        words.append(
            f"{ranks} GPUs {verdicts.interval_text(last)} at {last['k_len']} keys ({AXES.short(last['method'])}), L* "
            + (f"= {part['k_len'].iloc[longest]}" if enough[-1] else "not reached")
        )
    verdict = REFUTED if REFUTED in states else UNDECIDED
    verdict = SUPPORTED if states == [SUPPORTED] * len(RANKS) else verdict
    return _verdict(frame, claim, _RULE_A3, verdict, "; ".join(words), table)


def a5(frame: pd.DataFrame) -> Verdict:
    claim = "A5: gradient compression pays on this link."
    table = against(where(frame := real(frame), **CLAIMED), "ddp", HOOKS).sort_values(["world_size", "k_len"])
    each = [part["outcome"] for _, part in table.groupby("method")] if len(table) else []
    won = any(one.eq(FASTER).all() for one in each)
    lost = each and all(one.eq(SLOWER).any() and not one.eq(FASTER).any() for one in each)
    verdict = SUPPORTED if won else REFUTED if lost else UNDECIDED
    words = [f"{AXES.short(row['method'])} {verdicts.interval_text(row)}" for row in table.tail(3).to_dict("records")]
    return _verdict(frame, claim, _RULE_A5, verdict, ", ".join(words) + " of DDP's speed", table)


class Stated(NamedTuple):
    name: str
    words: str
    value: float
    measured: Callable[[pd.DataFrame], pd.DataFrame]  # records -> a row with ratio, low and high, and k_len


def stated(frame: pd.DataFrame, name: str) -> Verdict:
    """The verdict on one claim of the seeds; `ratio`: what was measured over what is stated."""
    one = CLAIMS[name]
    table = one.measured(frame := real(frame)).tail(1)
    claim, rule = f"{name}: the claim that {one.words}", f"{_STATED}. Stated: {one.value:g}."
    verdict, why = UNDECIDED, ""
    if len(table):
        row = table.iloc[0]
        ends = row["low"] / one.value, row["high"] / one.value
        inside, outside = ends[0] >= NEAR[0] and ends[1] <= NEAR[1], ends[1] < NEAR[0] or ends[0] > NEAR[1]
        verdict = SUPPORTED if inside else REFUTED if outside else UNDECIDED
        span = f"[{row['low']:.3g}, {row['high']:.3g}]" if row["groups"] > 1 else "(a point, of one group)"
        why = f"{row['ratio']:.3g} {span} at {row['k_len']:.0f} keys, stated {one.value:g}"
        table = table.assign(**{name: table[name] / one.value for name in ("ratio", "low", "high")})
    return _verdict(frame, claim, rule, verdict, why, table)


def advised(frame: pd.DataFrame, name: str) -> Verdict:
    """The verdict on "use it above so many keys": up to the next one's range."""
    method, above, upto = ADVICE[name]
    span = f"above {above // 1024}K" + (f" and up to {upto // 1024}K" if upto < 1 << 24 else "")
    rows = where(frame := real(frame), **CLAIMED)
    rows = rows[rows["k_len"].gt(above) & rows["k_len"].le(upto)]
    found = {other: speed(rows, other, method) for other in MODELS if other != method}
    table = pd.concat([one.assign(method=other) for other, one in found.items()], ignore_index=True)
    lacks = [AXES.label(other) for other, one in found.items() if len(one) < rows["case"].nunique()]
    won = not lacks and len(table) and table["outcome"].eq(FASTER).all()
    verdict = SUPPORTED if won else REFUTED if table["outcome"].eq(SLOWER).any() else UNDECIDED
    table = table.sort_values("ratio", ascending=False)
    worst = table.tail(1).to_dict("records")
    why = [f"{verdicts.interval_text(r)} of {AXES.label(r['method'])}'s speed at {r['k_len']} keys" for r in worst]
    why = "; ".join([*why, *[f"in some cell no times beside {', '.join(lacks)}"] * bool(lacks)])
    return _verdict(frame, f"{name}: the advice to use {AXES.short(method)} {span}.", _BEST, verdict, why, table)


def _verdict(frame: pd.DataFrame, claim: str, rule: str, verdict: str, why: str, table: pd.DataFrame) -> Verdict:
    if no_claim := frames.no_claim(frames.complete(frame)):
        verdict, why = NOT_APPLICABLE, no_claim
    elif table.empty:
        verdict, why = UNDECIDED, NONE
    last = dict.fromkeys(("ratio", "low", "high"), np.nan) if table.empty else table.iloc[-1]
    return Verdict(claim, rule, last["ratio"], last["low"], last["high"], verdict, why, table, frame["run"].nunique())


def _speed(over: str, under: str, length: int) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda frame: speed(where(frame, **CLAIMED, world_size=2, k_len=length), over, under)


def _peaks(over: str, under: str, make: Callable, *lengths: int) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """make(peak of `over`, peak of `under`), each "method rank 0", at the lengths that both have."""

    def measured(frame: pd.DataFrame) -> pd.DataFrame:
        rows = where(frames.valid(where(frame, **CLAIMED, world_size=2)), metric="rank_peak_bytes")
        rows = rows[rows["k_len"].isin(lengths or rows["k_len"])].assign(who=rows["method"] + " " + rows["detail"])
        wide = rows.pivot_table(index=["k_len", "run", "group"], columns="who", values="value")
        if not {over, under} <= set(wide):
            return pd.DataFrame()
        found = make(wide[over], wide[under]).dropna().groupby("k_len").agg(["median", "min", "max", "size"])
        return found.set_axis(["ratio", "low", "high", "groups"], axis=1).reset_index()

    return measured


def _pruned(frame: pd.DataFrame) -> pd.DataFrame:
    """Of 128 positions the same kernel's forward with all blocks over that with a window of 32."""
    rows = where(frame, k_len=128, method="alone", pattern=("full", "quarter"))
    sparse, whole = (rows["pattern"].eq(name) for name in ("quarter", "full"))
    if not (sparse.any() and whole.any()):
        return pd.DataFrame()
    moved = rows[whole].assign(case=rows.loc[sparse, "case"].iloc[0], method="whole", pattern="quarter")
    return speed(pd.concat([rows[sparse], moved]), "whole", "alone", "forward")


def _saved(whole: pd.Series, share: pd.Series) -> pd.Series:
    return (whole - share) / GIB


_DP = "dp rank 0", "dp rank 1"
_CLAIMS = (
    Stated("A4a", "at 4K DataParallel has 0.22x of one GPU's speed.", 0.22, _speed("model", "dp", 4096)),
    Stated("A4b", "at 8K DataParallel has 0.15x of one GPU's speed.", 0.15, _speed("model", "dp", 8192)),
    Stated("A4c", "at 16K DataParallel has 2.21x of one GPU's speed.", 2.21, _speed("model", "dp", 16384)),
    Stated("A4d", "of DataParallel GPU 0 holds 144.2 MB, GPU 1 8.1 MB.", 144.2 / 8.1, _peaks(*_DP, truediv, 16384)),
    Stated("A4e", "95% sparse on 2 GPUs takes 40x less memory.", 40, _peaks("dense rank 0", "ring rank 0", truediv)),
    Stated("A4f", "pruned blocks take 0.13 ms for 0.23 ms at N=128.", 0.23 / 0.13, _pruned),
    Stated("A4g", "at 8K 2 GPUs take 74 ms for 146 ms.", 146 / 74, _speed("model", "model_ring", 8192)),
    Stated("A4h", "at 32K a ring of 2 saves 1 GB a GPU.", 1, _peaks("alone rank 0", "ring rank 0", _saved, 32768)),
    Stated("A4i", "at 64K a ring of 2 saves 4 GB a GPU.", 4, _peaks("alone rank 0", "ring rank 0", _saved, 65536)),
    Stated("A4j", "at 128K a ring of 2 saves 16 GB a GPU.", 16, _peaks("alone rank 0", "ring rank 0", _saved, 131072)),
    Stated("A4k", "a ring holds n/p on each GPU.", 1, _peaks("alone rank 0", "ring rank 0", lambda a, b: 2 * b / a)),
)
CLAIMS = {one.name: one for one in _CLAIMS}
K = 1024
ADVICE = {"A4l": ("dp", 16 * K, 32 * K), "A4m": ("ddp", 32 * K, 100 * K), "A4n": ("model_ring", 100 * K, 1 << 24)}
