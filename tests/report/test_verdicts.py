import pytest

from blockshock_lib.report import verdicts
from blockshock_lib.studies.linear.axes import AXES
from tests.report import frames

SMALL = dict(ns=(4096, 8192), bs=(16, 4096), methods=("row_parallel", "masked_dense", "block_shock"), repeats=6)


def test_the_ratio_is_the_time_over_divided_by_the_time_under():
    frame = frames.make(**SMALL)
    table = verdicts.ratio(frame, AXES, "row_parallel", "block_shock").set_index(["in_features", "batch"])
    cell = frame[frames.where(frame, metric="forward_kernel", in_features=8192, batch=4096)]
    medians = cell.groupby("method")["value"].median()[["row_parallel", "block_shock"]].to_list()
    row = table.loc[(8192, 4096)]
    assert row["ratio"] == pytest.approx(medians[0] / medians[1], rel=0.02)
    assert row["low"] < row["ratio"] < row["high"]
    assert row["groups"] == 3


def test_the_text_of_an_interval_never_rounds_to_1():
    text = verdicts.interval_text({"ratio": 0.98, "low": 0.96, "high": 0.9987})
    assert text == "0.980x [0.960, 0.999]"


def test_checks_are_counted_once_a_case_group_and_method():
    frame = frames.make((256, 512), (16,), device="cpu", groups=2, timed=False)
    assert verdicts.check_verdict(frame)[:3] == (6 * 2 * 2, 0, 2 * 2)
    broken = frames.fail(frame, "dense", n=256)
    broken = frames.fail(broken, "block_shock", n=512, status="oom", reason="asked for 3 GiB")
    passed, failed, unsupported, line = verdicts.check_verdict(broken)
    assert (passed, failed, unsupported) == (20, 2, 4)
    assert line == "checks: 20 passed, 2 failed, 2 out of memory, 4 unsupported"
