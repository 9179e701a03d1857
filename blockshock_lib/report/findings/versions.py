"""Which code measured what. Phases are measured at their own times: what stands side by side may be of two versions."""

from __future__ import annotations

import pandas as pd

from blockshock_lib.report import cells

PHASE = {"forward": "phase1", "step": "phase3"}


def of_works(frame: pd.DataFrame) -> dict[str, str]:
    """Work ("forward", "step") -> the code that measured it; {} where both, or the one that is there, are of one.

    The digest of the sources decides: a commit may change nothing that runs.
    """
    rows = cells.complete(frame)
    found = {work: set(rows.loc[rows["phase"].eq(phase), "code"]) for work, phase in PHASE.items()}
    digests = {work: {code.rpartition("/")[2] for code in codes} for work, codes in found.items() if codes}
    if len({frozenset(of) for of in digests.values()}) < 2:
        return {}
    return {work: " and ".join(sorted(filter(None, found[work]))) or "unknown" for work in digests}


def sentence(works: dict[str, str]) -> str:
    """What a figure says of `of_works`; "" where there is nothing to say."""
    if not works:
        return ""
    told = ", ".join(f"{work} {code}" for work, code in works.items())
    return f"Measured with different code ({told}): compare within one work alone."
