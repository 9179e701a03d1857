"""What the gallery claims of speed; each rule was written before any time of a GPU was there. Figures of the seed: the
slides "GPU Sparsity" of 21 March 2024.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.verdicts import FASTER, REFUTED, SLOWER, SUPPORTED, UNDECIDED, Verdict, interval_text
from blockshock_lib.studies.gallery import report
from blockshock_lib.studies.gallery.axes import AXES, TOKENS
from blockshock_lib.studies.gallery.methods import METHODS

SQUARE, WIDE, DEEP = (8192, 8192), (28672, 8192), (8192, 28672)
MLP1, MLP2 = (4096, 1024), (1024, 4096)
SPARSITIES = (0.5, 0.9, 0.99, 0.999)
UNSTRUCTURED = [(SQUARE, batch, sparsity) for batch in (16, 256, 4096) for sparsity in SPARSITIES]
DECODE = [(weight, batch, 0.5) for weight in (SQUARE, WIDE, DEEP) for batch in (1, 16)]
SEED = {(MLP1, 256, 0.9): 2.20, (MLP2, 256, 0.9): 1.63}
"""The 20 headline cells in bf16, (weight, batch, sparsity): from three whole runs or more; others may be from one."""
_LLAMA_8B = {"n": 4096, "k": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "vocab": 128256}
LLAMA_8B = _LLAMA_8B | {"context": 1024, "dtype": "bf16"}
BATCHES = (1, 4, 16)  # of P4
BLOCK, LEAST, BEST, LEAST_TOKENS = 64, 1.5, 3.4, 1.4

_OVER = (
    "speed = median t(best searched dense product) / median t({of}), kernel time of a forward in bf16, 99% intervals "
    "over whole runs, of a single run over its fresh groups of processes"
)
_ELSE = "Undecided otherwise, where a cell is missing, and always on a CPU."
_RULE_P1 = (
    f"{_OVER.format(of='the fastest unstructured kernel of a cell')}; cells: 8192x8192, B of 16, 256 and 4096, "
    "sparsities of .5, .9, .99 and .999. Supported if no batch has a slower cell at a larger sparsity than a faster "
    "one, each has a slower one, and one has a faster one; refuted if a batch has a slower cell above a faster one, or "
    f"all its cells are decided and none is slower. {_ELSE}"
)
_RULE_P2A = (
    f"{_OVER.format(of='BSR tuned here')}; cells: blocks of 64 at a sparsity of .9, 256 rows, 4096x1024 (2.20 in the "
    "seed) and 1024x4096 (1.63). Supported if both intervals lie at or above the seed's figure; refuted if one lies "
    f"below it. {_ELSE}"
)
_RULE_P2B = (
    f"{_OVER.format(of='the fastest kernel of blocks')}; cells: all measured ones of blocks at a sparsity of .9, the "
    f"seed's 'about {BEST}x at 90%'. Supported if the interval of the fastest cell lies at or above {BEST}; refuted if "
    f"it lies below. {_ELSE}"
)
_RULE_P3 = (
    f"{_OVER.format(of='the 2:4 product that Block-Shock chooses')}; cells: 8192x8192, 28672x8192 and 8192x28672, B of "
    f"1 and 16. Supported if every interval lies at or above {LEAST}; refuted if one lies below it. {_ELSE}"
)
_TOKENS = (
    "speed = median t({over}) / median t({under}), "
    "kernel time of a token of each sequence, attention and the head included and the same in both, in bf16, 99% "
    "intervals over whole runs, of a single run over its fresh groups of processes; cells: Llama-3-8B's shape after "
    f"1024 tokens, B of 1, 4 and 16. Supported if every interval lies at or above {LEAST_TOKENS}; refuted if one lies "
    f"below it; not applicable where only other models were measured. {_ELSE}"
)
_RULE_P4 = _TOKENS.format(
    over="dense model of the best searched products", under="the model that sparsify_ makes of it"
)
_RULE_P4B = _TOKENS.format(
    over="the fastest of four dense models, compiled and not, with PyTorch's products and the best searched ones",
    under="the compiled model that sparsify_ makes of it",
)


def p1(frame: pd.DataFrame) -> Verdict:
    """`ratio` to `high`: the speed at the largest sparsity of the last batch."""
    claim = "P1: unstructured sparsity pays only above a sparsity s*."
    table = _cells(frame, ("coo", "csr", "ust"), UNSTRUCTURED)
    table = report.fastest(table, "batch", "sparsity") if len(table) else table
    states, words = [], []
    for batch, part in table.groupby("batch", sort=True):
        slower, faster = report.even(part)
        ordered = not slower > faster  # with a NaN, true
        good = ordered and not np.isnan(slower)
        known = len(part) == len(SPARSITIES) and part["outcome"].isin([FASTER, SLOWER]).all()
        states.append(SUPPORTED if good else REFUTED if not ordered or known else UNDECIDED)
        words.append(f"B={batch}: {_between(slower, faster)}")
    whole = len(table) == len(UNSTRUCTURED)
    holds = all(state == SUPPORTED for state in states) and table["outcome"].eq(FASTER).any() if len(table) else False
    state = REFUTED if REFUTED in states else SUPPORTED if holds and whole else UNDECIDED
    row = table.iloc[-1] if len(table) else None
    return verdict(claim, _RULE_P1, table, row, state, "; ".join(words))


def p2a(frame: pd.DataFrame) -> Verdict:
    claim = "P2a: BSR tuned here reaches the seed's 2.20x and 1.63x on the MLP of ViT-L."
    return _reaches(claim, _RULE_P2A, _cells(frame, ("bsr",), list(SEED)), SEED)


def p2b(frame: pd.DataFrame) -> Verdict:
    claim = f"P2b: blocks reach about {BEST}x at a sparsity of .9 at best."
    blocks = [name for name, method in METHODS.items() if method.pattern == "blocks"]
    table = report.speeds(frames.complete(frame, AXES), methods=blocks)
    table = table[table["sparsity"].eq(0.9) & table["dtype"].eq("bf16")]
    if table.empty:
        return verdict(claim, _RULE_P2B, table, None, UNDECIDED, "")
    row = table.loc[table["ratio"].idxmax()]
    state = SUPPORTED if row["low"] >= BEST else REFUTED if row["high"] < BEST else UNDECIDED
    return verdict(claim, _RULE_P2B, table, row, state, f"{interval_text(row)} at {AXES.case(row)}")


def p3(frame: pd.DataFrame) -> Verdict:
    claim = f"P3: 2:4 decode is at least {LEAST}x as fast as the best dense product for B <= 16."
    return _reaches(claim, _RULE_P3, _cells(frame, ("two_four",), DECODE), dict.fromkeys(DECODE, LEAST))


def p4(frame: pd.DataFrame) -> Verdict:
    claim = f"P4: end to end a 2:4 model decodes at least {LEAST_TOKENS}x as many tokens a second as the dense one."
    return _tokens(frame, claim, _RULE_P4, ("decode_searched",), "decode_24")


def p4b(frame: pd.DataFrame) -> Verdict:
    claim = f"P4b: so does a compiled one, at least {LEAST_TOKENS}x as many as the fastest dense one, compiled or not."
    return _tokens(frame, claim, _RULE_P4B, report.DECODE_DENSE, TOKENS.under)


def _tokens(frame: pd.DataFrame, claim: str, rule: str, rivals: Sequence[str], under: str) -> Verdict:
    table = report.beside(frame, rivals, under)
    table, asked = table.assign(cell=table["batch"]), dict.fromkeys(BATCHES, LEAST_TOKENS)
    right = table[list(LLAMA_8B)].eq(pd.Series(LLAMA_8B)).all(axis=1)
    if len(table) and not right.any():
        why = f"measured: {AXES.case(table.iloc[-1])}; judged on Llama-3-8B's shape in bf16"
        return Verdict(claim, rule, *[np.nan] * 3, verdicts.NOT_APPLICABLE, why, table)
    return _reaches(claim, rule, table[right & table["cell"].isin(asked)], asked)


def _cells(frame: pd.DataFrame, methods: Sequence[str], cells: Sequence[tuple]) -> pd.DataFrame:
    """The rows of `report.speeds` of these methods at these cells, by `cell`."""
    table = report.speeds(frames.complete(frame, AXES), methods=methods)
    table = table[table["dtype"].eq("bf16") & table["block"].isin([0, BLOCK])]
    keys = zip(zip(table["n"], table["k"], strict=True), table["batch"], table["sparsity"], strict=True)
    table = table.assign(cell=list(keys))
    asked = np.array([cell in cells for cell in table["cell"]], dtype=bool)
    return table[asked].sort_values(["batch", "sparsity"], kind="stable")


def _reaches(claim: str, rule: str, table: pd.DataFrame, least: dict) -> Verdict:
    """Whether the interval of every cell lies at or above what is asked; the one that is furthest below is shown."""
    if table.empty:
        return verdict(claim, rule, table, None, UNDECIDED, "")
    asked = table["cell"].map(least).astype(float)
    below, above = (table["high"] < asked).any(), (table["low"] >= asked).all()
    state = REFUTED if below else SUPPORTED if above and set(table["cell"]) == set(least) else UNDECIDED
    words = [
        f"{interval_text(row)} at {row['weight']}, B={row['batch']} ({more:g} asked)"
        for row, more in zip(table.to_dict("records"), asked, strict=True)
    ]
    lacking = len(least) - table["cell"].nunique()
    words += [f"{lacking} of the {len(least)} cells asked for were not measured"] * bool(lacking)
    return verdict(claim, rule, table, table.loc[(table["low"] / asked).idxmin()], state, "; ".join(words))


def verdict(
    claim: str, rule: str, table: pd.DataFrame, row: pd.Series | None, state: str, why: str, calls: bool = False
) -> Verdict:
    """The row's; without one, on a CPU and, unless `calls` may judge, of call time undecided."""
    if row is None:
        nothing = "no cell holds valid times beside the best dense product"
        return Verdict(claim, rule, np.nan, np.nan, np.nan, UNDECIDED, nothing, table)
    if no_claim := frames.no_claim(table):
        state, why = UNDECIDED, no_claim
    elif not calls and not table["metric"].str.endswith("_kernel").all():
        state, why = UNDECIDED, "only call time was measured, and the rule asks for kernel time"
    further = {name: row[name] for name in ("runs", "next_low", "next_high")}
    return Verdict(claim, rule, row["ratio"], row["low"], row["high"], state, why, table, **further)


def _between(slower: float, faster: float) -> str:
    if np.isnan(faster):
        return f"slower up to {slower:g}" if not np.isnan(slower) else "neither slower nor faster"
    return f"s* between {slower:g} and {faster:g}" if not np.isnan(slower) else f"faster from {faster:g}"
