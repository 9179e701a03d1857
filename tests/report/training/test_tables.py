import numpy as np
import pandas as pd
import pytest

from blockshock_lib.report import labels, tables
from blockshock_lib.report.training import tables as training_tables
from blockshock_lib.report.training import ways
from blockshock_lib.report.training.memory import memory_parts, training_memory_table
from tests.report import frames
from tests.report.training_frames import METHODS, training_frame

ALL = (
    training_tables.tensor_table,
    training_tables.how_table,
    training_tables.pieces_table,
    training_tables.stages_table,
    ways.dw_table,
    ways.order_table,
    training_tables.break_even_table,
    training_tables.loss_table,
    training_tables.largest_table,
    training_memory_table,
)
SMALL = dict(ns=(4096,), bs=(256, 4096), groups=2, repeats=2)


@pytest.fixture(scope="module")
def phase3():
    return training_frame(groups=2, repeats=2)


@pytest.fixture(scope="module")
def phase2():
    return training_frame(phase="phase2", masks=("checkerboard", "random"), groups=2, repeats=3)


def field(table, method, tensor, optimizer="SGD"):
    rows = table[table["method"].eq(labels.label(method)) & table["optimizer"].eq(optimizer)]
    return rows[tensor].item()


def test_every_tensor_of_every_method_has_a_field(phase3, phase2):
    table = training_tables.tensor_table(phase3)
    assert list(table) == ["optimizer", "method", "y", "dX", "dW", "db", "W after steps"]
    assert len(table) == 2 * len(METHODS)
    assert list(table["optimizer"].unique()) == ["SGD", "AdamW"]
    assert set(table.to_numpy()[:, 2:].ravel()) == {"pass"}
    assert list(training_tables.tensor_table(phase2)) == ["method", "y", "dX"]


def test_a_tensor_over_the_gate_fails_and_what_comes_after_it_is_not_reached(phase3):
    frame = frames.fail(phase3, "block_shock", n=4096, batch=256, reason="rank 1: dw: largest error is 3x")
    bad = frame["method"].eq("block_shock") & frame["in_features"].eq(4096) & frame["batch"].eq(256)
    ratio = frame["metric"].eq("error_max_ratio") & frame["detail"].eq("dw")
    frame["value"] = frame["value"].mask(bad & ratio, 3.0)
    frame = frame[~(bad & frame["detail"].isin(["db", "weight"]))]
    table = training_tables.tensor_table(frame)
    said = [field(table, "block_shock", name) for name in ("y", "dX", "dW", "db", "W after steps")]
    assert said == ["pass", "pass", "FAIL", "not reached", "not reached"]
    assert field(table, "row_parallel", "dW") == "pass"


def test_a_tensor_of_nan_fails_though_it_has_no_error(phase3):
    frame = frames.fail(phase3, "block_shock", reason="rank 0: dx holds NaN or Inf")
    frame = frame[~(frame["method"].eq("block_shock") & frame["detail"].isin(["dx", "dw", "db", "weight"]))]
    table = training_tables.tensor_table(frame)
    assert [field(table, "block_shock", name) for name in ("y", "dX", "dW")] == ["pass", "FAIL", "not reached"]


def test_a_failed_check_whose_errors_are_all_small_still_fails_somewhere(phase3):
    for reason in ("rank 0: y after 3 steps: largest error is 9x", "loss is NaN at step 17 (tensor dw)"):
        table = training_tables.tensor_table(frames.fail(phase3, "block_shock", reason=reason))
        assert [field(table, "block_shock", name) for name in ("dW", "W after steps")] == ["pass", "FAIL"]
    table = training_tables.tensor_table(frames.fail(phase3, "block_shock", reason="rank 0: dx: RMS error is 9x"))
    assert [field(table, "block_shock", name) for name in ("y", "dX", "db")] == ["pass", "FAIL", "not reached"]


def test_a_run_in_which_no_method_came_to_its_first_check_fails_in_y(phase3):
    frame = phase3[phase3["metric"].eq("check")]
    for method in METHODS:
        frame = frames.fail(frame, method, reason="rank 0: AttributeError: no such thing")
    table = training_tables.tensor_table(frame)
    assert set(table["y"]) == {"FAIL"} and len(table) == 2 * len(METHODS)


def test_unsupported_and_out_of_memory_are_said_of_every_tensor(phase3):
    frame = frames.fail(phase3, "dense", status="oom", reason="asked for 3 GiB")
    frame = frames.fail(frame, "masked_dense", status="unsupported", reason="why")
    table = training_tables.tensor_table(frame)
    assert field(table, "dense", "dW") == "out of memory" and field(table, "masked_dense", "y") == "unsupported"


