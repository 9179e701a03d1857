"""The study's answer and its page in Markdown, of the shipped records of one machine."""

import re

import pandas as pd

from blockshock_lib.report import frames, verdicts
from blockshock_lib.report.tables import markdown
from blockshock_lib.studies.gallery import report

_LEADS = {"speed": "", "decode": "A whole model, a token in a CUDA graph: ", "training": "", "accuracy": "Loss: "}
_TABLES = {"tokens": "decode", "steps": "training", "losses": "accuracy"}
_TABLES |= dict.fromkeys(("break-even", "times", "packed weight"), "speed")


def answer(frame: pd.DataFrame) -> str:
    """The answers of the phases that were measured, and that of the products."""
    from blockshock_lib.studies.gallery import STUDY  # its answers and tables by name, as notebooks take them

    rows = {f"gallery_{name}": frame[frame["phase"].eq(f"gallery_{name}")] for name in _LEADS}
    said = {phase: STUDY.answers[phase](own) for phase, own in rows.items() if len(own) or phase == "gallery_speed"}
    timed = frames.samples(rows["gallery_speed"], "forward_kernel")
    places = timed.drop_duplicates(["pattern", "weight", "batch", "sparsity"])["pattern"].value_counts().sort_index()
    patterns = ", ".join(f"{name} at {count}" for name, count in places.items())
    leads = _LEADS | {"speed": f"Products, {patterns} places: " if patterns else ""}
    under, metric = report.TOKENS.under, "token_call"
    called = report.ratios(rows["gallery_decode"], report.DECODE_DENSE, [under], metric).to_dict("records")
    each = [f"{verdicts.interval_text(one)} {one['outcome']} at B={one['batch']}" for one in called]
    if each and (text := said["gallery_decode"])[:3] != "Not":
        said["gallery_decode"] = f"{text.removesuffix('.')}; as called {', '.join(each)}."
    said["gallery_speed"] = re.sub("; fastest dense: [^;.]*", "", said["gallery_speed"])  # the table of times names it
    return " ".join(leads[phase.removeprefix("gallery_")] + text for phase, text in said.items())


def page(frame: pd.DataFrame) -> str:
    """The page of results behind its title; what was not measured says so."""
    from blockshock_lib.studies.gallery import STUDY

    lines = ["## The answer", "", answer(frame), "", *verdicts.claims(frame, STUDY.hypotheses)]
    for name, phase in _TABLES.items():
        own = frame[frame["phase"].eq(f"gallery_{phase}")]
        if len(own) or phase == "speed":
            lines += ["", f"## {name.capitalize()}", "", *markdown(STUDY.tables[name](own))]
    return "\n".join(lines)
