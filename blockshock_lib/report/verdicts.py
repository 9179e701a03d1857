"""Records frame in, verdict out: what the measurements allow us to say, and no more."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, interval, reruns
from blockshock_lib.report.axes import TWIN, Axes

FASTER, SLOWER, UNDECIDED, NO_CLAIM = "faster", "slower", "undecided", "no claim"
SUPPORTED, REFUTED, NOT_APPLICABLE = "supported", "refuted", "not applicable"
VERDICTS = (SUPPORTED, REFUTED, UNDECIDED, NOT_APPLICABLE)  # the last: what the rule asks about did not happen
# Phase -> the functions that judge its hypotheses.
Rules = Mapping[str, Iterable[Callable[[pd.DataFrame], "Verdict"]]]


def ratio(
    frame: pd.DataFrame, axes: Axes, over: str, under: str, metric: str = "", level: float = interval.LEVEL
) -> pd.DataFrame:
    """Speed of `under` over `over` in `metric` ("": kernel time of the narrowest work), a row a case where both have
    valid times, smallest first: the case's columns, `size`, `ratio` = t(over) / t(under), its interval `low` to
    `high` over `runs`, or the `groups` of one, `next_low` to `next_high` of a further run (`interval.intervals`),
    `metric` and `outcome`: `under` is FASTER or SLOWER where the interval excludes 1, NO_CLAIM on no real GPUs.
    """
    metric = metric or f"{axes.stem}_kernel"
    found = reruns.cells(frame, over, under, metric)
    columns = [*axes.case_columns, "size", "ratio", "low", "high", "next_low", "next_high"]
    columns += ["runs", "groups", "outcome", "metric"]
    if not found:
        return pd.DataFrame(columns=columns)
    about, entries = frame.drop_duplicates("case").set_index("case", drop=False)[axes.case_columns], []
    for (case, cell), (mean, further) in zip(found.items(), interval.intervals([*found.values()], level), strict=True):
        more = dict(runs=len(cell), groups=sum(map(len, cell.values())), next_low=further.low, next_high=further.high)
        entries.append({**about.loc[case].to_dict(), **mean._asdict(), **more})
    table = pd.DataFrame(entries).assign(size=axes.size, metric=metric)
    decided = np.select([table["low"] > 1, table["high"] < 1], [FASTER, SLOWER], UNDECIDED)
    table["outcome"] = np.where(frames.kind(table).eq("gpu"), decided, NO_CLAIM)
    return frames.by_size(table, axes)[columns]


@dataclass(frozen=True)
class Verdict:
    hypothesis: str  # the claim, in a sentence that starts with its name
    rule: str  # what would support and what would refute it
    ratio: float  # of speed in the largest cell, "x", with its 99% interval; nan where nothing was measured
    low: float
    high: float
    verdict: str  # one of VERDICTS
    why: str  # the measurements behind it, in a sentence
    cells: pd.DataFrame = field(repr=False, compare=False)  # the table of `ratio`, every cell that was used
    runs: int = 0  # over which the interval is; 1: over the groups of one run
    next_low: float = np.nan  # in which the ratio of a further run lies
    next_high: float = np.nan

    def __post_init__(self):
        if self.verdict not in VERDICTS:
            raise ValueError(f"{self.verdict!r} is no verdict; there are {', '.join(VERDICTS)}")

    @property
    def name(self) -> str:
        return self.hypothesis.split(":")[0]

    @property
    def line(self) -> str:
        return f"{self.name} {self.verdict}: {self.why}"


_RULE = (
    "speed = median t({over}) / median t({under}), kernel time of the whole {work}, with its 99% interval over whole "
    "runs, of a single run over its fresh groups of processes. Supported if the interval lies above 1 in the largest "
    "cell (largest {size}); refuted if it lies below 1 in every cell; undecided otherwise, and always on a CPU or "
    "where one GPU plays all ranks."
)


def speed_verdict(frame: pd.DataFrame, axes: Axes, claim: str, over: str, under: str) -> Verdict:
    """Whether `under` is faster than `over` in the narrowest work, by the interval in the largest case: see `_RULE`."""
    frame, names, kernel = frames.complete(frame), (axes.label(over), axes.label(under)), f"{axes.stem}_kernel"
    words = axes.times[axes.stem].words.removeprefix("a ")
    rule = _RULE.format(over=names[0], under=names[1], work=words, size=axes.work_name)
    table = ratio(frame, axes, over, under, frames.time_metric(frame, kernel))
    if table.empty:
        why = f"no case holds valid times of both {names[0]} and {names[1]}"
        return Verdict(claim, rule, np.nan, np.nan, np.nan, UNDECIDED, why, table)
    real = table[frames.kind(table).eq("gpu")]
    shown = table if real.empty else real
    size = axes.work(shown)
    cases = shown[np.isclose(size, size.max())]
    row = cases.loc[cases["low"].idxmin()]
    if real.empty:
        verdict, why = UNDECIDED, frames.no_claim(table)
    elif not real["metric"].eq(kernel).all():
        verdict, why = UNDECIDED, "only call time was measured, and the rule asks for kernel time"
    else:
        verdict, why = _decide(real, cases, row, axes)
    # Cases of the timed phases in which a method failed, was unsupported or had no valid check.
    timed = frame[frame["metric"].isin([kernel, f"{axes.stem}_call"]) & frame["status"].eq("ok")]
    lost = len(set(frame.loc[frame["phase"].isin(timed["phase"]), "case"].unique()) - set(table["case"]))
    why += f"; {lost} case{'s' * (lost > 1)} without valid times of both left out" if lost else ""
    further = {name: row[name] for name in ("runs", "next_low", "next_high")}
    return Verdict(claim, rule, row["ratio"], row["low"], row["high"], verdict, why, table, **further)


def _decide(table: pd.DataFrame, cases: pd.DataFrame, row: pd.Series, axes: Axes) -> tuple[str, str]:
    at = f"{interval_text(row)} at {axes.case(row)}"
    count = {name: int(table["outcome"].eq(name).sum()) for name in (FASTER, SLOWER, UNDECIDED)}
    if cases["outcome"].eq(FASTER).all():
        return SUPPORTED, f"{at}, the largest cell; faster in {count[FASTER]} of {len(table)} cells"
    if count[SLOWER] == len(table):
        top = table.loc[table["ratio"].idxmax()]
        best = f"; nearest to parity is {interval_text(top)} at {axes.case(top)}"
        return REFUTED, f"{at}; slower in all {len(table)} cells" + best * (top.name != row.name)
    why = f"{at}; of {len(table)} cells {count[FASTER]} faster, {count[SLOWER]} slower, {count[UNDECIDED]} undecided"
    if (table["groups"] < 2).any():
        why += "; a single group of processes gives no interval"
    return UNDECIDED, why


def interval_text(row: Mapping) -> str:
    """ "0.77x [0.76, 0.78]", with as many digits as tell the interval from 1."""
    low, high = row["low"], row["high"]
    if np.isnan(row["ratio"]):
        return "not measured"
    if not low > 0 or high > 100 * low:
        return f"{row['ratio']:.2f}x [no interval]"
    digits = next((n for n in range(2, 5) if round(low, n) != 1 and round(high, n) != 1), 5)
    return f"{row['ratio']:.{digits}f}x [{low:.{digits}f}, {high:.{digits}f}]"


def further_text(row: Mapping) -> str:
    """ "[0.74, 0.80]": in which a further run's ratio lies."""
    if np.isnan(row["next_low"]):
        return "not measured"
    return interval_text({"ratio": row["ratio"], "low": row["next_low"], "high": row["next_high"]}).partition(" ")[2]


