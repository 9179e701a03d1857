"""The study's answer and its page in Markdown, of the shipped records of one machine."""

import numpy as np
import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.tables import ABSENT, markdown, shown
from blockshock_lib.report.verdicts import FASTER, UNDECIDED
from blockshock_lib.studies.gallery import report
from blockshock_lib.studies.gallery.axes import TOKENS
from blockshock_lib.studies.gallery.methods import DECODERS

_STEP = "of one layer, its mask fixed, "
_LEADS = {"speed": "", "decode": "a token in a CUDA graph: ", "training": _STEP, "accuracy": "loss: "}
_TABLES = {  # table: its phase, and what it says
    "tokens": ("decode", "In a CUDA graph, over the fastest dense model of each case, as in the answer."),
    "steps": ("training", "T1 packs a dense master in each step, T3 trains the packed values."),
    "losses": ("accuracy", "Nats lost beside the dense model of the same seed."),
    "break-even": ("speed", "By sparsity beside the best dense product."),
    "times": ("speed", "Over searched dense; a hypothesis takes the faster of both dense products."),
    "packed weight": ("speed", "Bytes as held and by formula."),
}


def tokens(frame: pd.DataFrame) -> pd.DataFrame:
    """`report.tokens` with speeds over each case's fastest dense model, as in the answer and the figure's title."""
    table, metric = report.tokens(frame), frames.time_metric(frame, f"{TOKENS.stem}_kernel")
    dense = report.timed(frame, report.DECODE_DENSE, metric)  # a dense model has the others as rivals
    best = [report.ratios(frame, [one for one in dense if one != name], [name], metric) for name in DECODERS]
    best = pd.concat(best, ignore_index=True)
    told = [(verdicts.interval_text(r), r["outcome"], verdicts.further_text(r)) for r in best.to_dict("records")]
    vs = [f"vs {TOKENS.short(TOKENS.over)}", "claim", "a further run"]
    best[vs] = pd.DataFrame(told, columns=vs, index=best.index, dtype=object)
    best.loc[best["method"].isin(dense) & best["ratio"].ge(1), vs] = ["1 (itself)", ABSENT, ABSENT]
    best = shown(best, TOKENS, ["weight", "context", "batch", "method", *vs])
    found = table.drop(columns=vs).merge(best, how="left")[list(table)].fillna(dict.fromkeys(vs, ABSENT))
    return found.rename(columns={vs[0]: "vs fastest dense", "same": "same next token (share)"})


def answer(frame: pd.DataFrame) -> str:
    """In a sentence: the answers of the phases that were measured, and that of the products."""
    from blockshock_lib.studies.gallery import STUDY  # its answers and tables by name, as notebooks take them

    rows = {name: frame[frame["phase"].eq(f"gallery_{name}")] for name in _LEADS}
    said = {name: STUDY.answers[f"gallery_{name}"](own) for name, own in rows.items() if len(own)}
    said["speed"] = products(rows["speed"])
    called = report.ratios(rows["decode"], report.DECODE_DENSE, [report.TOKENS.under], "token_call")
    each = [f"{verdicts.interval_text(one)} at B={one['batch']}" for one in called.to_dict("records")]
    if each and (text := said["decode"])[:3] != "Not":  # the table names the fastest dense model of each case
        said["decode"] = f"{text.partition('; ')[0].removesuffix('.')}, without a graph {', '.join(each)}"
    none = ["accuracy: not measured on a GPU yet"] * (not frames.no_claim(frame) and rows["accuracy"].empty)
    said = {
        name: text.removesuffix(".").replace(" beside the dense one: Always here:", " is")
        for name, text in said.items()
    }
    parts = [lead + said[name][:1].lower() + said[name][1:] for name, lead in _LEADS.items() if name in said]
    text = "; ".join([*parts, *none])
    return f"{text[:1].upper()}{text[1:]}."


def products(frame: pd.DataFrame) -> str:
    """`report.answer`, by pattern."""
    table = report.speeds(frame)
    if table.empty or frames.no_claim(table) or table["groups"].lt(2).all():
        return report.answer(frame)
    each = []
    for pattern, part in table.groupby("pattern", sort=True):
        best, spans = report.fastest(part), []
        for name, of in (("sparsity", "{}"), ("batch", "B of {}")):
            spans.append(of.format(" to ".join(f"{end:g}" for end in sorted({best[name].min(), best[name].max()}))))
        wins, open_ = best.loc[best["outcome"].eq(FASTER), "ratio"], best[best["outcome"].eq(UNDECIDED)]
        blind = open_["high"].eq(np.inf).sum()  # of one group of processes
        left = {"undecided": len(open_) - blind, "without an interval": blind}
        by = " to ".join(sorted({f"{end:.2f}" for end in (wins.min(), wins.max())})) if len(wins) else ""
        about = ", ".join([*spans, *(f"{count} {how}" for how, count in left.items() if count)])
        each.append(f"{pattern} at {len(wins)} of {len(best)}" + f", by {by}x" * bool(by) + f" ({about})")
    lacks = report.beaten(frame, table, report.DENSE)[1:]  # the table of times names the fastest dense one
    return f"Places where a product beats the best dense one: {'; '.join([', '.join(each), *lacks])}."


def page(frame: pd.DataFrame) -> str:
    """The page of results behind its title and `answer`; what was not measured says so."""
    from blockshock_lib.studies.gallery import STUDY

    apart = "Runs of other sets of methods are judged apart: a cell that several sets have timed is said once for each."
    lines = ["## The answer", "", apart, "", *verdicts.claims(frame, STUDY.hypotheses)]
    for name, (phase, about) in _TABLES.items():
        own = frame[frame["phase"].eq(f"gallery_{phase}")]
        if len(own) or phase == "speed":
            table = STUDY.tables[name](own)
            table = table.reset_index() if table.index.name else table
            lines += ["", f"## {name.capitalize()}", "", about, "", *markdown(table)]
    return "\n".join(lines)
