"""Two records frames in, what changed out; and what must not be said to have changed."""

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.report.compare import changes
from tests.report import frames

SMALL = dict(ns=(4096, 8192), bs=(16, 4096), methods=("dense", "row_parallel", "block_shock"), repeats=6, groups=5)


def run(**changed):
    return frames.make(**(SMALL | {"group_effect": 0.01} | changed))


@pytest.fixture(scope="module")
def old():
    return run(seed=1)


def told(rows, outcome=changes.REGRESSION):
    return rows[rows["outcome"].eq(outcome)]


def test_another_run_of_the_same_code_shows_no_change_in_any_time(old):
    for seed in range(2, 8):
        found = changes.compare(old, run(seed=seed))
        times = found.rows[found.rows["unit"].eq("ms")]
        assert told(found.rows).empty and set(times["outcome"]) == {changes.UNDECIDED}
        assert found.intervals == len(times) == 2 * 3 * 4 and found.each == pytest.approx(1 - 0.01 / 24)


def test_a_method_slowed_by_10_percent_in_one_cell_is_found_there_and_nowhere_else(old):
    slow = run(seed=2, speedup={("row_parallel", 8192, 4096): 1 / 1.1}, group_effect=0.003)
    rows = changes.compare(run(seed=1, group_effect=0.003), slow).rows
    bad = told(rows)
    assert set(zip(bad["method"], bad["shape"], bad["batch"], strict=True)) == {("row_parallel", "8192x8192", 4096)}
    assert set(bad["what"]) == {"kernel time", "call time"}
    assert bad["ratio"].between(1.08, 1.12).all() and (bad["low"] > 1).all() and list(bad.index) == [0, 1]


def test_the_ratio_is_the_newer_over_the_older_so_a_faster_one_is_no_regression(old):
    fast = run(seed=1, speedup={("dense", 4096, 16): 2})
    (better,) = (
        told(changes.compare(old, fast).rows, changes.IMPROVED).query("what == 'kernel time'").to_dict("records")
    )
    assert (
        better["ratio"] == pytest.approx(0.5) and better["high"] < 1 and better["b"] == pytest.approx(better["a"] / 2)
    )
    assert told(changes.compare(old, fast).rows).empty and not told(changes.compare(fast, old).rows).empty


def test_a_run_with_itself_has_ratios_of_1(old):
    rows = changes.compare(old, old).rows
    assert np.allclose(rows["ratio"].dropna(), 1) and told(rows).empty


def test_regressions_come_first_checks_before_times_and_then_the_largest_ratio():
    slow = {("row_parallel", 4096, 16): 1 / 1.2, ("block_shock", 4096, 4096): 1 / 1.5, ("dense", 8192, 16): 2}
    b = frames.fail(run(seed=1, speedup=slow), "dense", n=4096, batch=16)
    rows = changes.compare(run(seed=1), b).rows
    bad = told(rows)
    assert list(bad.index) == list(range(len(bad))) and bad.iloc[0]["what"] == "check"
    for part in (bad.iloc[1:], rows[~rows.index.isin(bad.index) & rows["ratio"].notna()]):
        assert part["ratio"].is_monotonic_decreasing and len(part) > 1
    assert rows["ratio"].iloc[len(bad) :].isna().tolist() == sorted(rows["ratio"].iloc[len(bad) :].isna().tolist())


@pytest.mark.parametrize("status", ["failed", "oom", "timeout", "unsupported"])
def test_a_check_that_passed_and_does_not_any_more_is_a_regression_with_its_reason(old, status):
    b = frames.fail(old, "block_shock", n=8192, batch=16, status=status, reason="planted")
    (bad,) = told(changes.compare(old, b).rows).to_dict("records")
    assert (bad["what"], bad["method"], bad["shape"], bad["batch"]) == ("check", "block_shock", "8192x8192", 16)
    assert bad["note"] == f"passed → {status}: planted" and np.isnan(bad["ratio"])
    (good,) = told(changes.compare(b, old).rows, changes.IMPROVED).to_dict("records")
    assert good["note"] == f"{status} → passed: planted"


def test_one_group_that_fails_its_check_is_enough(old):
    b = old.copy()
    hit = b["metric"].eq("check") & b["method"].eq("dense") & b["group"].eq(3) & b["batch"].eq(16) & b["n"].eq(4096)
    assert hit.sum() == 1
    b.loc[hit, "value"] = 0.0
    assert len(told(changes.compare(old, b).rows)) == 1