def check_verdict(frame: pd.DataFrame) -> tuple[int, int, int, str]:
    """(passed, failed or out of time, unsupported, line) over (run, case, group, method); out of memory is neither."""
    count = frames.checks(frame)["outcome"].value_counts().reindex(frames.OUTCOMES, fill_value=0)
    passed, unsupported, late, oom, failed = map(int, count)
    line = f"checks: {passed} passed, {failed + late} failed" + (f" ({late} out of time)" if late else "")
    line += (f", {oom} out of memory" if oom else "") + f", {unsupported} unsupported"
    return passed, failed + late, unsupported, line if count.any() else "checks: none was made"


def hypotheses(frame: pd.DataFrame, rules: Rules) -> list[Verdict]:
    """The verdicts that the phases of `frame` are about, by name."""
    measured = {phase: rules[phase] for phase in phases(frame) if phase in rules}
    return [verdict for _, verdict, _ in judged(frame, measured)]


def by_name(frame: pd.DataFrame, rules: Rules) -> dict[str, str]:
    return {verdict.name: verdict.verdict for verdict in hypotheses(frame, rules)}


def judged(frame: pd.DataFrame, rules: Rules) -> list[tuple[str, Verdict, str]]:
    """Every verdict of `rules` by name, with its phase, and what is missing: "" where the phase was measured."""
    measured = phases(frame)
    lacks = {phase: "" if phase in measured else f"no record of {phase} yet: make {phase}" for phase in rules}
    found = [(phase, rule(frame), lacks[phase]) for phase, some in rules.items() for rule in some]
    return sorted(found, key=lambda one: one[1].name)


def claims(frame: pd.DataFrame, rules: Rules) -> list[str]:
    """`judged` in Markdown, a line each."""
    words = [(v.hypothesis, v.verdict, lacks or v.why) for _, v, lacks in judged(frame, rules)]
    return [f"- **{claim.rstrip('.')}: {verdict}.** {why.rstrip('.')}." for claim, verdict, why in words]