def test_errors_have_a_row_a_tensor(phase3):
    frame = phase3.copy()
    hit = frame["method"].eq("dense") & frame["detail"].eq("dw") & frame["metric"].eq("error_max_ratio")
    frame.loc[frame.index[hit][0], "value"] = 1.9
    table = tables.error_table(frame)
    assert table.loc[("A dense", "dW"), "worst max ratio (x, gate 2)"] == 1.9
    assert table.loc[("A dense", "dX"), "worst max ratio (x, gate 2)"] < 1.4
    assert list(table.loc["A dense"].index) == list(labels.TENSORS.values())


def test_errors_of_a_forward_alone_keep_one_row_a_method():
    table = tables.error_table(frames.make((4096,), (16,), groups=1, repeats=1))
    assert table.index.nlevels == 1 and table.index.name == "method"


def test_how_dx_is_made_stands_for_every_mask(phase2):
    frame = phase2.copy()
    random = frame["mask"].eq("random") & frame["metric"].eq("dx_kernel") & frame["method"].eq("block_shock")
    frame["detail"] = frame["detail"].mask(random, "dense masked")
    table = training_tables.how_table(frame)
    assert list(table["Block-Shock"]) == ["dense masked", "2:4"] and list(table.index) == ["random", "checkerboard"]
    assert set(table["B1 row-parallel"]) == {"dense"}


def test_the_whole_table_gives_ratio_claim_and_tokens_a_second(phase3):
    table = training_tables.whole_table(phase3, "step")
    assert len(table) == 8 * len(METHODS)
    assert np.allclose(table["tokens/s"], 1e3 * table["B"] / table["step (ms)"], rtol=2e-3)
    own = table["method"].eq("B1 row-parallel")
    assert set(table.loc[own, "vs B1"]) == {"1 (itself)"}
    interval = table.loc[~own, "vs B1"].str.extract(r"\[(.+), (.+)\]").astype(float)
    assert (table.loc[~own, "claim"].eq("slower") == interval[1].lt(1)).all()
    first = table[table["shape"].eq("4096x4096") & table["B"].eq(256)]
    assert list(first["optimizer"].unique()) == ["SGD", "AdamW"], "the two never share a row, and SGD comes first"


def test_a_pass_has_the_same_table(phase2):
    table = training_tables.whole_table(phase2, "pass")
    assert "pass (ms)" in table and set(table["mask"]) == {"checkerboard", "random"} and "optimizer" not in table


def test_a_piece_that_a_method_lacks_is_a_dash(phase3):
    table = training_tables.pieces_table(phase3).set_index("method")
    assert set(table.loc["Block-Shock", "compress"]) == {"–"} and set(table.loc["A dense", "dX collective"]) == {"–"}
    assert set(table.loc["B1 row-parallel", "refresh"]) == {"–"} and "–" not in set(table.loc["Block-Shock", "refresh"])


def test_stages_stand_beside_their_floor(phase3):
    table = training_tables.stages_table(phase3)
    assert np.allclose(table["time / floor"], table["time (ms)"] / table["floor (ms)"], rtol=0.01)
    ours = table[table["method"].eq("Block-Shock")]
    assert set(ours["stage"]) == {"refresh"} and len(ours) == 8
    assert {"re-mask", "compress"} <= set(table["stage"])


def test_sparsifying_pays_where_compress_and_2_4_together_beat_dense():
    methods = ("masked_dense", "block_shock_recompress")
    table = training_tables.break_even_table(training_frame(methods=methods, noise=1e-4))
    both = table["2:4 product (ms)"] + table["compress (ms)"]
    assert (table["pays within one"].eq("yes") == (both < table["dense product (ms)"])).all()
    assert {"yes", "no"} == set(table["pays within one"])
    slower = table["2:4 product (ms)"] >= table["dense product (ms)"]
    assert (table["pays after (products)"].eq("never") == slower).all() and slower.any()
    counts = table[~slower]
    gain = counts["dense product (ms)"] - counts["2:4 product (ms)"]
    assert len(table) == 8
    assert np.allclose(counts["pays after (products)"].astype(int), np.ceil(counts["compress (ms)"] / gain))


def test_break_even_makes_no_claim_on_a_cpu():
    table = training_tables.break_even_table(training_frame(device="cpu", ns=(256,), bs=(16,)))
    assert set(table["pays within one"]) == {"no claim"}


def test_the_largest_gap_of_a_loss_is_found_at_its_step():
    frame = training_frame(**SMALL, optimizers=("sgd",))
    hit = frame["metric"].eq("loss") & frame["method"].eq("block_shock") & frame["repeat"].eq(17)
    frame["value"] = frame["value"].mask(hit, frame["value"] * 1.5)
    table = training_tables.loss_table(frame).set_index("method")
    for name in ("A", "B1"):
        assert table.loc["Block-Shock", f"{name}: at step"] == "17"
        assert table.loc["Block-Shock", f"largest gap to {name} (%)"] == pytest.approx(50, abs=0.5)
    assert table.loc["A dense", "A: at step"] == "–" and table.loc["B1 row-parallel", "largest gap to A (%)"] < 1
    assert table.loc["B1 row-parallel", "B1: at step"] == "–"


