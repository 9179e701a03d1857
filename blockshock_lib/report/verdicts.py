"""Records frame in, verdict out: what the measurements allow us to say, and no more."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from blockshock_lib.report import cells, labels
from blockshock_lib.report.interval import ratio_interval
from blockshock_lib.report.training.ratios import training_ratios

FASTER, SLOWER, UNDECIDED, NO_CLAIM = "faster", "slower", "undecided", "no claim"
RATIO_COLUMNS = [*cells.CASE, "size", "ratio", "low", "high", "groups", "outcome", "metric"]


def ratio(frame: pd.DataFrame, over: str, under: str, metric: str = "forward_kernel") -> pd.DataFrame:
    """Speed of `under` over `over` in every case where both have valid times.

    Returns one row a case, smallest first: the case's columns, `size` (sqrt(in * out features)), `ratio` = t(over) /
    t(under) in "x", the mean over fresh groups of the ratio of medians, `low` and `high` (99% interval), `groups`
    (fresh groups of processes behind it), `outcome` and `metric`. The outcome says `under` is "faster" or "slower"
    only where the interval excludes 1, and "undecided" elsewhere; "no claim" on a CPU or where one GPU played all
    ranks. A cell with a failed check, or with none, has no row.
    """
    rows = cells.samples(frame, metric)
    found = []
    for _, case in rows.groupby("case", sort=False):
        sides = [cells.groups(case[case["method"].eq(method)]) for method in (over, under)]
        shared = [key for key in sides[0] if key in sides[1]]
        if shared:
            interval = ratio_interval(*([side[key] for key in shared] for side in sides))
            about = case.iloc[0][cells.CASE].to_dict()
            found.append({**about, **interval._asdict(), "groups": len(shared), "metric": metric})
    table = pd.DataFrame(found, columns=[name for name in RATIO_COLUMNS if name not in ("size", "outcome")])
    if table.empty:
        return pd.DataFrame(columns=RATIO_COLUMNS)
    table["size"] = cells.size(table)
    decided = np.select([table["low"] > 1, table["high"] < 1], [FASTER, SLOWER], UNDECIDED)
    table["outcome"] = np.where(cells.kind(table).eq("gpu"), decided, NO_CLAIM)
    return table.sort_values(["size", "batch"], kind="stable").reset_index(drop=True)[RATIO_COLUMNS]


@dataclass(frozen=True)
class Verdict:
    """What is said of one hypothesis.

    Attributes:
        hypothesis: the claim, in a sentence that starts with its name.
        rule: what would support and what would refute it.
        ratio, low, high: speed ratio in the largest cell and its 99% interval, "x"; nan where nothing was measured.
        verdict: "supported", "refuted" or "undecided".
        why: the measurements behind it, in a sentence.
        cells: the table of `ratio`, every cell that was used.
    """

    hypothesis: str
    rule: str
    ratio: float
    low: float
    high: float
    verdict: str
    why: str
    cells: pd.DataFrame = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.hypothesis.split(":")[0]

    @property
    def line(self) -> str:
        """One line: "H1 refuted: ..."."""
        return f"{self.name} {self.verdict}: {self.why}"

    def __str__(self) -> str:
        return f"{self.hypothesis}\nRule: {self.rule}\n{self.verdict.capitalize()}: {self.why}"


_RULE = (
    "speed = median t({over}) / median t({under}), kernel time of the whole forward, with its 99% interval over fresh "
    "groups of processes. Supported if the interval lies above 1 in the largest cell (largest N*B); refuted if it "
    "lies below 1 in every cell; undecided otherwise, and always on a CPU or where one GPU plays all ranks."
)


def h1(frame: pd.DataFrame) -> Verdict:
    """H1: Block-Shock's forward beats dense row-parallel for sufficiently large N and B."""
    claim = "H1: Block-Shock's forward is faster than two-GPU dense row-parallel (B1) for sufficiently large N and B."
    return _speed_verdict(frame, claim, over="row_parallel", under="block_shock")


def h3(frame: pd.DataFrame) -> Verdict:
    """H3: the same split with dense products (C) is slower than Block-Shock."""
    claim = "H3: the same masked split multiplied densely (C) is slower than Block-Shock."
    return _speed_verdict(frame, claim, over="masked_dense", under="block_shock")


_RULE_H2 = (
    "f = Block-Shock's forward speed over B1; s1, s3 = speed over B1 of a whole training step that recompresses (T1) "
    "and of one that trains the packed values (T3); kernel time, same case, 99% intervals over fresh groups of "
    "processes. Supported if in the largest case of every optimizer s1/f lies below 1 and s3/s1 above 1; refuted if "
    "s1/f lies above 1 in every case, or s3/s1 below 1 in every case; undecided otherwise, and always on a CPU or "
    "where one GPU plays all ranks."
)


