"""Tables and figures of the attention study, from its records."""

import pandas as pd

from blockshock_lib.report import frames


def patterns(frame: pd.DataFrame) -> pd.DataFrame:
    """What the patterns are in these cases: the shares of pairs that see each other and of blocks that are visited, and
    the bytes of the lists, from the smallest to the largest case.
    """
    rows = frames.complete(frame)
    rows = rows[rows["metric"].isin(["density", "block_density", "lists_bytes"])]
    rows = rows.drop_duplicates(["case", "metric"])
    table = rows.pivot_table(index="pattern", columns="metric", values="value", aggfunc=["min", "max"])
    if table.empty:
        return pd.DataFrame({"patterns": ["none was weighed"]})
    names = {"density": "pairs seen (share)", "block_density": "blocks visited (share)", "lists_bytes": "lists (KiB)"}
    unit = {"lists_bytes": 1 / 1024}
    spans = {
        name: [
            f"{low * unit.get(key, 1):.3g} to {high * unit.get(key, 1):.3g}"
            for low, high in zip(table["min"][key], table["max"][key], strict=True)
        ]
        for key, name in names.items()
    }
    return pd.DataFrame(spans, index=table.index)


def summary(frame: pd.DataFrame) -> list[str]:
    """Sentences at the end of a run's verdict line."""
    cases = frame.drop_duplicates("case")
    return [f"{cases['pattern'].nunique()} patterns in {len(cases)} cases"]
