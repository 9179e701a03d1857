from blockshock_lib import records
from blockshock_lib.report.check_plots import check_matrix
from tests.faults.hostile import REFERENCE


def test_the_matrix_counts_checks_of_every_method_and_mask():
    frame = records.load(REFERENCE.with_name("phase0-cpu"))
    assert check_matrix(frame).alt.startswith("195 of 245 checks passed, none failed")
    assert "D permuted dense, random: 0/5." in check_matrix(frame).alt
    assert "Block-Shock, checkerboard: 5/5." in check_matrix(frame).alt


def test_a_check_that_failed_or_ran_out_is_in_the_title():
    frame = records.load(REFERENCE.with_name("phase0-cpu"))
    checks = frame.index[frame["metric"].eq("check") & frame["method"].eq("block_shock")]
    frame.loc[checks[0], "value"] = 0.0
    frame.loc[checks[1], ["status", "value", "reason"]] = ["oom", float("nan"), "planted"]
    assert check_matrix(frame).alt.startswith("2 of 245 checks did not pass")


def test_nothing_checked_is_said():
    assert "nothing was checked" in check_matrix(records.load(REFERENCE).iloc[:0]).alt
