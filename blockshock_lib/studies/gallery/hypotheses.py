"""What the gallery claims of speed; each rule was written before any time of a GPU was there. Before P1 and P2 were
measured came F.linear as a rival, how undecided cells count and P2b's level. Figures: "GPU Sparsity", 21 March 2024.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.interval import LEVEL
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
NOTHING = "no cell holds valid times beside all dense rivals"

_OVER = (
    "speed = median t(the faster dense product, searched or F.linear) / median t({of}), kernel time of a forward in "
    "bf16, 99% intervals over whole runs, of a single run over its fresh groups of processes"
)
_ELSE = "Undecided otherwise, where a cell is missing, and always on a CPU."
_RULE_P1 = (
    f"{_OVER.format(of='the fastest unstructured kernel of a cell')}; cells: 8192x8192, B of 16, 256 and 4096, "
    "sparsities of .5, .9, .99 and .999; faster: by a kernel's interval, slower: by all of them. Supported if by "
    "sparsity each batch has slower cells, at least one, then any undecided, then any faster ones, and one batch has a "
    "faster one; refuted if a batch has a slower cell above a faster one, or all its cells are decided and none is "
    f"slower. {_ELSE}"
)
_RULE_P2A = (
    f"{_OVER.format(of='BSR tuned here')}; cells: blocks of 64 at a sparsity of .9, 256 rows, 4096x1024 (2.20 in the "
    "seed) and 1024x4096 (1.63). Supported if both intervals lie at or above the seed's figure; refuted if one lies "
    f"below it. {_ELSE}"
)
_RULE_P2B = (
    f"{_OVER.format(of='a kernel of blocks')}, at 99% for all kernels and cells together; cells: all measured ones of "
    f"blocks at a sparsity of .9, the seed's 'about {BEST}x at 90%'. Supported if one interval is at or above {BEST}; "
    f"refuted if all lie below. {_ELSE}"
)
_RULE_P3 = (
    f"{_OVER.format(of='the 2:4 product that Block-Shock chooses')}; cells: 8192x8192, 28672x8192 and 8192x28672, B of "
    f"1 and 16. Supported if every interval lies at or above {LEAST}; refuted if one lies below it. {_ELSE}"
)
_TOKENS = (
    "speed = median t({over}) / median t({under}), kernel time of a token of each sequence, attention and the head "
    "included and the same in both, in bf16, 99% intervals over whole runs, of a single run over its fresh groups of "
    f"processes; cells: Llama-3-8B's shape after 1024 tokens, B of 1, 4 and 16. Supported if every interval lies at or "
    f"above {LEAST_TOKENS}; refuted if one lies below it; not applicable where only other models were measured. {_ELSE}"
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
    table, nothing = _cells(frame, ("coo", "csr", "ust"), UNSTRUCTURED)
    table, states, words = report.fastest(table, "batch", "sparsity"), [], []
    for batch, part in table.groupby("batch", sort=True):
        slower, faster = report.even(part)
        order = part["outcome"].map({SLOWER: 0, UNDECIDED: 1, FASTER: 2}).tolist()
        good = order == sorted(order) and order[0] == 0
        known = len(part) == len(SPARSITIES) and 1 not in order
        states.append(SUPPORTED if good else REFUTED if slower > faster or (known and order[0]) else UNDECIDED)
        words.append(f"B={batch}: {_between(slower, faster)}" + f", {order.count(1)} undecided" * (1 in order))
    holds = set(states) == {SUPPORTED} and table["outcome"].eq(FASTER).any() and len(table) == len(UNSTRUCTURED)
    state = REFUTED if REFUTED in states else SUPPORTED if holds else UNDECIDED
    row = table.iloc[-1] if len(table) else None
    return verdict(claim, _RULE_P1, table, row, state, "; ".join(words) or nothing)


def p2a(frame: pd.DataFrame) -> Verdict:
    claim = "P2a: BSR tuned here reaches the seed's 2.20x and 1.63x on the MLP of ViT-L."
    return _reaches(claim, _RULE_P2A, *_cells(frame, ("bsr",), list(SEED)), SEED)


def p2b(frame: pd.DataFrame) -> Verdict:
    claim = f"P2b: blocks reach about {BEST}x at a sparsity of .9 at best."
    blocks = [name for name, method in METHODS.items() if method.pattern == "blocks"]
    return somewhere(claim, _RULE_P2B, *_cells(frame, blocks), BEST)


def p3(frame: pd.DataFrame) -> Verdict:
    claim = f"P3: 2:4 decode is at least {LEAST}x as fast as the best dense product for B <= 16."
    return _reaches(claim, _RULE_P3, *_cells(frame, ("two_four",), DECODE), dict.fromkeys(DECODE, LEAST))


def p4(frame: pd.DataFrame) -> Verdict:
    claim = f"P4: end to end a 2:4 model decodes at least {LEAST_TOKENS}x as many tokens a second as the dense one."
    return _tokens(frame, claim, _RULE_P4, ("decode_searched",), "decode_24")


def p4b(frame: pd.DataFrame) -> Verdict:
    claim = f"P4b: so does a compiled one, at least {LEAST_TOKENS}x as many as the fastest dense one, compiled or not."
    return _tokens(frame, claim, _RULE_P4B, report.DECODE_DENSE, TOKENS.under)


def _tokens(frame: pd.DataFrame, claim: str, rule: str, rivals: Sequence[str], under: str) -> Verdict:
    table = report.ratios(frame, rivals, [under], "token_kernel")
    table, asked = table.assign(cell=table["batch"]), dict.fromkeys(BATCHES, LEAST_TOKENS)
    right = table[list(LLAMA_8B)].eq(pd.Series(LLAMA_8B)).all(axis=1)
    if len(table) and not right.any():
        why = f"measured: {AXES.case(table.iloc[-1])}; judged on Llama-3-8B's shape in bf16"
        return Verdict(claim, rule, *[np.nan] * 3, verdicts.NOT_APPLICABLE, why, table)
    return _reaches(claim, rule, table[right & table["cell"].isin(asked)], NOTHING, asked)


def _cells(frame: pd.DataFrame, methods: Sequence[str], cells: Sequence[tuple] = ()) -> tuple[pd.DataFrame, str]:
    """The rows of `report.ratios` over both dense products at these cells, by `cell`, without `cells` at all of a
    sparsity of .9, at 99% for all together; and why there may be none.
    """

    def chosen(rows: pd.DataFrame) -> pd.DataFrame:
        rows = rows.assign(cell=[((row.n, row.k), row.batch, row.sparsity) for row in rows.itertuples()])
        right = rows["cell"].isin(cells) & rows["block"].isin([0, BLOCK]) if cells else rows["sparsity"].eq(0.9)
        return rows[right & rows["dtype"].eq("bf16")].sort_values(["batch", "sparsity"], kind="stable")

    frame = frames.complete(frame, AXES)
    asked = len(chosen(frame[frame["method"].isin(methods)].drop_duplicates(["case", "method"])))
    nothing = NOTHING if asked else "not asked: no case of these records is one of its cells"
    metric, level = frames.time_metric(frame, "forward_kernel"), 1 - (1 - LEVEL) / (1 if cells else max(1, asked))
    return chosen(report.ratios(frame, report.DENSE, methods, metric, level)), nothing


def _reaches(claim: str, rule: str, table: pd.DataFrame, nothing: str, least: dict) -> Verdict:
    """Whether the interval of every cell lies at or above what is asked; the one that is furthest below is shown."""
    if table.empty:
        return verdict(claim, rule, table, None, UNDECIDED, nothing)
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


def somewhere(claim: str, rule: str, table: pd.DataFrame, nothing: str, least: float, calls: bool = False) -> Verdict:
    """Whether the interval of some cell lies at or above `least`; refuted where all lie below. That end is shown."""
    if table.empty:
        return verdict(claim, rule, table, None, UNDECIDED, nothing)
    state = SUPPORTED if (table["low"] >= least).any() else REFUTED if (table["high"] < least).all() else UNDECIDED
    row = table.sort_values(["low" if state == SUPPORTED else "high", "ratio"]).iloc[-1]
    why = f"{AXES.short(row['method'])} {interval_text(row)} at {AXES.case(row)}"
    return verdict(claim, rule, table, row, state, why, calls)


def verdict(
    claim: str, rule: str, table: pd.DataFrame, row: pd.Series | None, state: str, why: str, calls: bool = False
) -> Verdict:
    """The row's; without one, on a CPU and, unless `calls` may judge, of call time undecided."""
    if row is None:
        return Verdict(claim, rule, np.nan, np.nan, np.nan, UNDECIDED, why, table)
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
