"""The law, where the time goes, and H2: its verdict and what it rests on."""

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.files import ROOT
from blockshock_lib.runs import records
from blockshock_lib.studies.linear.hypotheses import h2
from blockshock_lib.studies.linear.report import build, law
from blockshock_lib.studies.linear.report.law import NAME, OVER, training_ratios
from blockshock_lib.studies.linear.report.law_plots import law_figure
from tests.report import frames
from tests.studies.linear.report.training_frames import training_frame

T1, T3 = "block_shock_recompress", "block_shock"
THREE = dict(methods=("row_parallel", T3, T1), ns=(4096,), bs=(256, 4096))
PIECES = ["re-mask + compress", "refresh", "optimizer step", "dW", "rest"]


@pytest.fixture(scope="module")
def frame():
    return frames.make((4096, 16384), (16, 4096), groups=2, repeats=4, noise=0.001)


@pytest.fixture(scope="module")
def trained():
    return training_frame((4096, 16384), (4096,), groups=2, repeats=2, noise=0.001)


@pytest.fixture(scope="module")
def three():
    return training_frame(**THREE)


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
    assert row["residual"] == pytest.approx(0) and row["reason"].startswith("none")


def test_the_reason_is_the_whole_where_that_is_no_sum(frame):
    slow = frame.copy()
    slow.loc[slow["method"].eq("block_shock") & slow["metric"].eq("forward_kernel"), "value"] *= 1.5
    rows = law.law_rows(slow)
    assert rows["reason"].str.contains("no sum of its parts").all() and rows["residual"].lt(-0.2).all()


def test_where_bytes_bind_the_best_is_8_ninths_and_less_with_no_communication(frame):
    rows = law.law_rows(frame).set_index(["size", "batch"])
    few, many = rows.loc[(16384, 16)], rows.loc[(16384, 4096)]
    assert few["bound"] == "bytes" and 8 / 9 < few["ideal"] < 0.95
    assert many["bound"] == "arithmetic" and many["ideal"] == 1


def test_a_failed_check_leaves_the_case_out(frame):
    assert set(law.law_rows(frames.fail(frame, "block_shock", n=4096))["size"]) == {16384}


def test_with_four_ranks_s_is_still_one_dense_product_over_one_sparse_of_the_same_size():
    four = frames.make((16384,), (4096,), groups=2, repeats=2, noise=0, group_effect=0, world_size=4)
    (row,) = law.law_rows(four).to_dict("records")
    assert row["s"] == pytest.approx(row["a"] / row["ours"] / 2)
    assert row["predicted"] == pytest.approx((row["a"] / 4 + row["reduce"]) / (row["ours"] + row["reduce"]))


def test_the_law_of_a_step_adds_what_was_measured_around_the_products(trained):
    row, parts = law.step_rows(trained).iloc[-1], law.pieces(trained)
    mine = parts[parts["case"].eq(row["case"])].set_index(["method", "part"])["ms"]
    a = mine["dense", NAME["compute"]]

    def step(method, product):
        added = ("reduce", "reduce_dx", "optimizer", "remask", "compress", "refresh")
        return 2 * product + a / 2 + sum(mine.get((method, NAME[name]), 0) for name in added)

    t1, t3 = (step(m, mine[m, NAME["compute"]]) for m in (T1, T3))
    forward = sum(mine[T3, NAME[name]] for name in ("compute", "reduce"))
    shrink = step("row_parallel", a / 2) / t1 / ((a / 2 + mine["row_parallel", NAME["reduce"]]) / forward)
    assert row["predicted_gain"] == pytest.approx(t1 / t3) and row["predicted_shrink"] == pytest.approx(shrink)


def test_the_parts_of_a_forward_sum_to_it_and_of_a_step_to_it_and_what_is_hidden(frame, trained):
    parts = law.pieces(pd.concat([frame, trained]))
    for row in law.law_rows(frame).itertuples(index=False):
        mine = parts[parts["case"].eq(row.case) & parts["method"].eq("block_shock")]
        assert mine["ms"].sum() == pytest.approx(row.ours_forward)
    steps = parts[parts["work"].eq("step")]
    signed = steps["ms"].where(steps["part"].ne(OVER), -steps["ms"])
    whole = trained[trained["metric"].eq("step_kernel")].groupby(["case", "method", "group"])["value"].median()
    whole = np.exp(np.log(whole).groupby(["case", "method"]).mean())
    found = signed.groupby([steps["case"], steps["method"]]).sum()
    assert np.allclose(found.sort_index(), whole.sort_index())


