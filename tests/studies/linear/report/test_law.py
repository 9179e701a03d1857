"""The law, where the time goes, and H2: its verdict and what it rests on."""

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.studies.linear.hypotheses import h2
from blockshock_lib.studies.linear.report import build, law
from blockshock_lib.studies.linear.report.law import training_ratios
from tests.report import frames
from tests.studies.linear.report.shipped import faster, shipped

T1, T3 = "block_shock_recompress", "block_shock"
THREE = ("row_parallel", T3, T1)


@pytest.fixture(scope="module")
def frame():
    return frames.make((4096, 16384), (16, 4096), groups=2, repeats=4, noise=0.001)


@pytest.fixture(scope="module")
def three():
    """With an advantage that training may shrink, which the shipped run has not."""
    frame = faster(shipped("phase3-cuda"), 3, T3, "forward_kernel")
    times = ["check", *(f"{work}_{kind}" for work in ("forward", "step") for kind in ("kernel", "call"))]
    return frame[frame["method"].isin(THREE) & frame["metric"].isin(times)].reset_index(drop=True)


def test_a_machine_that_obeys_the_law_leaves_nothing_over():
    obeys = frames.make((16384,), (4096,), groups=2, repeats=2, noise=0, group_effect=0)
    times = {"dense": 4.0, "row_parallel": 2.0, "block_shock": 2.5}
    for method, ms in times.items():
        mine = obeys["method"].eq(method)
        obeys.loc[mine & obeys["metric"].eq("compute_kernel"), "value"] = ms
        obeys.loc[mine & obeys["metric"].eq("reduce_kernel"), "value"] = 0.5
        obeys.loc[mine & obeys["metric"].eq("forward_kernel"), "value"] = ms + 0.5 * (method != "dense")
    (row,) = law.law_rows(obeys).to_dict("records")
    assert row["s"] == 1.6 and row["predicted"] == pytest.approx(2.5 / 3) and row["ratio"] == pytest.approx(2.5 / 3)
    assert row["residual"] == pytest.approx(0)


def test_a_failed_check_leaves_the_case_out(frame):
    assert set(law.law_rows(frames.fail(frame, "block_shock", n=4096))["size"]) == {16384}


def test_with_four_ranks_s_is_still_one_dense_product_over_one_sparse_of_the_same_size():
    four = frames.make((16384,), (4096,), groups=2, repeats=2, noise=0, group_effect=0, world_size=4)
    (row,) = law.law_rows(four).to_dict("records")
    assert row["s"] == pytest.approx(row["a"] / row["ours"] / 2)
    assert row["predicted"] == pytest.approx((row["a"] / 4 + row["reduce"]) / (row["ours"] + row["reduce"]))


@pytest.mark.parametrize("rows", [pd.DataFrame(), frames.make((4096,), (16,), timed=False)])
def test_without_times_every_table_is_empty(rows):
    for made in (law.law_rows, law.pieces):
        assert made(rows).empty


def test_h2_is_supported_where_t1_loses_and_t3_does_not_in_the_largest_case_of_every_optimizer(three):
    verdict = h2(three)
    assert verdict.verdict == "supported" and verdict.high < 1
    assert verdict.line.startswith("H2 supported: s1/f ") and "at 40960x40960, B=4096" in verdict.why
    # A smaller case may differ.
    smaller = h2(faster(three, 5, T1, in_features=4096))
    assert smaller.verdict == "supported" and "4 of 6 cases agree" in smaller.why


def test_h2_is_not_applicable_where_the_forward_has_no_advantage_that_training_could_shrink(three):
    frame = shipped("phase3-cuda")
    slow = h2(frame)
    row = slow.cells[slow.cells["in_features"].eq(40960)].sort_values("shrink_high").iloc[-1]
    assert slow.line.startswith(
        "H2 not applicable: f lies below 1 in all 6 cases, no advantage was there to shrink; s1/f"
    )
    assert f", s3/f {build.interval(row, 'keep')}, s3/s1 " in slow.why and slow.high == row["shrink_high"]
    assert (h2(three).cells["forward_low"] > 1).all() and "no advantage" not in h2(three).why
    mixed = faster(frame, 3, T3, "forward_kernel", in_features=4096)
    assert h2(mixed).verdict == "supported", "one case with an advantage is enough to ask"


@pytest.mark.parametrize(
    "verdict, by, method, where",
    [("undecided", 5, T1, {"optimizer": "adamw"}), ("refuted", 5, T1, {}), ("refuted", 0.2, T3, {})],
)
def test_every_optimizer_counts_with_the_largest_case_that_it_ran(three, verdict, by, method, where):
    less = three[~(three["optimizer"].eq("adamw") & three["in_features"].eq(40960))]
    assert h2(less).verdict == "supported"
    for frame in (three, less):
        found = h2(faster(frame, by, method, **where))
        assert found.verdict == verdict
        assert verdict == "refuted" or found.high > 1, "what is shown is the optimizer that stands in the way"


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda frame: frame.assign(device="cpu"), "CPU"),
        (lambda frame: frame.assign(emulated=True), "emulated on one GPU"),
        (lambda frame: frame[frame["group"].eq(0)], "a single group"),
        (lambda frame: frame[~frame["metric"].str.endswith("_kernel")], "kernel time"),
        *((lambda frame, name=name: frames.fail(frame, name), "no case") for name in THREE),
        (lambda frame: pd.DataFrame(), "no case"),
        (lambda frame: frames.make((4096,), (16,), groups=2, repeats=2), "no case"),
    ],
)
def test_h2_stays_undecided_and_says_why(three, change, why):
    verdict = h2(change(three))
    assert verdict.verdict == "undecided" and why in verdict.line
    assert verdict.cells.empty == np.isnan(verdict.ratio) == (why == "no case")
    assert why not in ("CPU", "emulated on one GPU") or set(verdict.cells["outcome"]) == {"no claim"}


def test_what_a_group_shares_cancels_in_the_quotients(three):
    lift = three["value"].where(three["unit"].ne("ms"), three["value"] * (1 + three["group"]))
    still, lifted = training_ratios(three), training_ratios(three.assign(value=lift))
    ends = [f"{name}_{end}" for name in ("shrink", "keep", "gain") for end in ("low", "high")]
    assert np.allclose(still[ends], lifted[ends])


def test_a_ratio_and_the_times_beside_it_are_of_the_same_mean():
    """Groups that differ in length and level: a median of all samples is not the mean of the groups' medians."""
    frame = frames.make((4096,), (16, 256), groups=3, repeats=5, group_effect=0.05)
    frame = frame[~(frame["group"].eq(0) & frame["repeat"].gt(1))]
    table = law.law_rows(frame)
    times = (table["b1_forward"] / table["ours_forward"]).to_numpy()
    assert table["ratio"].to_numpy() == pytest.approx(times, rel=1e-9)