def test_a_gap_is_over_the_loss_that_it_is_measured_from():
    frame = training_frame(**SMALL, optimizers=("sgd",))
    hit = frame["metric"].eq("loss") & frame["method"].eq("row_parallel") & frame["repeat"].eq(17)
    frame["value"] = frame["value"].mask(hit, frame["value"] * 2)
    table = training_tables.loss_table(frame).set_index("method")
    assert table.loc["B1 row-parallel", "largest gap to A (%)"] == pytest.approx(100, abs=0.5)
    assert table.loc["Block-Shock", "largest gap to B1 (%)"] == pytest.approx(50, abs=0.5)


def test_the_forwards_collective_names_the_bias_only_where_there_is_one(phase3, phase2):
    assert "forward collective + bias" in training_tables.pieces_table(phase3)
    names = set(training_tables.pieces_table(phase2))
    assert "forward collective" in names and not any("bias" in name for name in names)


def test_the_largest_n_has_a_row_an_optimizer_and_method(phase3):
    table = training_tables.largest_table(phase3)
    assert len(table) == 2 * len(METHODS)
    names = ["B", "optimizer", "method", "largest N, not tried", "bound by"]
    assert list(table.loc[0, names]) == [4096, "SGD", "A dense", "61440", "memory, by formula"]


def test_the_largest_n_says_what_bounds_it_and_the_smallest_of_several_runs_counts(phase3):
    one = phase3[phase3["optimizer"].eq("sgd")]
    hit = one["metric"].eq("largest_n") & one["detail"].eq("memory") & one["method"].eq("block_shock")
    detail = one["detail"].mask(hit, "2:4 library")
    other = one.assign(run="other", value=one["value"].mask(hit, 40960), detail=detail)
    for frame in (pd.concat([one, other], ignore_index=True), pd.concat([other, one], ignore_index=True)):
        table = training_tables.largest_table(frame).set_index("method")
        assert list(table.loc["Block-Shock", ["largest N, not tried", "bound by"]]) == ["40960", "2:4 library"]
        assert set(table["bound by"].drop("Block-Shock")) == {"memory, by formula"}


def test_memory_deviations_from_the_formula_are_shown(phase3):
    frame = phase3.copy()
    hit = frame["method"].eq("block_shock") & frame["metric"].eq("gradient_bytes")
    frame["value"] = frame["value"].mask(hit, frame["value"] * 1.1)
    table = training_memory_table(frame).set_index("method")
    gradients = next(name for name in table if name.startswith("gradients"))
    assert table.loc["Block-Shock", gradients].str.endswith("(+10.0%)").all()
    assert not table.loc["B1 row-parallel", gradients].str.contains("%").any()
    assert np.allclose(table["off (%)"], 3.0)


def test_a_few_bytes_beside_a_formula_of_zero_are_no_deviation(phase3):
    hit = phase3["method"].eq("masked_dense") & phase3["metric"].eq("copies_bytes")
    for value, text in ((16.0, "0"), (2.0**28, "0.25 (formula: 0)")):
        table = training_memory_table(phase3.assign(value=phase3["value"].mask(hit, value))).set_index("method")
        assert set(table.loc["C masked dense", "packed copies (GiB)"]) == {text}


def test_memory_parts_are_of_the_fullest_rank(phase3):
    more = phase3[phase3["metric"].eq("weights_bytes_held")]
    table = memory_parts(pd.concat([phase3, more.assign(rank=1, value=more["value"] * 2)], ignore_index=True))
    assert (table["weights_bytes_held"] == 2 * table["weights_bytes_held_formula"]).all()


@pytest.mark.parametrize("table", [*ALL, lambda frame: training_tables.whole_table(frame, "step")])
def test_no_records_of_training_give_an_empty_table(table, phase3):
    for frame in (pd.DataFrame(), phase3.iloc[:0]):
        assert len(table(frame)) == 0
    table(frames.make((4096,), (16,), groups=1, repeats=1))


@pytest.mark.parametrize("table", [*ALL, lambda frame: training_tables.whole_table(frame, "step")])
def test_the_order_of_the_records_does_not_matter(table):
    frame = training_frame(**SMALL, methods=("dense", "row_parallel", "block_shock", "block_shock_recompress"))
    pd.testing.assert_frame_equal(table(frame), table(frame.sample(frac=1, random_state=3)))


@pytest.mark.parametrize("table", [training_tables.tensor_table, training_tables.how_table])
def test_what_is_compared_between_machines_holds_text_only(table, phase3):
    assert all(isinstance(value, str) for value in table(phase3).to_numpy().ravel())
