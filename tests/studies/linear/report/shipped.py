"""Records of the shipped runs, from which tests make what they need."""

from functools import cache

import pandas as pd

from blockshock_lib.runs import records
from blockshock_lib.runs.manifest import REFERENCE
from tests.report import frames


@cache
def _loaded(run: str) -> pd.DataFrame:
    return records.load(REFERENCE / run)


def shipped(run: str, repeats: int = 3) -> pd.DataFrame:
    """A run's records, of times only the first `repeats` of each group."""
    frame = _loaded(run)
    return frame[frame["repeat"].lt(repeats) | frame["metric"].eq("loss")].reset_index(drop=True)


def faster(frame: pd.DataFrame, by: float, method: str, metric: str = "step_kernel", **where: object) -> pd.DataFrame:
    """`frame` with these times of `method`, in the cases `where` columns have these values, `by` times as fast."""
    hit = frames.where(frame, method=method, metric=metric, **where)
    return frame.assign(value=frame["value"].mask(hit, frame["value"] / by))
