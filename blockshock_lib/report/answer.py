"""What a run answers, in one sentence of words from its records; and how a notebook and its page begin with it."""

from collections.abc import Callable
from html import escape

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.axes import Axes
from blockshock_lib.report.verdicts import FASTER, NO_CLAIM, SLOWER, UNDECIDED, Rules

# Where no page's style is: in JupyterLab, light and dark. A page takes the classes alone.
_LARGE = "font-size:1.5em;line-height:1.3;font-weight:600;margin:.2em 0"
_CHIP = "border:1px solid;border-radius:1em;padding:.1em .7em;font-size:.85em"


def speed(frame: pd.DataFrame, axes: Axes, metric: str = "", rival: str = "", under: str = "") -> str:
    """How fast `under` is beside the baseline in `metric` (those of the axes), over all cases: "Never here: slower than
    tensor parallelism in all 20 cases, by 2 to 35%." `rival` names the baseline. Only decided cases are counted, those
    without times of both are said, and a percentage is of the baseline's speed.
    """
    wanted, under = metric or f"{axes.stem}_kernel", under or axes.under
    metric = frames.time_metric(frame, wanted)
    table = verdicts.ratio(frame, axes, axes.over, under, metric)
    said, cases = counted(table, rival or axes.label(axes.over)), frames.complete(frame, axes)
    left = cases.loc[cases["metric"].isin([wanted, metric]), "case"].nunique() - len(table)
    if table.empty or table["outcome"].eq(NO_CLAIM).any():
        return said
    said += f" {left} more {'cases hold' if left > 1 else 'case holds'} no valid times of both." if left else ""
    return said + " By calls: kernels alone have no time." * (metric != wanted)


def counted(table: pd.DataFrame, rival: str) -> str:
    """`speed` from the table of `verdicts.ratio`."""
    cases = f"all {len(table)} cases" if len(table) > 1 else "the one case"
    if table.empty:
        return f"Not answered: no case holds valid times beside {rival}."
    if table["outcome"].eq(NO_CLAIM).any():
        return f"Not answered here ({frames.no_claim(table)})."
    ratios = {word: table.loc[table["outcome"].eq(word), "ratio"] for word in (FASTER, SLOWER, UNDECIDED)}
    for word, lead in ((SLOWER, "Never"), (FASTER, "Always")):
        if len(ratios[word]) == len(table):
            return f"{lead} here: {word} than {rival} in {cases}, {_by(table['ratio'])}."
    counts = [
        f"{len(some)} {word}" + f", {_by(some)}" * (word != UNDECIDED) for word, some in ratios.items() if len(some)
    ]
    lead = "Sometimes" if len(ratios[FASTER]) else "Never surely"
    return f"{lead} faster here than {rival}: of {len(table)} cases {'; '.join(counts)}."


def checked(frame: pd.DataFrame, what: str = "every result is right, to within rounding") -> str:
    """The answer of a phase that only checks, `what` being its claim."""
    passed, failed, *_ = verdicts.check_verdict(frame)
    return "No." if failed else f"Yes: {what}, in all {passed:,} checks that could be made."


def sentence(
    frame: pd.DataFrame, said: Callable[[pd.DataFrame], str], lost: str = "", own: pd.DataFrame | None = None
) -> str:
    """What `said` makes of the records, behind checks that failed and before what is missing; nothing without a check
    that passed. Checks are those of `own`, where `frame` holds more runs.
    """
    passed, failed, *_ = verdicts.check_verdict(frame if own is None else own)
    faults = [f"{failed:,} of {passed + failed:,} checks failed."] if failed else []
    left = [f"{lost.strip(' ·').replace(' · ', '; ')}."] if lost else []
    return " ".join([*faults, said(frame) if passed else "Not answered: no check passed.", *left])


def failure(own: pd.DataFrame, axes: Axes) -> str:
    """The first check that failed, and why; "" where none did."""
    rows = frames.checks(own)
    rows = rows[rows["outcome"].isin(["failed", "timeout"])].to_dict("records")
    return f"first failure: {axes.short(rows[0]['method'])}, {rows[0]['reason']}" if rows else ""


def html(text: str, frame: pd.DataFrame, rules: Rules, figure: str = "", own: pd.DataFrame | None = None) -> str:
    """The beginning of a notebook: the sentence, its figure, the checks as a chip, and each hypothesis in words with
    its verdict in a colour of its own: a check says that numbers are right, not that a hypothesis is.
    """
    passed, failed, unsupported, _ = verdicts.check_verdict(frame if own is None else own)
    tone, made = "bad" if failed or not passed else "good", f"Checks {passed:,}/{passed + failed:,}"
    made += f", {unsupported:,} unsupported" if unsupported else ""
    claims = "".join(
        f'<li><b class="claim {verdict.verdict}">{verdict.verdict}</b> {escape(verdict.hypothesis)} '
        f'<span class="muted">{escape(verdict.why)}</span>'
        f"<details><summary>rule</summary>{escape(verdict.rule)}</details></li>"
        for verdict in verdicts.hypotheses(frame, rules)
    )
    return (
        f'<div class="answer"><p class="sentence" style="{_LARGE}">{escape(text)}</p>{figure}'
        f'<p><span class="chip {tone}" style="{_CHIP}">{made}</span></p>{f"<ul>{claims}</ul>" * bool(claims)}</div>'
    )


def _by(ratios: pd.Series) -> str:
    """ "by 2 to 35%": how far the speeds lie from the baseline's."""
    ends = sorted({f"{share:.0f}" if share >= 1 else f"{share:.1f}" for share in 100 * np.abs(ratios - 1)}, key=float)
    return f"by {' to '.join(dict.fromkeys([ends[0], ends[-1]]))}%"
