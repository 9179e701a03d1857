"""Tables of the gallery, from its records, and what its figures draw."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.answer import counted
from blockshock_lib.report.interval import LEVEL
from blockshock_lib.report.tables import ABSENT, markdown, rounded, shown, smallest_first, speed_table
from blockshock_lib.report.verdicts import FASTER, SLOWER
from blockshock_lib.studies.gallery.axes import AXES, TOKENS
from blockshock_lib.studies.gallery.methods import METHODS

DENSE = AXES.over
DECODE_DENSE = ("decode_dense", "decode_searched", "decode_compiled", TOKENS.over)
SPARSE = [name for name, method in METHODS.items() if method.pattern != "dense"]


def ratios(frame: pd.DataFrame, over: str, methods: Sequence[str], metric: str, level: float = LEVEL) -> pd.DataFrame:
    """`verdicts.ratio` of each of these methods over one, a row a (case, method)."""
    frame = frames.complete(frame, AXES)
    methods = [name for name in methods if name in set(frame["method"].unique())] or methods[:1]
    found = [verdicts.ratio(frame, AXES, over, name, metric, level).assign(method=name) for name in methods]
    return pd.concat([table for table in found if len(table)] or found[:1], ignore_index=True)


def speeds(frame: pd.DataFrame, work: str = "forward", methods: Sequence[str] = SPARSE) -> pd.DataFrame:
    """`ratios` of the sparse methods over the best dense product."""
    return ratios(frame, DENSE, methods, frames.time_metric(frame, f"{work}_kernel"))


def fastest(table: pd.DataFrame, *keys: str) -> pd.DataFrame:
    """Of `speeds` the fastest method of each group of `keys`, by default of each weight, batch and sparsity."""
    return table.loc[table.groupby(list(keys or ("weight", "batch", "sparsity")), sort=True)["ratio"].idxmax()]


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


def beside(frame: pd.DataFrame, rivals: Sequence[str], under: str) -> pd.DataFrame:
    """`verdicts.ratio` of `under` over the fastest of its rivals, of the cases in which all of them have times."""
    frame = frames.complete(frame, AXES)
    table = pd.concat([verdicts.ratio(frame, TOKENS, over, under) for over in rivals], ignore_index=True)
    table = table[table.groupby("case")["case"].transform("size").eq(len(rivals))]
    return table.loc[table.groupby("case", sort=False)["ratio"].idxmin()]


def decoded(frame: pd.DataFrame) -> str:
    """The answer of decoding: of the compiled 2:4 model, where none has times of the eager one."""
    timed = frames.samples(frame, frames.time_metric(frame, f"{TOKENS.stem}_kernel"))["method"].unique()
    measured = [name for name in DECODE_DENSE if name in timed] or DECODE_DENSE
    under = next((name for name in (TOKENS.under, "decode_24") if name in timed), TOKENS.under)
    return counted(beside(frame, measured, under), "the fastest dense model")


def memory(frame: pd.DataFrame) -> pd.DataFrame:
    """Bytes of a packed weight by formula and as held, a row a (weight, mask, method), over those of the dense one."""
    table = frames.medians(frame, AXES, held="packed_bytes", formula="packed_bytes_formula")
    if table.empty:
        return pd.DataFrame({"packed weight": ["none was weighed"]})
    dense = table[table["method"].eq(DENSE)].set_index("case")["held"]
    over = (table["held"] / table["case"].map(dense)).astype(float).round(4)
    table = table.assign(**{"held (B)": table["held"], "formula (B)": table["formula"], "over dense": over})
    cell = ["pattern", "weight", "sparsity", "block", "method"]
    table = smallest_first(table, AXES).drop_duplicates(cell)  # whatever the batch
    return shown(table, AXES, [*cell, "held (B)", "formula (B)", "over dense"])


def tuned(frame: pd.DataFrame) -> pd.DataFrame:
    """What the search for a setting is worth: BSR tuned here over BSR as PyTorch ships it, a row a case."""
    metric = frames.time_metric(frame, "forward_kernel")
    table = verdicts.ratio(frame, AXES, "bsr_shipped", "bsr", metric)
    if table.empty:
        return pd.DataFrame({"tuned over shipped": ["no case holds valid times of both"]})
    table["tuned over shipped"] = [verdicts.interval_text(row) for row in table.to_dict("records")]
    cell = ["pattern", "weight", "batch", "sparsity", "block", "method"]
    return shown(table.assign(method="bsr"), AXES, [*cell, "tuned over shipped", "outcome"])


def answer(frame: pd.DataFrame) -> str:
    """The answer in a sentence: where some pattern is faster than the best dense product, and which."""
    table = speeds(frame)
    if table.empty:
        return "Not answered: no case holds valid times of a pattern and of the best dense product."
    if why := frames.no_claim(table):
        return f"Not answered here ({why})."
    every = fastest(table)
    wins = every[every["outcome"].eq(FASTER)]
    if wins.empty:
        return f"No pattern beats the best dense product at any of {len(every)} weights, batches and sparsities."
    names = ", ".join(f"{AXES.short(name)} in {count}" for name, count in wins["method"].value_counts().items())
    low, high = wins["ratio"].min(), wins["ratio"].max()
    return (
        f"In {len(wins)} of {len(every)} weights, batches and sparsities some pattern beats the best dense product, by "
        f"{low:.2f} to {high:.2f}x; fastest: {names}."
    )


def page(frame: pd.DataFrame) -> str:
    """The page of results behind its title; what was not measured says so."""
    from blockshock_lib.studies.gallery import STUDY  # its tables by name, as notebooks take them

    own, lines = frame[frame["phase"].eq("gallery_speed")], []
    for _, one, lacks in verdicts.judged(frame, STUDY.hypotheses):
        lines.append(f"- **{one.hypothesis.rstrip('.')}: {one.verdict}.** {(lacks or one.why).rstrip('.')}.")
    for name in ("break-even", "times", "packed weight"):
        lines += ["", f"## {name.capitalize()}", "", *markdown(STUDY.tables[name](own))]
    return "\n".join(["## The answer", "", answer(own), "", *lines])
