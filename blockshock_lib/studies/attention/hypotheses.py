"""What the attention study claims of one GPU. Its rules were written before any time of a GPU was there; that a length
without intervals refutes nothing, and that the fastest dense kernel counts, came after the first run.
"""

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.verdicts import FASTER, REFUTED, SLOWER, SUPPORTED, UNDECIDED, Verdict
from blockshock_lib.studies.attention import law
from blockshock_lib.studies.attention.axes import AXES
from blockshock_lib.studies.attention.law import DOWN_TO
from blockshock_lib.studies.attention.report import even_text

LENGTHS, DENSITIES = (4096, 16384, 65536), ("1", "0.75", "0.5", "0.25", "0.1", "0.05")
HEADLINE = {"k_len": LENGTHS, "pattern": tuple(f"blocks {density}" for density in DENSITIES)}
HEADLINE |= {"shape": ("16 heads of 128",), "block": (128,), "dtype": ("bf16",)}
"""The 18 headline cells: from three whole runs or more; all others may be from one, and say so."""
KEPT = 0.9  # A2: at a density of DOWN_TO at least so much of a proportional speed-up

_OVER = "99% intervals over whole runs, of a single run over its fresh groups of processes; headline cells"
_RULE_A1 = (
    "d*: the density at which slope x density + overhead, fitted to a kernel's forward time over random blocks, is the "
    f"time of the fastest dense kernel ({_OVER}: {len(LENGTHS)} lengths of {len(DENSITIES)} densities). Of each length "
    "the kernel with the largest d* counts. A length agrees if the kernel is faster in every cell below the interval "
    "of d*, in one at least, and faster in none above it; it disagrees if the kernel is slower in a cell below, faster "
    "in one above, or faster in none at all and all have an interval. Supported if all lengths agree, refuted if one "
    "disagrees, undecided otherwise, and always on a CPU or where one GPU plays all ranks."
)
_RULE_A2 = (
    f"share = t(1) d / t(d) of the forward at d = {DOWN_TO:g}, t by the law that is fitted for A1: (slope + overhead) "
    f"/ (slope + overhead / d), of each length's kernel with the largest d* ({_OVER}). Supported if the interval lies "
    f"above {KEPT:g} at every length, refuted if it lies below at every length, undecided otherwise, and always on a "
    "CPU or where one GPU plays all ranks."
)
_NOTHING = "no headline length holds valid times of two densities and of the best dense kernel"


def headline(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the headline cells."""
    frame = frames.complete(frame, AXES)
    return frame[np.logical_and.reduce([frame[name].isin(values) for name, values in HEADLINE.items()])]


def a1(frame: pd.DataFrame) -> Verdict:
    """`cells`: those of `verdicts.ratio` of each length's kernel, with `density`, `below`, `above`."""
    claim = "A1: block-sparse attention beats the best dense kernel exactly below a density d*."
    rows = headline(frame)
    table = law.fastest(law.laws(rows))
    if table.empty:
        return Verdict(claim, _RULE_A1, np.nan, np.nan, np.nan, UNDECIDED, _NOTHING, table)
    states, words, parts = [], [], []
    for row in table.to_dict("records"):
        even = row["law"].even
        part = rows[rows["k_len"].eq(row["k_len"])]
        cells = verdicts.ratio(part, AXES, row["rival"], row["method"], frames.time_metric(part, "forward_kernel"))
        cells["density"] = cells["case"].map(law.densities(part)).astype(float)
        faster, slower = cells["outcome"].eq(FASTER), cells["outcome"].eq(SLOWER)
        cells["below"], cells["above"] = cells["density"].lt(even.low), cells["density"].gt(even.high)
        weighed = cells["low"].gt(0) & np.isfinite(cells["high"])  # one group of one run has no interval
        none = weighed.all() and not faster.any()
        against = none or (cells["below"] & slower).any() or (cells["above"] & faster).any()
        agrees = faster[cells["below"]].all() and cells["below"].any()
        states.append(REFUTED if against else SUPPORTED if agrees else UNDECIDED)
        words.append(f"{even_text(even)} at {row['k_len']} keys ({AXES.short(row['method'])})")
        parts.append(cells)
    why = f"d* = {', '.join(words)}"
    if no_claim := frames.no_claim(table):
        verdict, why = UNDECIDED, no_claim
    elif REFUTED in states:
        verdict = REFUTED
    else:
        verdict = SUPPORTED if set(states) == {SUPPORTED} and len(states) == len(LENGTHS) else UNDECIDED
    ends = table["law"].iloc[-1].even
    return Verdict(claim, _RULE_A1, *ends, verdict, why, pd.concat(parts), rows["run"].nunique())


def a2(frame: pd.DataFrame) -> Verdict:
    """`ratio`, `low` and `high`: the share at the largest length; `cells`: those of each length."""
    claim = f"A2: the time of block-sparse attention is proportional to density down to {DOWN_TO:.0%}."
    rows = headline(frame)
    table = law.fastest(law.laws(rows))
    if table.empty:
        return Verdict(claim, _RULE_A2, np.nan, np.nan, np.nan, UNDECIDED, _NOTHING, table)
    kept = [one.kept for one in table.pop("law")]
    table[["ratio", "low", "high"]] = kept
    why = ", ".join(f"{even_text(each)} at {k} keys" for each, k in zip(kept, table["k_len"], strict=True))
    if no_claim := frames.no_claim(table):
        verdict, why = UNDECIDED, no_claim
    elif len(table) < len(LENGTHS):
        verdict = UNDECIDED
    else:
        above, below = table["low"].gt(KEPT).all(), table["high"].lt(KEPT).all()
        verdict = SUPPORTED if above else REFUTED if below else UNDECIDED
    return Verdict(claim, _RULE_A2, *kept[-1], verdict, f"share = {why}", table, rows["run"].nunique())
