"""H2: the step's speed over the forward's, and no recompression over recompression, from the same groups."""

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.report import verdicts
from blockshock_lib.report.training.ratios import training_ratios
from tests.report import frames
from tests.report.training_frames import training_frame

THREE = dict(methods=("row_parallel", "block_shock", "block_shock_recompress"), ns=(4096,), bs=(256, 4096))
T1_STEP, T3_STEP = ("block_shock_recompress", "step_kernel"), ("block_shock", "step_kernel")
T3_FORWARD = ("block_shock", "forward_kernel")


def median(frame, method, metric, optimizer="sgd", batch=4096):
    keys = {"method": method, "metric": metric, "optimizer": optimizer, "batch": batch}
    return frame.loc[np.logical_and.reduce([frame[name].eq(value) for name, value in keys.items()]), "value"].median()


def test_the_six_ratios_are_quotients_of_times_of_the_same_case():
    frame = training_frame(**THREE, noise=1e-5)
    table = training_ratios(frame)
    assert len(table) == 2 * 2
    row = table[table["optimizer"].eq("sgd") & table["batch"].eq(4096)].iloc[0]
    b1, t1, t3 = (median(frame, name, "step_kernel") for name in ("row_parallel", T1_STEP[0], "block_shock"))
    forward = median(frame, "row_parallel", "forward_kernel") / median(frame, *T3_FORWARD)
    expected = dict(forward=forward, recompress=b1 / t1, packed=b1 / t3, shrink=b1 / t1 / forward, gain=t1 / t3)
    expected["keep"] = b1 / t3 / forward
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=0.01), name
        assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
    assert row["groups"] == 3


def test_h2_is_supported_where_t1_loses_and_t3_does_not_in_the_largest_case_of_every_optimizer():
    verdict = verdicts.h2(training_frame(**THREE))
    assert verdict.verdict == "supported" and verdict.high < 1
    assert verdict.line.startswith("H2 supported: s1/f ") and "at 4096x4096, B=4096" in verdict.why


def test_h2_says_what_t3_keeps_and_that_there_was_no_advantage_only_where_that_is_so():
    slow = verdicts.h2(training_frame(**THREE))
    row = slow.cells[slow.cells["batch"].eq(4096)].sort_values("shrink_high").iloc[-1]
    assert f", s3/f {verdicts.quotient_text(row, 'keep')}, s3/s1 " in slow.why
    assert (slow.cells["forward"] < 1).all() and "below 1 in all 4 cases: no advantage" in slow.why
    fast = verdicts.h2(training_frame(**THREE, speedup={T3_FORWARD: 9}))
    assert (fast.cells["forward"] > 1).all() and "no advantage" not in fast.why


def test_one_optimizer_that_does_not_support_leaves_h2_undecided():
    frame = training_frame(**THREE)
    assert verdicts.h2(frame).verdict == "supported"
    fast = frame["optimizer"].eq("adamw") & frame["method"].eq(T1_STEP[0]) & frame["metric"].eq("step_kernel")
    undecided = verdicts.h2(frame.assign(value=frame["value"].mask(fast, frame["value"] / 3)))
    assert undecided.verdict == "undecided"
    assert undecided.high > 1, "what is shown is the optimizer that stands in the way"


def test_an_optimizer_that_ran_smaller_cases_alone_counts_with_the_largest_of_them():
    frame = training_frame(**THREE)
    frame = frame[~(frame["optimizer"].eq("adamw") & frame["batch"].eq(4096))]
    assert verdicts.h2(frame).verdict == "supported"
    fast = frame["optimizer"].eq("adamw") & frame["method"].eq(T1_STEP[0]) & frame["metric"].eq("step_kernel")
    assert verdicts.h2(frame.assign(value=frame["value"].mask(fast, frame["value"] / 5))).verdict == "undecided"


def test_a_smaller_case_may_differ_without_changing_the_verdict():
    frame = training_frame(**THREE)
    small = frame["batch"].eq(256) & frame["method"].eq(T1_STEP[0]) & frame["metric"].eq("step_kernel")
    verdict = verdicts.h2(frame.assign(value=frame["value"].mask(small, frame["value"] / 5)))
    assert verdict.verdict == "supported" and "2 of 4 cases agree" in verdict.why


@pytest.mark.parametrize("speedup", [{T1_STEP: 5}, {T3_STEP: 0.2}])
def test_h2_is_refuted_where_the_step_gains_on_the_forward_or_recompression_costs_nothing_in_every_case(speedup):
    assert verdicts.h2(training_frame(**THREE, speedup=speedup)).verdict == "refuted"


@pytest.mark.parametrize("change, why", [({"device": "cpu"}, "CPU"), ({"emulated": True}, "emulated on one GPU")])
def test_h2_is_never_decided_on_a_cpu_or_emulated(change, why):
    verdict = verdicts.h2(training_frame(**THREE).assign(**change))
    assert verdict.verdict == "undecided" and why in verdict.why
    assert set(verdict.cells["outcome"]) == {"no claim"}


def test_one_group_or_call_time_alone_decides_nothing():
    alone = verdicts.h2(training_frame(**THREE, groups=1))
    assert alone.verdict == "undecided" and "a single group" in alone.why
    calls = verdicts.h2(training_frame(**THREE, kernel=False))
    assert calls.verdict == "undecided" and "kernel time" in calls.why


def test_a_failed_check_of_any_of_the_three_removes_its_case():
    for method in THREE["methods"]:
        verdict = verdicts.h2(frames.fail(training_frame(**THREE), method))
        assert verdict.verdict == "undecided" and "no case" in verdict.why and verdict.cells.empty


def test_without_records_of_training_h2_says_so():
    for frame in (pd.DataFrame(), frames.make((4096,), (16,), groups=2, repeats=2)):
        verdict = verdicts.h2(frame)
        assert verdict.verdict == "undecided" and np.isnan(verdict.ratio) and "no case" in verdict.line


def test_what_a_group_shares_cancels_in_the_quotients():
    frame = training_frame(**THREE, noise=1e-4)
    lift = frame["value"].where(frame["unit"].ne("ms"), frame["value"] * (1 + frame["group"]))
    still, lifted = training_ratios(frame), training_ratios(frame.assign(value=lift))
    for name in ("shrink", "keep", "gain"):
        assert np.allclose(still[f"{name}_low"], lifted[f"{name}_low"])
        assert np.allclose(still[f"{name}_high"], lifted[f"{name}_high"])
