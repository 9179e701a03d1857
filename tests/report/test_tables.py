from dataclasses import replace
from functools import partial

import pandas as pd
import pytest

from blockshock_lib.report import tables
from blockshock_lib.studies.linear.axes import AXES
from tests.report import frames

NAMES = ("correctness_table", "error_table", "reasons", "speed_table")
correctness_table, error_table, reasons, speed_table = (partial(getattr(tables, name), axes=AXES) for name in NAMES)


@pytest.fixture(scope="module")
def phase0():
    masks, workloads = ("checkerboard", "random", "uniform_1100"), ("mlp_up", "gaussian")
    return frames.make((256,), (16,), device="cpu", groups=1, timed=False, masks=masks, workloads=workloads)


def test_correctness_says_the_worst_of_a_field_and_why_is_said_beside_it(phase0):
    twice = pd.concat([phase0, frames.make((512,), (16,), device="cpu", groups=1, timed=False)], ignore_index=True)
    field = ("checkerboard", "gaussian"), "B1 row-parallel"
    for status, word in (("unsupported", "pass, some unsupported"), ("oom", "out of memory"), ("failed", "FAIL")):
        broken = frames.fail(twice, "row_parallel", n=512, status=status, reason="why")
        assert correctness_table(broken).loc[field] == word
        assert ("B1 row-parallel", status, 1, "why") in set(reasons(broken).itertuples(index=False, name=None))
    zero = phase0["value"].mask(phase0["metric"].eq("check") & phase0["method"].eq("dense"), 0.0)
    assert set(correctness_table(phase0.assign(value=zero))["A dense"]) == {"FAIL"}, "it ran and did not hold"


def test_errors_are_those_of_valid_cells(phase0):
    frame = phase0.copy()
    place = frame.index[frame["metric"].eq("error_max_ratio") & frame["method"].eq("dense")][0]
    frame.loc[place, "value"] = 1.9
    broken = frames.fail(frame, "dense", mask=frame.loc[place, "mask"])
    worst = [error_table(one).loc["A dense", "worst max ratio (x, gate 2)"] for one in (frame, broken)]
    assert worst[0] == 1.9 > worst[1]
    looser = tables.error_table(frame, replace(AXES, looser=True))
    assert looser.loc["A dense", "worst max ratio (x)"] == 1.9, "no gate is named where each check has its own"


def test_what_rounding_left_of_zero_is_zero_on_every_machine():
    assert tables.rounded(pd.Series([2.2e-14, -1.234e-3])).tolist() == [0.0, -0.00123]


def test_the_machine_has_a_line_a_gpu_and_none_for_what_a_case_says(phase0):
    said = [("power", 500.0, 0), ("power", 300.0, 1), ("throttle", 1.0, 1), ("one_at_a_time", 1.0, -1)]
    rows = [dict(phase0.iloc[0]) | {"method": "machine", "metric": name, "value": v, "rank": r} for name, v, r in said]
    table = tables.machine_table(pd.DataFrame(rows))
    assert table["GPU"].tolist() == [0, 1] and table["power median (W)"].tolist() == [500, 300]
