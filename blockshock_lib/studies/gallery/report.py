"""Tables of the gallery, from its records, and what its figures draw."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.interval import LEVEL
from blockshock_lib.report.tables import ABSENT, rounded, shown, smallest_first, speed_table
from blockshock_lib.report.verdicts import FASTER, NO_CLAIM, SLOWER, UNDECIDED
from blockshock_lib.studies.gallery.axes import AXES, TOKENS
from blockshock_lib.studies.gallery.methods import METHODS

DENSE = (AXES.over, "dense")
DECODE_DENSE = ("decode_dense", "decode_searched", "decode_compiled", TOKENS.over)
SPARSE = [name for name, method in METHODS.items() if method.pattern != "dense"]
_ENDS = ["ratio", "low", "high", "next_low", "next_high", "runs", "groups"]


def ratios(
    frame: pd.DataFrame, rivals: Sequence[str], methods: Sequence[str], metric: str, level: float = LEVEL
) -> pd.DataFrame:
    """`verdicts.ratio` of each method over the fastest of its rivals, `rival`, a row a (case, method) in which all of
    them have times. The ends of the interval are the smallest over the rivals: FASTER is faster than each of them, and
    SLOWER slower than one.
    """
    frame = frames.complete(frame, AXES)
    pairs = [(over, name) for name in methods if name in set(frame["method"]) for over in rivals]
    found = [verdicts.ratio(frame, AXES, *pair, metric, level).assign(rival=pair[0], method=pair[1]) for pair in pairs]
    none = verdicts.ratio(frame.iloc[:0], AXES, "", "").assign(rival="", method="")
    table = pd.concat([one for one in found if len(one)] or [none], ignore_index=True)
    cells = table.groupby(["case", "method"], sort=False)
    ends, whole = cells[_ENDS].transform("min"), cells["case"].transform("size").eq(len(rivals))
    table = table.assign(**ends)[whole & table["ratio"].eq(ends["ratio"])].drop_duplicates(["case", "method"])
    judged = [table["outcome"].eq(NO_CLAIM), table["low"].gt(1), table["high"].lt(1)]
    return frames.by_size(table.assign(outcome=np.select(judged, [NO_CLAIM, FASTER, SLOWER], UNDECIDED)), AXES)


def timed(frame: pd.DataFrame, rivals: Sequence[str], metric: str) -> Sequence[str]:
    """Those of them that have valid times; all where none has."""
    have = set(frames.samples(frame, metric)["method"])
    return [name for name in rivals if name in have] or rivals


def speeds(frame: pd.DataFrame, methods: Sequence[str] = SPARSE, rivals: Sequence[str] = ()) -> pd.DataFrame:
    """`ratios` of a forward of the sparse methods over the faster dense product, by default of those with times."""
    metric = frames.time_metric(frame, "forward_kernel")
    return ratios(frame, rivals or timed(frame, DENSE, metric), methods, metric)


def fastest(table: pd.DataFrame, *keys: str) -> pd.DataFrame:
    """Of `ratios` the row that judges each group of `keys`, by default each weight, batch and sparsity: of the methods
    that are FASTER that with the largest lower end, else that with the largest upper end, so that SLOWER says all are.
    """
    keys = list(keys or ("weight", "batch", "sparsity"))
    table = table.assign(sure=table["low"].gt(1), end=table["high"].mask(table["low"].gt(1), table["low"]))
    table = table.sort_values([*keys, "sure", "end", "ratio"], kind="stable").drop_duplicates(keys, keep="last")
    return table.drop(columns=["sure", "end"])


def even(table: pd.DataFrame) -> tuple[float, float]:
    """(largest sparsity at which it is slower, smallest at which it is faster) of a series; NaN where there is none."""
    slower, quicker = (table.loc[table["outcome"].eq(word), "sparsity"] for word in (SLOWER, FASTER))
    return slower.max(), quicker.min()


def crossing(table: pd.DataFrame) -> float:
    """The sparsity at which a series' speed is that of the dense product, on straight lines between log speeds over the
    log of what is kept; NaN where it does not cross, or does so twice.
    """
    table = table.sort_values("sparsity")
    kept, speed = np.log(1 - table["sparsity"].to_numpy(float)), np.log(table["ratio"].to_numpy(float))
    at = np.flatnonzero((speed[:-1] < 0) != (speed[1:] < 0))
    if len(at) != 1:
        return float("nan")
    i = int(at[0])
    return float(1 - np.exp(kept[i] - speed[i] * (kept[i + 1] - kept[i]) / (speed[i + 1] - speed[i])))


def break_even(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a series, one method over sparsities: from which sparsity on it beats the best dense product."""
    table = speeds(frame)
    rows = []
    for (method, weight, batch, block), part in table.groupby(["method", "weight", "batch", "block"], sort=True):
        if len(part) > 1:
            slower, quicker = even(part)
            about = {"method": method, "weight": weight, "batch": batch, "block": block}
            found = {"slower up to": slower, "faster from": quicker, "crossing": crossing(part)}
            rows.append(about | found | {"fastest": part["ratio"].max()})
    if not rows:
        return pd.DataFrame({"break-even": ["no method has times at two sparsities of one weight and batch"]})
    table = rounded(shown(pd.DataFrame(rows), AXES, rows[0]), 4)
    return table.astype(object).where(table.notna(), ABSENT)