def h2(frame: pd.DataFrame) -> Verdict:
    """H2: recompression eats the advantage in training. `ratio`, `low` and `high` are of s1/f in the largest case, of
    the optimizer whose interval reaches highest; `cells` is the table of `training_ratios` with `outcome`.
    """
    claim = "H2: in training Block-Shock's speed over B1 shrinks, unless recompression is small."
    table = training_ratios(frame)
    if table.empty:
        why = "no case holds valid times of a forward and a step of B1, Block-Shock and its recompressing variant (T1)"
        return Verdict(claim, _RULE_H2, np.nan, np.nan, np.nan, UNDECIDED, why, table.assign(outcome=""))
    holds = table["shrink_high"].lt(1) & table["gain_low"].gt(1)
    table["outcome"] = np.select([cells.kind(table).ne("gpu"), holds], [NO_CLAIM, "supports"], UNDECIDED)
    real = table[table["outcome"].ne(NO_CLAIM)]
    shown = real if len(real) else table
    work = shown["size"] * shown["batch"].astype(float)
    largest = shown[np.isclose(work, work.groupby(shown["optimizer"]).transform("max"))]
    row = largest.loc[largest["shrink_high"].idxmax()]
    if real.empty:
        verdict, why = UNDECIDED, cells.no_claim(table)
    elif not (real["step_metric"].eq("step_kernel") & real["forward_metric"].eq("forward_kernel")).all():
        verdict, why = UNDECIDED, "only call time was measured, and the rule asks for kernel time"
    else:
        count = int(real["outcome"].eq("supports").sum())
        at = f"{labels.optimizer(row['optimizer'])} at {row['shape']}, B={row['batch']}"
        said = {"s1/f": "shrink", "s3/f": "keep", "s3/s1": "gain"}
        why = ", ".join(f"{text} {quotient_text(row, name)}" for text, name in said.items()) + f" with {at}"
        if largest["outcome"].eq("supports").all():
            verdict, why = "supported", f"{why}; {count} of {len(real)} cases agree"
        elif real["shrink_low"].gt(1).all() or real["gain_high"].lt(1).all():
            verdict, why = "refuted", f"{why}; in all {len(real)} cases"
        else:
            alone = "; a single group of processes gives no interval" if (real["groups"] < 2).any() else ""
            verdict, why = UNDECIDED, f"{why}; {count} of {len(real)} cases support it{alone}"
        if real["forward"].lt(1).all():
            why += f"; f's ratio is below 1 in all {len(real)} cases: no advantage was there to shrink"
    return Verdict(claim, _RULE_H2, row["shrink"], row["shrink_low"], row["shrink_high"], verdict, why, table)


def quotient_text(row: pd.Series, name: str) -> str:
    """`interval_text` of one of the ratios of `training_ratios`."""
    return interval_text(pd.Series({"ratio": row[name], "low": row[f"{name}_low"], "high": row[f"{name}_high"]}))


def _speed_verdict(frame: pd.DataFrame, claim: str, over: str, under: str) -> Verdict:
    frame = cells.complete(frame)
    frame = frame[~frame["phase"].isin(["phase2", "phase3"])]  # their forward keeps what a backward needs
    names = labels.label(over), labels.label(under)
    rule = _RULE.format(over=names[0], under=names[1])
    table = ratio(frame, over, under, cells.time_metric(frame))
    if table.empty:
        why = f"no case holds valid times of both {names[0]} and {names[1]}"
        return Verdict(claim, rule, np.nan, np.nan, np.nan, UNDECIDED, why, table)
    real = table[cells.kind(table).eq("gpu")]
    shown = real if len(real) else table
    work = shown["size"] * shown["batch"].astype(float)
    largest = shown[np.isclose(work, work.max())]
    row = largest.loc[largest["low"].idxmin()]
    if real.empty:
        verdict, why = UNDECIDED, cells.no_claim(table)
    elif not real["metric"].eq("forward_kernel").all():
        verdict, why = UNDECIDED, "only call time was measured, and the rule asks for kernel time"
    else:
        verdict, why = _decide(real, largest, row)
    return Verdict(claim, rule, row["ratio"], row["low"], row["high"], verdict, why + _missing(frame, table), table)


def _decide(table: pd.DataFrame, largest: pd.DataFrame, row: pd.Series) -> tuple[str, str]:
    at = f"{interval_text(row)} at {row['shape']}, B={row['batch']}"
    count = {name: int(table["outcome"].eq(name).sum()) for name in (FASTER, SLOWER, UNDECIDED)}
    if largest["outcome"].eq(FASTER).all():
        return "supported", f"{at}, the largest cell; faster in {count[FASTER]} of {len(table)} cells"
    if count[SLOWER] == len(table):
        top = table.loc[table["ratio"].idxmax()]
        best = f"; nearest to parity is {interval_text(top)} at {top['shape']}, B={top['batch']}"
        return "refuted", f"{at}; slower in all {len(table)} cells" + best * (top.name != row.name)
    why = f"{at}; of {len(table)} cells {count[FASTER]} faster, {count[SLOWER]} slower, {count[UNDECIDED]} undecided"
    if (table["groups"] < 2).any():
        why += "; a single group of processes gives no interval"
    return UNDECIDED, why