def test_what_fails_in_both_runs_is_no_regression(old):
    both = frames.fail(old, "dense")
    rows = changes.compare(both, both).rows
    assert told(rows).empty and len(told(rows, changes.NEITHER)) == 4
    assert not (rows["method"].eq("dense") & rows["unit"].ne("")).any(), "no valid check, no number"


@pytest.mark.parametrize("metric, what", [("weight_bytes", "weight"), ("peak_bytes", "peak memory")])
@pytest.mark.parametrize("factor, outcome", [(1.002, "regression"), (1.0005, "same"), (1, "same"), (0.99, "improved")])
def test_memory_is_counted_and_may_grow_by_a_thousandth(old, metric, what, factor, outcome):
    b = old.copy()
    b.loc[b["metric"].eq(metric) & b["method"].eq("dense"), "value"] *= factor
    rows = changes.compare(old, b).rows
    rows = rows[rows["what"].eq(what)].set_index("method")
    assert set(rows.loc["dense", "outcome"]) == {outcome} and set(rows.loc["block_shock", "outcome"]) == {"same"}
    assert rows.loc["dense", "ratio"].to_numpy() == pytest.approx(factor)


def test_memory_that_varies_over_groups_has_grown_only_where_every_group_has(old):
    b = old.copy()
    hit = b["metric"].eq("peak_bytes") & b["method"].eq("dense")
    b.loc[hit & b["group"].ne(0), "value"] *= 1.01
    assert told(changes.compare(old, b).rows).empty
    b.loc[hit & b["group"].eq(0), "value"] *= 1.01
    assert len(told(changes.compare(old, b).rows)) == 4


def test_a_metric_that_could_not_be_measured_any_more_is_a_regression(old):
    b = old.copy()
    hit = b["metric"].eq("forward_kernel") & b["method"].eq("dense") & b["n"].eq(4096) & b["batch"].eq(16)
    b.loc[hit, ["value", "status", "reason"]] = [np.nan, "failed", "planted"]
    (bad,) = told(changes.compare(old, b).rows).to_dict("records")
    assert (bad["what"], bad["note"]) == ("kernel time", "in b: failed: planted")
    assert told(changes.compare(old, b[~hit]).rows).empty, "b was not asked for it"


@pytest.mark.parametrize("sides", [(1, 5), (5, 1), (1, 1)])
def test_one_group_on_a_side_gives_no_interval_and_no_regression(sides):
    a, b = run(groups=sides[0]), run(groups=sides[1], speedup={("dense", 4096, 16): 0.2})
    found = changes.compare(a, b)
    times = found.rows[found.rows["unit"].eq("ms")]
    assert set(times["outcome"]) == {changes.NO_INTERVAL} and found.intervals == 0
    assert times["ratio"].max() == pytest.approx(5, rel=0.1) and told(found.rows).empty


def test_cases_are_paired_by_what_they_are_and_not_by_their_id(old):
    b = old.assign(case=old["case"].map(lambda text: text[::-1]))
    assert len(changes.compare(old, b).rows) == len(changes.compare(old, old).rows) == 3 * 4 * 5


@pytest.mark.parametrize(
    "column, value",
    [("mask", "random"), ("world_size", 4), ("phase", "phase2"), ("workload", "uniform"), ("device", "x")],
)
def test_cases_that_differ_are_not_compared_but_listed(old, column, value):
    found = changes.compare(old, old.assign(**{column: value}))
    assert found.rows.empty and found.only["run"].value_counts().to_dict() == {"a": 12, "b": 12}


def test_what_one_run_alone_has_is_listed_and_is_no_regression(old):
    b = run(seed=1, methods=("dense", "row_parallel"), bs=(16, 4096), ns=(4096, 8192, 16384))
    found = changes.compare(old, b)
    assert told(found.rows).empty
    alone = found.only.groupby("run")
    assert set(alone.get_group("a")["method"]) == {"block_shock"} and len(alone.get_group("a")) == 4
    assert set(alone.get_group("b")["shape"]) == {"16384x16384"} and len(alone.get_group("b")) == 4


