"""Two records frames in, what changed out; and what must not be said to have changed."""

import numpy as np
import pytest

from blockshock_lib.report import changes
from blockshock_lib.studies.linear.axes import AXES
from tests.report import frames
from tests.studies.linear.report.shipped import faster, shipped

SMALL = dict(ns=(4096, 8192), bs=(16, 4096), methods=("dense", "row_parallel", "block_shock"), repeats=6, groups=5)


def run(**changed):
    return frames.make(**(SMALL | {"group_effect": 0.01} | changed))


@pytest.fixture(scope="module")
def old():
    return run(seed=1)


def compare(a, b, **how):
    return changes.compare(a, b, AXES, **how)


def that(rows, outcome=changes.REGRESSION):
    return rows[rows["outcome"].eq(outcome)]


def bad(a, b, **how):
    return that(compare(a, b, **how).rows)


def times(compared):
    return compared.rows[compared.rows["unit"].eq("ms")]


def test_another_run_of_the_same_code_shows_no_change_in_any_time(old):
    for seed in range(2, 5):
        compared = compare(old, run(seed=seed))
        assert that(compared.rows).empty and set(times(compared)["outcome"]) == {changes.UNDECIDED}
        assert compared.intervals == len(times(compared)) == 2 * 3 * 4
        assert compared.each == pytest.approx(1 - 0.01 / 24)


@pytest.mark.parametrize("status", ["failed", "unsupported"])
def test_a_check_that_passed_and_does_not_any_more_is_a_regression_with_its_reason(old, status):
    b = frames.fail(old, "block_shock", n=8192, batch=16, status=status, reason="planted")
    (row,) = bad(old, b).to_dict("records")
    assert (row["what"], row["method"], row["shape"], row["batch"]) == ("check", "block_shock", "8192x8192", 16)
    assert row["note"] == f"passed → {status}: planted" and np.isnan(row["ratio"])
    (row,) = that(compare(b, old).rows, changes.IMPROVED).to_dict("records")
    assert row["note"] == f"{status} → passed: planted"


@pytest.mark.parametrize("factor, outcome", [(1.002, "regression"), (1.0005, "same"), (0.99, "improved")])
def test_memory_is_counted_and_may_grow_by_a_thousandth(old, factor, outcome):
    hit = frames.where(old, metric="peak_bytes", method="dense")
    rows = compare(old, old.assign(value=old["value"].mask(hit, old["value"] * factor))).rows
    rows = rows[rows["what"].eq("peak memory")].set_index("method")
    assert set(rows.loc["dense", "outcome"]) == {outcome} and set(rows.loc["block_shock", "outcome"]) == {"same"}
    assert rows.loc["dense", "ratio"].to_numpy() == pytest.approx(factor)


def test_memory_that_varies_over_groups_has_grown_only_where_every_group_has(old):
    b = old.copy()
    hit = frames.where(b, metric="peak_bytes", method="dense")
    b.loc[hit & b["group"].ne(0), "value"] *= 1.01
    assert bad(old, b).empty
    b.loc[hit & b["group"].eq(0), "value"] *= 1.01
    assert len(bad(old, b)) == 4


def test_a_metric_that_could_not_be_measured_any_more_is_a_regression(old):
    b, hit = old.copy(), frames.where(old, metric="forward_kernel", method="dense", n=4096, batch=16)
    b.loc[hit, ["value", "status", "reason"]] = [np.nan, "failed", "planted"]
    (row,) = bad(old, b).to_dict("records")
    assert (row["what"], row["note"]) == ("kernel time", "in b: failed: planted")
    assert bad(old, b[~hit]).empty, "b was not asked for it"


@pytest.mark.parametrize("sides", [(1, 5), (5, 1), (1, 1)])
def test_one_group_on_a_side_gives_no_interval_and_no_regression(sides):
    compared = compare(run(groups=sides[0]), run(groups=sides[1], speedup={("dense", 4096, 16): 0.2}))
    assert set(times(compared)["outcome"]) == {changes.NO_INTERVAL} and compared.intervals == 0
    assert times(compared)["ratio"].max() == pytest.approx(5, rel=0.1) and that(compared.rows).empty


@pytest.mark.parametrize(
    "column, value",
    [("mask", "random"), ("world_size", 4), ("phase", "phase2"), ("optimizer", "adamw"), ("device", "x")],
)
def test_cases_that_differ_are_not_compared_but_listed(old, column, value):
    compared = compare(old, old.assign(**{column: value}))
    assert compared.rows.empty and compared.only["run"].value_counts().to_dict() == {"a": 12, "b": 12}


def test_cases_of_other_dtypes_are_paired_only_where_told_and_where_it_is_clear_which():
    a, b = run(groups=2), run(groups=2, dtypes=("fp16",))
    assert compare(a, b).rows.empty
    rows = compare(a, b, loose=["dtype"]).rows
    assert set(rows["dtype"]) == {"bf16 → fp16"} and len(rows) == 3 * 4 * 5
    both = run(groups=2, dtypes=("fp16", "bf16"))
    assert set(compare(a, both, loose=["dtype"]).rows["dtype"]) == {"bf16"}
    assert compare(a, run(groups=2, dtypes=("fp16", "fp32")), loose=["dtype"]).rows.empty


def test_a_training_step_is_guarded_beside_its_forward_and_each_part_of_its_memory():
    a, read = shipped("phase3-cuda-before", repeats=2), ("check", "forward_kernel", "step_kernel", "copies_bytes")
    a = a[a["in_features"].eq(4096) & a["metric"].isin([*read, "optimizer_bytes"])]
    b = faster(faster(a, 1 / 1.3, "block_shock", batch=4096), 1 / 1.01, "row_parallel", "optimizer_bytes")
    b.loc[frames.where(b, metric="copies_bytes", method="row_parallel"), "value"] = 512.0
    rows = bad(a, b).set_index("what")
    assert rows.groupby("what")["method"].agg(list).to_dict() == {
        "kernel time, step": ["block_shock"] * 2,  # by either optimizer, of which SGD holds no state
        "optimizer state": ["row_parallel"],
        "packed copies": ["row_parallel"] * 2,
    }
    assert set(rows.loc["packed copies", "note"]) == {"0 B → 512 B"} and set(rows["part"]) == {"step", ""}
    assert bad(a, a).empty