def tokens(frame: pd.DataFrame) -> pd.DataFrame:
    """`speed_table` of a token with tokens a second of all sequences, and the share that goes on as the dense model."""
    table = speed_table(frame, TOKENS, TOKENS.stem)
    table.insert(table.columns.get_loc("kernel (ms)"), "tokens/s", rounded(1e3 * table["B"] / table["kernel (ms)"]))
    same = smallest_first(frames.medians(frame, TOKENS, same="greedy"), TOKENS)
    return table.merge(shown(same, TOKENS, ["weight", "context", "batch", "method", "same"]), how="left")


def decoded(frame: pd.DataFrame) -> str:
    """The tokens a second of the 2:4 model over those of the fastest dense one, by batch; of the eager 2:4 model where
    the compiled one has no times.
    """
    metric = f"{TOKENS.stem}_kernel"
    rivals, (under, *_) = timed(frame, DECODE_DENSE, metric), timed(frame, (TOKENS.under, "decode_24"), metric)
    table = ratios(frame, rivals, [under], metric)
    if table.empty or (why := frames.no_claim(table)):
        return f"Not answered{': no case holds valid times of 2:4 and of dense' if table.empty else f' here ({why})'}."
    said = []
    for (weight, context), part in table.sort_values("batch").groupby(["weight", "context"], sort=True):
        at = ((one, " undecided" * (one["outcome"] == UNDECIDED), one["batch"]) for one in part.to_dict("records"))
        each = ", ".join(f"{verdicts.interval_text(one)}{open_} at B={batch}" for one, open_, batch in at)
        said.append(f"{each} ({weight}, {context} tokens before)")
    points = "No claim, for an interval is missing; by the points " * bool(table["high"].eq(np.inf).any())
    about = "; ".join([*said, *beaten(frame, table, DECODE_DENSE)])
    return f"{points}{TOKENS.short(under)} makes of the fastest dense model's tokens a second {about}."


def counts(names: pd.Series) -> str:
    """ "2:4 in 6, BSR in 1": in how many rows each method stands."""
    return ", ".join(f"{AXES.short(name)} in {count}" for name, count in names.value_counts().items())


def beaten(frame: pd.DataFrame, table: pd.DataFrame, asked: Sequence[str]) -> list[str]:
    """Which dense rival is the fastest in `ratios`, which of those asked for have no times, how many cases it lacks."""
    cases, rivals = table.drop_duplicates("case"), timed(frame, asked, table["metric"].iloc[0])
    left = frame.loc[frame["metric"].eq("check"), "case"].nunique() - len(cases)
    lacks = [f"without {AXES.short(name)}, which has no times" for name in asked if name not in rivals]
    lacks += [f"{left} case{'s' * (left > 1)} left out, for one has no valid time there"] * (left > 0)
    return [f"fastest dense: {counts(cases['rival'])}", *lacks]


def memory(frame: pd.DataFrame) -> pd.DataFrame:
    """Bytes of a packed weight by formula and as held, a row a (weight, mask, method), over those of the dense one."""
    table = frames.medians(frame, AXES, held="packed_bytes", formula="packed_bytes_formula")
    if table.empty:
        return pd.DataFrame({"packed weight": ["none was weighed"]})
    dense = table[table["method"].eq(AXES.over)].set_index("case")["held"]
    over = (table["held"] / table["case"].map(dense)).astype(float).round(4)
    table = table.assign(**{"held (B)": table["held"], "formula (B)": table["formula"], "over dense": over})
    cell = ["pattern", "weight", "sparsity", "block", "method"]
    table = smallest_first(table, AXES).drop_duplicates(cell)  # whatever the batch
    return shown(table, AXES, [*cell, "held (B)", "formula (B)", "over dense"])


def tuned(frame: pd.DataFrame) -> pd.DataFrame:
    """What the search for a setting is worth: BSR tuned here over BSR as PyTorch ships it, a row a case."""
    table = verdicts.ratio(frame, AXES, "bsr_shipped", "bsr", frames.time_metric(frame, "forward_kernel"))
    if table.empty:
        return pd.DataFrame({"tuned over shipped": ["no case holds valid times of both"]})
    table["tuned over shipped"] = [verdicts.interval_text(row) for row in table.to_dict("records")]
    cell = ["pattern", "weight", "batch", "sparsity", "block", "method"]
    return shown(table.assign(method="bsr"), AXES, [*cell, "tuned over shipped", "outcome"])


def answer(frame: pd.DataFrame) -> str:
    """The answer in a sentence: where some pattern is faster than each dense product, and which; what is undecided."""
    table = speeds(frame)
    if table.empty:
        return "Not answered: no case holds valid times of a pattern and of the best dense product."
    if why := frames.no_claim(table):
        return f"Not answered here ({why})."
    every = fastest(table)
    won, left = every[every["outcome"].eq(FASTER)], every["outcome"].eq(UNDECIDED).sum()
    of = f"of {len(every)} weights, batches and sparsities"
    said = f"No pattern {'is surely faster than' if left else 'beats'} the best dense product at any {of}"
    if table["groups"].lt(2).all():
        said = f"No claim for any {of}: points without an interval, of one group of processes"
    elif len(won):
        by = " to ".join(dict.fromkeys(f"{end:.2f}" for end in (won["ratio"].min(), won["ratio"].max())))
        said = f"In {len(won)} {of} some pattern beats the best dense product, by {by}x; fastest: {counts(won.method)}"
    said += f"; undecided in {left} of {len(every)}" * bool(left)
    return "; ".join([said, *beaten(frame, table, DENSE)]) + "."