def test_a_lost_record_is_a_regression_where_the_newer_run_lacks_records(old):
    b = old[~(old["n"].eq(4096) & old["batch"].eq(16))]
    assert told(changes.compare(old, b).rows).empty
    found = changes.compare(old, b, b_short=True)
    assert list(told(found.rows)["note"]) == ["passed → its record is missing"] * 3 and found.only.empty


def test_cases_of_other_dtypes_are_paired_only_where_told_and_where_it_is_clear_which():
    a, b = run(groups=2), run(groups=2, dtypes=("fp16",))
    assert changes.compare(a, b).rows.empty
    rows = changes.compare(a, b, loose=["dtype"]).rows
    assert set(rows["dtype"]) == {"bf16 → fp16"} and len(rows) == 3 * 4 * 5
    both = run(groups=2, dtypes=("fp16", "bf16"))
    assert set(changes.compare(a, both, loose=["dtype"]).rows["dtype"]) == {"bf16"}
    assert changes.compare(a, run(groups=2, dtypes=("fp16", "fp32")), loose=["dtype"]).rows.empty


def test_frames_without_rows_give_no_rows(old):
    found = changes.compare(pd.DataFrame(), old.iloc[:0])
    assert found.rows.empty and list(found.rows.columns) == changes.COLUMNS and found.only.empty
    assert len(changes.compare(pd.DataFrame(), old).only) == 12


def test_a_cpus_kernel_time_is_called_what_it_is():
    cpu = run(device="cpu", ns=(256,), bs=(16,), groups=2, kernel=True)
    assert changes.PLAIN in set(changes.compare(cpu, cpu).rows["what"])


def trained(optimizer="", **changed):
    """A run of phase 3, as far as a comparison reads it: the step's times are those of a forward, three times over."""
    frame = run(**changed)
    forward = frame[frame["metric"].isin(["forward_kernel", "forward_call"])]
    step = forward.assign(metric=forward["metric"].str.replace("forward", "step"), value=3 * forward["value"])
    held = frame[frame["metric"].eq("weight_bytes")]
    parts = [
        held.assign(metric=name, value=part * held["value"])
        for name, part in {"gradient_bytes": 1, "optimizer_bytes": 2, "copies_bytes": 0}.items()
    ]
    frame = pd.concat([frame, step, *parts], ignore_index=True)
    return frame.assign(phase="phase3", optimizer=optimizer, case=frame["case"] + optimizer)


def test_a_training_step_is_guarded_beside_its_forward():
    slow = trained("sgd", seed=1)
    hit = slow["metric"].eq("step_kernel") & slow["method"].eq("block_shock") & slow["batch"].eq(16)
    slow.loc[hit, "value"] *= 1.3
    bad = told(changes.compare(trained("sgd", seed=1), slow).rows)
    assert set(bad["what"]) == {"kernel time, step"} and set(bad["work"]) == {"step"} and len(bad) == 2


def test_cases_of_different_optimizers_are_different_cases():
    both = pd.concat([trained("sgd", seed=1), trained("adamw", seed=2)])
    slow = pd.concat([trained("sgd", seed=1), trained("adamw", seed=2, speedup={("dense", 4096, 16): 0.5})])
    bad = told(changes.compare(both, slow).rows)
    assert set(bad["optimizer"]) == {"adamw"} and set(bad["method"]) == {"dense"}
    assert changes.compare(trained("sgd"), trained("adamw")).rows.empty


def test_each_part_of_a_steps_memory_is_guarded_and_a_copy_that_is_new_is_told():
    grown = trained("sgd")
    grown.loc[grown["metric"].eq("copies_bytes") & grown["method"].eq("dense") & grown["batch"].eq(16), "value"] = 512.0
    grown.loc[grown["metric"].eq("optimizer_bytes") & grown["method"].eq("dense"), "value"] *= 1.01
    bad = told(changes.compare(trained("sgd"), grown).rows)
    assert set(bad["what"]) == {"packed copies", "optimizer state"} and set(bad["method"]) == {"dense"}
    assert set(bad.loc[bad["what"].eq("packed copies"), "note"]) == {"0 B → 512 B"}
    rows = changes.compare(trained("sgd"), trained("sgd")).rows
    assert set(rows.loc[rows["what"].eq("packed copies"), "outcome"]) == {changes.SAME}
