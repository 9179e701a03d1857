from functools import partial

import pandas as pd
import pytest

from blockshock_lib.report import tables
from blockshock_lib.studies.linear.axes import AXES
from tests.report import frames
from tests.studies.linear.report.shipped import shipped

NAMES = ("correctness_table", "error_table", "reasons", "speed_table")
correctness_table, error_table, reasons, speed_table = (partial(getattr(tables, name), axes=AXES) for name in NAMES)


@pytest.fixture(scope="module")
def phase0():
    masks, workloads = ("checkerboard", "random", "uniform_1100"), ("mlp_up", "gaussian")
    return frames.make((256,), (16,), device="cpu", groups=1, timed=False, masks=masks, workloads=workloads)


@pytest.fixture(scope="module")
def phase1():
    return frames.make((4096, 40960), (16, 4096), repeats=5)


def test_correctness_says_the_worst_of_a_field_and_why_is_said_beside_it(phase0):
    twice = pd.concat([phase0, frames.make((512,), (16,), device="cpu", groups=1, timed=False)], ignore_index=True)
    field = ("checkerboard", "gaussian"), "B1 row-parallel"
    for status, word in (("unsupported", "pass, some unsupported"), ("oom", "out of memory"), ("failed", "FAIL")):
        broken = frames.fail(twice, "row_parallel", n=512, status=status, reason="why")
        assert correctness_table(broken).loc[field] == word
        assert ("B1 row-parallel", status, 1, "why") in set(reasons(broken).itertuples(index=False, name=None))


def test_a_check_that_ran_and_did_not_hold_is_a_fail(phase0):
    zero = phase0["value"].mask(phase0["metric"].eq("check") & phase0["method"].eq("dense"), 0.0)
    frame = phase0.assign(value=zero)
    assert set(correctness_table(frame)["A dense"]) == {"FAIL"}


def test_errors_are_those_of_valid_cells(phase0):
    frame = phase0.copy()
    place = frame.index[frame["metric"].eq("error_max_ratio") & frame["method"].eq("dense")][0]
    frame.loc[place, "value"] = 1.9
    broken = frames.fail(frame, "dense", mask=frame.loc[place, "mask"])
    worst = [error_table(one).loc["A dense", "worst max ratio (x, gate 2)"] for one in (frame, broken)]
    assert worst[0] == 1.9 > worst[1]


def test_speed_claims_only_what_the_interval_excludes(phase1):
    table = speed_table(phase1)
    own = table["method"].eq("B1 row-parallel")
    interval = table.loc[~own, "vs B1"].str.extract(r"\[(.+), (.+)\]").astype(float)
    assert (table.loc[~own, "claim"].eq("faster") == interval[0].gt(1)).all()
    assert (table.loc[~own, "claim"].eq("slower") == interval[1].lt(1)).all()
    assert set(table.loc[~own, "claim"]) >= {"faster", "slower"}
    assert set(table.loc[own, "vs B1"]) == {"1 (itself)"} and set(table.loc[own, "claim"]) == {"–"}


def test_speed_on_a_cpu_carries_no_claim():
    table = speed_table(frames.make((256,), (16,), device="cpu", groups=2, repeats=3))
    assert set(table["claim"]) == {"no claim", "–"}
    plain = speed_table(frames.make((256,), (16,), device="cpu", kernel=True, groups=2, repeats=3))
    assert plain["host (ms)"].isna().all(), "both times are plain calls: their difference is no host time"
    assert table["call (ms)"].gt(0).all()


def test_a_gpu_that_was_throttled_says_why():
    frame = shipped("phase1-cuda")
    gpus = tables.machine_table(frame)
    share = frame[frame["metric"].eq("throttle")].groupby("rank")["value"].apply(lambda seen: 100 * seen.ne(0).mean())
    assert list(gpus["cases throttled (%)"]) == pytest.approx(list(share), rel=1e-3) and share.max() > 0
    assert set(gpus["reasons"]) == {"software power cap"}
    frame["value"] = frame["value"].mask(frame["metric"].eq("throttle") & frame["rank"].eq(0), 0.0)
    assert list(tables.machine_table(frame)["reasons"]) == ["", "software power cap"]
