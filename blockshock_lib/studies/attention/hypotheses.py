"""What the attention study claims of one GPU. Its rules were written before any time of a GPU was there; that the
fastest dense kernel counts, and that cells with intervals refute A1, no fitted d*, came after the first run; that of a
cell in two cases, tuned and not, that of more groups counts, after a run had one of them once more.
"""

import numpy as np
import pandas as pd

from blockshock_lib.report import frames
from blockshock_lib.report.verdicts import FASTER, REFUTED, SLOWER, SUPPORTED, UNDECIDED, Verdict
from blockshock_lib.studies.attention import law
from blockshock_lib.studies.attention.axes import AXES
from blockshock_lib.studies.attention.law import DOWN_TO
from blockshock_lib.studies.attention.report import even_text, span_text

LENGTHS, DENSITIES = (4096, 16384, 65536), ("1", "0.75", "0.5", "0.25", "0.1", "0.05")
HEADLINE = {"k_len": LENGTHS, "pattern": tuple(f"blocks {density}" for density in DENSITIES)}
HEADLINE |= {"shape": ("16 heads of 128",), "block": (128,), "dtype": ("bf16",)}
"""The 18 headline cells: from three whole runs or more; all others may be from one, and say so."""
KEPT = 0.9  # A2: at a density of DOWN_TO at least so much of a proportional speed-up

_OVER = "99% intervals over whole runs, of a single run over its fresh groups of processes; headline cells"
_RULE_A1 = (
    "d*: the density at which slope x density + overhead, fitted to a kernel's forward time over random blocks, is the "
    f"time of the fastest dense kernel that ran ({_OVER}: {len(LENGTHS)} lengths of {len(DENSITIES)} densities). Of "
    "each length the kernel counts whose d* has the largest lower end, at 99% for all kernels together. A length "
    "agrees if that kernel is faster in every cell below the interval of d*, in one at least, and faster in none above "
    "it; it disagrees if every kernel is slower in all its cells, or that one is slower in a cell and faster in one of "
    "more density. Supported if all lengths agree, refuted if one disagrees, undecided otherwise, and on a CPU or "
    "where one GPU plays all ranks."
)
_RULE_A2 = (
    f"share = t(1) d / t(d) of the forward at d = {DOWN_TO:g}, t by the law that is fitted for A1: (slope + overhead) "
    f"/ (slope + overhead / d), of each length's kernel of A1 ({_OVER}). Supported if the interval lies above {KEPT:g} "
    "at every length, refuted if below at every length, undecided otherwise, and on a CPU or where one GPU plays all "
    "ranks."
)
_NOTHING = "no headline length holds valid times of two densities and of the best dense kernel"


def headline(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the headline cells; of a cell that was measured tuned and not, those of more groups."""
    frame = frames.complete(frame, AXES)
    frame = frame[np.logical_and.reduce([frame[name].isin(values) for name, values in HEADLINE.items()])]
    groups = frame.drop_duplicates(["case", "run", "group"])
    first = groups.drop_duplicates("case").set_index("case").assign(groups=groups["case"].value_counts())
    first = first.sort_values("groups", ascending=False, kind="stable")
    kept = first.drop_duplicates([*HEADLINE, "batch", "world_size", "device", "emulated"])
    return frame[frame["case"].isin(kept.index)]


def a1(frame: pd.DataFrame) -> Verdict:
    """`cells`: those of `verdicts.ratio` of each length's kernel, with `density`, `below`, `above`."""
    claim = "A1: block-sparse attention beats the best dense kernel exactly below a density d*."
    rows = headline(frame)
    densities, states, words, parts, ran = law.densities(rows), [], [], [], {}
    for row, cells in law.judged(rows):
        even, density = row["law"].even, cells["case"].map(densities).astype(float)
        below, above = density.lt(even.low), density.gt(even.high)
        faster, slower = cells["outcome"].eq(FASTER), cells["outcome"].eq(SLOWER)
        against = row["nowhere"] or density[slower].min() < density[faster].max()
        agrees = below.any() and faster[below].all() and not faster[above].any()
        states.append(REFUTED if against else SUPPORTED if agrees else UNDECIDED)
        words.append(f"{even_text(row['law'])} at {row['k_len']} keys ({row['by']})")
        parts.append(cells.assign(density=density, below=below, above=above))
        ran[row["dense kernels"]] = None
    if not parts:
        return Verdict(claim, _RULE_A1, np.nan, np.nan, np.nan, UNDECIDED, _NOTHING, pd.DataFrame())
    table, why = pd.concat(parts), f"d* = {', '.join(words)}; dense kernels that ran: {'; '.join(ran)}"
    agreed = set(states) == {SUPPORTED} and table["k_len"].nunique() == len(LENGTHS)
    verdict = REFUTED if REFUTED in states else SUPPORTED if agreed else UNDECIDED
    if no_claim := frames.no_claim(rows):
        verdict, why = UNDECIDED, no_claim
    return Verdict(claim, _RULE_A1, *even, verdict, why, table, rows["run"].nunique())


def a2(frame: pd.DataFrame) -> Verdict:
    """`ratio`, `low` and `high`: the share at the largest length; `cells`: those of each length."""
    claim = f"A2: the time of block-sparse attention is proportional to density down to {DOWN_TO:.0%}."
    rows = headline(frame)
    table = law.fastest(law.laws(rows))
    if table.empty:
        return Verdict(claim, _RULE_A2, np.nan, np.nan, np.nan, UNDECIDED, _NOTHING, table)
    kept = [one.kept for one in table.pop("law")]
    table[["ratio", "low", "high"]] = kept
    why = ", ".join(f"{span_text(each)} at {k} keys" for each, k in zip(kept, table["k_len"], strict=True))
    above, below = table["low"].gt(KEPT).all(), table["high"].lt(KEPT).all()
    verdict = SUPPORTED if above else REFUTED if below else UNDECIDED
    if (no_claim := frames.no_claim(table)) or table["k_len"].nunique() < len(LENGTHS):
        verdict, why = UNDECIDED, no_claim or why
    return Verdict(claim, _RULE_A2, *kept[-1], verdict, f"share = {why}", table, rows["run"].nunique())