@pytest.mark.parametrize("rows", [pd.DataFrame(), frames.make((4096,), (16,), timed=False)])
def test_without_times_every_table_is_empty(rows):
    for made in (law.law_rows, law.step_rows, law.pieces):
        assert made(rows).empty


def test_the_law_says_what_was_measured_on_the_shipped_gpus():
    rows = law.law_rows(records.load(ROOT / "outputs" / "reference" / "phase1-cuda"))
    # What is left of the law beside B1's product, which at small N takes more than half of A's.
    assert len(rows) == 20 and rows["rest"].abs().max() < 0.1 and rows["rest"].abs().median() < 0.025
    # At large N B1's product takes about half of A's, so the law itself comes as near to what was measured: to the
    # 99% interval, as GPUs at their power cap differ from group to group.
    large = rows[rows["in_features"].ge(16384)]
    beside = np.maximum(large["low"] / large["predicted"], large["predicted"] / large["high"]).clip(lower=1) - 1
    assert len(large) == 10 and beside.max() < 0.1 and beside.median() < 0.025
    rows = law.step_rows(records.load(ROOT / "outputs" / "reference" / "phase3-cuda"))
    assert len(rows) == 6 and (rows["predicted_shrink"] / rows["shrink"] - 1).abs().max() < 0.08


@pytest.mark.parametrize(
    "first, last, told",
    [
        ("bbb/2", "aaa/1", {"forward": "bbb/2", "step": "aaa/1"}),
        ("aaa/1", "aaa/1", {}),
        ("aaa/1", "bbb/1", {}),
        ("", "", {}),
    ],
)
def test_works_of_different_sources_are_named_whatever_the_commit(first, last, told):
    assert law.codes(pd.DataFrame({"phase": ["phase1", "phase3"], "code": [first, last]})) == told


def test_the_figure_counts_cases_below_2_by_their_interval_and_names_why_points_lie_above():
    small = dict(ns=(4096, 8192), bs=(16, 4096), methods=("dense", "row_parallel", "block_shock"), repeats=6)
    fig = law_figure(frames.make(**small))
    assert "below 2 in all 4 cases" in frames.title(fig)
    assert "communication that costs both" in fig.alt and "more than half of A's time" in fig.alt
    fast = frames.make(**small, speedup={("block_shock", 8192, 4096): 1.6})
    assert "its interval below 2 in 3 of 4 cases" in frames.title(law_figure(fast))


def test_the_pieces_of_the_gap_add_up_to_it_in_the_largest_case_of_each_optimizer():
    table = law.gap_table(training_frame(methods=(*THREE["methods"], "block_shock_torch"), noise=1e-4))
    assert list(table["optimizer"]) == ["SGD", "AdamW"] and set(table["shape"]) == {"16384x16384"}
    assert np.allclose(table[PIECES].sum(axis=1), table["T1 - T3 (ms)"], rtol=2e-3)
    assert (table["refresh"] < 0).all() and (table["re-mask + compress"] > 0).all()
    assert (table["T1 - T3 (ms)"] > 0).all()


def test_sparsifying_pays_where_compress_and_2_4_together_beat_dense():
    table = law.break_even_table(training_frame(methods=("masked_dense", T1), noise=1e-4))
    dense, sparse, compress = (table[f"{name} (ms)"] for name in ("dense product", "2:4 product", "compress"))
    assert (table["pays within one"].eq("yes") == (sparse + compress < dense)).all()
    assert {"yes", "no"} == set(table["pays within one"]) and len(table) == 8
    assert (table["pays after (products)"].eq("never") == (sparse >= dense)).all() and (sparse >= dense).any()
    counts = table.loc[sparse < dense, "pays after (products)"].astype(int)
    assert np.allclose(counts, np.ceil(compress / (dense - sparse))[counts.index])


def test_break_even_makes_no_claim_on_a_cpu():
    table = law.break_even_table(training_frame(device="cpu", ns=(256,), bs=(16,)))
    assert set(table["pays within one"]) == {"no claim"}


def test_the_six_ratios_are_quotients_of_times_of_the_same_case():
    frame = training_frame(**THREE, noise=1e-5)
    table = training_ratios(frame)
    assert len(table) == 2 * 2
    row = table[table["optimizer"].eq("sgd") & table["batch"].eq(4096)].iloc[0]
    times = frame[frame["case"].eq(row["case"])].groupby(["method", "metric"])["value"].median()
    b1, t1, t3 = (times[name, "step_kernel"] for name in ("row_parallel", T1, T3))
    forward = times["row_parallel", "forward_kernel"] / times[T3, "forward_kernel"]
    expected = dict(forward=forward, recompress=b1 / t1, packed=b1 / t3, shrink=b1 / t1 / forward, gain=t1 / t3)
    for name, value in (expected | dict(keep=b1 / t3 / forward)).items():
        assert row[name] == pytest.approx(value, rel=0.01), name
        assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
    assert row["groups"] == 3