def phases(frame: pd.DataFrame) -> list[str]:
    return sorted({str(phase) for phase in frames.complete(frame)["phase"].dropna().unique()})


def words(frame: pd.DataFrame, rules: Rules) -> pd.DataFrame:
    """Claim, rule and verdict of each hypothesis; no number, so the same on every run of a machine."""
    table = [(v.hypothesis, v.rule, v.verdict) for v in hypotheses(frame, rules)]
    return pd.DataFrame(table, columns=["claim", "rule", "verdict"]).set_index("claim")


def numbers(frame: pd.DataFrame, rules: Rules) -> pd.DataFrame:
    """The ratio that each hypothesis asks for with its 99% interval, over what that is, in which interval a further
    run's ratio lies, and what the verdict rests on.
    """
    table = [
        (v.name, interval_text(vars(v)), reruns.over_text(v.runs), further_text(vars(v)), v.verdict, v.why)
        for v in hypotheses(frame, rules)
    ]
    columns = ["hypothesis", "largest cell", "interval over", "a further run", "verdict", "why"]
    return pd.DataFrame(table, columns=columns).set_index("hypothesis")


AGAIN = "the twin"


def twin(frame: pd.DataFrame, axes: Axes) -> tuple[pd.DataFrame, float]:
    """What a run cannot tell apart: `ratio` of the baseline's twin over the baseline, in kernel time of the widest work
    that was measured, and the smallest difference that may be claimed of one cell, 0.02 for 2%, or NaN.

    That is exp(t s) - 1. s is the root mean square, over the C cells of all runs, of the log of the twin's ratio; t is
    Student's 99.5% quantile for C degrees of freedom. In 99 of 100 cells the ratio of two equal methods lies within it.
    """
    again = frames.complete(frame).replace({"method": {TWIN: AGAIN}})
    have = set(again.loc[again["method"].eq(AGAIN), "metric"])
    metric = next((f"{stem}_kernel" for stem in reversed(axes.times) if f"{stem}_kernel" in have), "")
    again = again if metric else again.iloc[:0]
    asked = axes.ordered(again.loc[again["case"].isin(again.loc[again["metric"].eq(metric), "case"]), "method"])
    over = min(asked, key=lambda name: name != axes.over, default="")  # of a phase without it the first
    logs = np.array([run.mean() for cell in reruns.cells(again, over, AGAIN, metric).values() for run in cell.values()])
    reach = interval.t_quantile(0.995, len(logs)) * np.square(logs).mean() ** 0.5 if len(logs) else np.nan
    return ratio(again, axes, over, AGAIN, metric).assign(method=over), float(np.expm1(reach))


def twin_sentences(frame: pd.DataFrame, axes: Axes) -> list[str]:
    """Whether the twin differs from the baseline, and the smallest difference to claim; nothing of older records, nor
    where times are no claim.
    """
    table, smallest = twin(frame, axes)
    if table.empty or frames.no_claim(table):
        return []
    off = table[table["low"].gt(1) | table["high"].lt(1)].to_dict("records")
    at = ", ".join(f"{interval_text(row)} at {axes.case(row)}" for row in off[:3]) + ", ..." * (len(off) > 3)
    at, said = f" ({at})" * bool(off), "{0} again differs from {0}".format(axes.short(table["method"].iloc[0]))
    least = f"smallest difference to claim: {smallest:.1%}, for below it a cell's interval stands alone"
    return [f"{said} in {len(off)} of {len(table)} cells{at}; {least}"]


def one_line(
    frame: pd.DataFrame,
    axes: Axes,
    rules: Rules,
    summary: Callable = lambda frame: [],
    own: pd.DataFrame | None = None,
    good: str = "PASS",
) -> str:
    """The last line a run prints: its checks (those of `own`, where `frame` holds more runs), the hypotheses of its
    phases, what the twin says, the study's own `summary`: frame -> sentences, and what several runs say of each other.
    `good`: what is said where no check failed.
    """
    own = frame if own is None else own
    passed, failed, _, line = check_verdict(own)
    state = "FAIL" if failed else good if passed else "NOTHING CHECKED"
    outcomes = frames.checks(own)
    ran = set(outcomes.loc[outcomes["outcome"].eq("passed"), "method"])
    idle = [axes.label(name) for name in axes.ordered(outcomes["method"]) if name not in ran]
    parts = [f"{'+'.join(phases(frame)) or 'no phase'}: {state}", line]
    parts += [f"not run: {', '.join(idle)}"] if idle else []
    more = [*twin_sentences(frame, axes), *summary(frame), *reruns.sentences(frame, axes)]
    return " · ".join([*parts, *(verdict.line for verdict in hypotheses(frame, rules)), *more])