def _missing(frame: pd.DataFrame, table: pd.DataFrame) -> str:
    """How many cases of the timed phases are not in `table`: a method failed, was unsupported or had no valid check."""
    rows = cells.complete(frame)
    timed = rows.loc[rows["metric"].isin(["forward_kernel", "forward_call"]) & rows["status"].eq("ok"), "phase"]
    lost = len(set(rows.loc[rows["phase"].isin(set(timed)), "case"]) - set(table["case"]))
    return f"; {lost} case{'s' * (lost > 1)} without valid times of both left out" if lost else ""


def interval_text(row: pd.Series) -> str:
    """ "0.77x [0.76, 0.78]", with as many digits as tell the interval from 1."""
    low, high = row["low"], row["high"]
    if np.isnan(row["ratio"]):
        return "not measured"
    if not low > 0 or high / low > 100:
        return f"{row['ratio']:.2f}x [no interval]"
    digits = 2
    while digits < 5 and (round(low, digits) == 1 or round(high, digits) == 1):
        digits += 1
    return f"{row['ratio']:.{digits}f}x [{low:.{digits}f}, {high:.{digits}f}]"


def check_verdict(frame: pd.DataFrame) -> tuple[int, int, int, str]:
    """(passed, failed, unsupported, line) counted over (run, case, group, method).

    What ran out of time did not pass: it counts as failed, and the line names it apart. What did not fit in memory is
    neither: nothing wrong was computed; the line counts it apart too.
    """
    count = cells.checks(frame)["outcome"].value_counts()
    passed, unsupported = int(count.get("passed", 0)), int(count.get("unsupported", 0))
    late, large = int(count.get("timeout", 0)), int(count.get("oom", 0))
    failed = int(count.get("failed", 0)) + late
    line = f"checks: {passed} passed, {failed} failed{f' ({late} out of time)' if late else ''}"
    line += f", {large} out of memory" if large else ""
    return passed, failed, unsupported, f"{line}, {unsupported} unsupported" if len(count) else "checks: none was made"


_HYPOTHESES = {"phase1": (h1, h3), "phase3": (h2,)}


def hypotheses(frame: pd.DataFrame) -> list[Verdict]:
    """The verdicts that the phases of `frame` are about, by name: H1 and H3 of phase 1, H2 of phase 3."""
    found = [rule(frame) for phase in _phases(frame) for rule in _HYPOTHESES.get(phase, ())]
    return sorted(found, key=lambda verdict: verdict.name)


def _phases(frame: pd.DataFrame) -> list[str]:
    return sorted({str(phase) for phase in cells.complete(frame)["phase"].dropna()})


def words(frame: pd.DataFrame) -> pd.DataFrame:
    """The hypotheses in words, a row each: claim, rule and verdict; no number, so the same on every run of a
    machine.
    """
    found = hypotheses(frame)
    return pd.DataFrame(
        {"claim": [v.hypothesis for v in found], "rule": [v.rule for v in found], "verdict": [v.verdict for v in found]}
    ).set_index("claim")


def numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """The hypotheses' numbers: the ratio that the rule asks for in the largest cell with its 99% interval (H1, H3:
    speed over the rival; H2: s1/f), and what the verdict rests on.
    """
    found = hypotheses(frame)
    ratios = [interval_text(pd.Series({"ratio": v.ratio, "low": v.low, "high": v.high})) for v in found]
    return pd.DataFrame(
        {"largest cell": ratios, "verdict": [v.verdict for v in found], "why": [v.why for v in found]},
        index=pd.Index([v.name for v in found], name="hypothesis"),
    )


def one_line(frame: pd.DataFrame) -> str:
    """The last line a run prints: its checks, then what its phases are about: the hypotheses, and phase 2's ratio."""
    phases = _phases(frame)
    passed, failed, _, line = check_verdict(frame)
    state = "FAIL" if failed else "PASS" if passed else "NOTHING CHECKED"
    idle = _never_ran(frame)
    spoken = [f"not run: {', '.join(idle)}"] if idle else []
    spoken += [verdict.line for verdict in hypotheses(frame)]
    spoken += [_pass_line(frame)] if "phase2" in phases else []
    return " · ".join([f"{'+'.join(phases) or 'no phase'}: {state}", line, *spoken])


def _pass_line(frame: pd.DataFrame) -> str:
    """Phase 2 in a sentence: the speed of Block-Shock's forward and dX over B1's in the largest cell."""
    table = ratio(frame, "row_parallel", "block_shock", cells.time_metric(frame, "pass_kernel"))
    if table.empty:
        return "forward + dX against B1: no case holds valid times of both"
    real = table[table["outcome"].ne(NO_CLAIM)]
    if real.empty:
        return f"forward + dX against B1: {cells.no_claim(table)}"
    row = real.loc[(real["size"] * real["batch"].astype(float)).idxmax()]
    where = f"{row['shape']}, B={row['batch']}"
    return f"forward + dX of Block-Shock: {interval_text(row)} of B1's speed at {where}, {row['outcome']}"


def _never_ran(frame: pd.DataFrame) -> list[str]:
    """Labels of the methods that were asked for and passed no check at all."""
    found = cells.checks(frame)
    ran = set(found.loc[found["outcome"].eq("passed"), "method"])
    return [labels.label(name) for name in labels.methods_in(found["method"]) if name not in ran]