def faster(frame, by, **where):
    """`frame` with the steps of T1 in those rows `by` times as fast."""
    hit = frame["method"].eq(T1) & frame["metric"].eq("step_kernel")
    for name, value in where.items():
        hit &= frame[name].eq(value)
    return frame.assign(value=frame["value"].mask(hit, frame["value"] / by))


def test_h2_is_supported_where_t1_loses_and_t3_does_not_in_the_largest_case_of_every_optimizer(three):
    verdict = h2(three)
    assert verdict.verdict == "supported" and verdict.high < 1
    assert verdict.line.startswith("H2 supported: s1/f ") and "at 4096x4096, B=4096" in verdict.why
    # A smaller case may differ.
    smaller = h2(faster(three, 5, batch=256))
    assert smaller.verdict == "supported" and "2 of 4 cases agree" in smaller.why


def test_h2_says_what_t3_keeps_and_that_there_was_no_advantage_only_where_that_is_so(three):
    slow = h2(three)
    row = slow.cells[slow.cells["batch"].eq(4096)].sort_values("shrink_high").iloc[-1]
    assert f", s3/f {build.interval(row, 'keep')}, s3/s1 " in slow.why
    assert (slow.cells["forward"] < 1).all() and "below 1 in all 4 cases: no advantage" in slow.why
    fast = h2(training_frame(**THREE, speedup={(T3, "forward_kernel"): 9}))
    assert (fast.cells["forward"] > 1).all() and "no advantage" not in fast.why


def test_one_optimizer_that_does_not_support_leaves_h2_undecided(three):
    undecided = h2(faster(three, 3, optimizer="adamw"))
    assert undecided.verdict == "undecided"
    assert undecided.high > 1, "what is shown is the optimizer that stands in the way"


def test_an_optimizer_that_ran_smaller_cases_alone_counts_with_the_largest_of_them(three):
    less = three[~(three["optimizer"].eq("adamw") & three["batch"].eq(4096))]
    assert h2(less).verdict == "supported" and h2(faster(less, 5, optimizer="adamw")).verdict == "undecided"


@pytest.mark.parametrize("speedup", [{(T1, "step_kernel"): 5}, {(T3, "step_kernel"): 0.2}])
def test_h2_is_refuted_where_the_step_gains_on_the_forward_or_recompression_costs_nothing_in_every_case(speedup):
    assert h2(training_frame(**THREE, speedup=speedup)).verdict == "refuted"


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda frame: frame.assign(device="cpu"), "CPU"),
        (lambda frame: frame.assign(emulated=True), "emulated on one GPU"),
        (lambda frame: frame[frame["group"].eq(0)], "a single group"),
        (lambda frame: frame[~frame["metric"].str.endswith("_kernel")], "kernel time"),
        *((lambda frame, name=name: frames.fail(frame, name), "no case") for name in THREE["methods"]),
        (lambda frame: pd.DataFrame(), "no case"),
        (lambda frame: frames.make((4096,), (16,), groups=2, repeats=2), "no case"),
    ],
)
def test_h2_stays_undecided_and_says_why(three, change, why):
    verdict = h2(change(three))
    assert verdict.verdict == "undecided" and why in verdict.line
    assert verdict.cells.empty == np.isnan(verdict.ratio) == (why == "no case")
    assert why not in ("CPU", "emulated on one GPU") or set(verdict.cells["outcome"]) == {"no claim"}


def test_what_a_group_shares_cancels_in_the_quotients():
    frame = training_frame(**THREE, noise=1e-4)
    lift = frame["value"].where(frame["unit"].ne("ms"), frame["value"] * (1 + frame["group"]))
    still, lifted = training_ratios(frame), training_ratios(frame.assign(value=lift))
    ends = [f"{name}_{end}" for name in ("shrink", "keep", "gain") for end in ("low", "high")]
    assert np.allclose(still[ends], lifted[ends])


def test_a_ratio_and_the_times_beside_it_are_of_the_same_mean():
    """Groups that differ in length and level: a median of all samples is not the mean of the groups' medians."""
    frame = frames.make((4096,), (16, 256), groups=3, repeats=5, group_effect=0.05)
    frame = frame[~(frame["group"].eq(0) & frame["repeat"].gt(1))]
    table = law.law_rows(frame)
    times = (table["b1_forward"] / table["ours_forward"]).to_numpy()
    assert table["ratio"].to_numpy() == pytest.approx(times, rel=1e-9)
