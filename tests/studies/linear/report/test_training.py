"""Tables and figures of phases 2 and 3."""

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.studies.linear.axes import AXES
from blockshock_lib.studies.linear.report import FIGURES, TABLES, bars, training
from blockshock_lib.studies.linear.report.memory import training_memory_table
from tests.report import frames
from tests.report.frames import words
from tests.studies.linear.report.shipped import shipped

ALL = ("tensors", "pieces", "dW", "order", "step memory")
# Those of a step that say something of speed or bytes, then the others.
SPEED = ("pieces of a step", "step memory", "step over B1", "step time over N")
DRAWN = (*SPEED, "loss", "pieces of a pass")


@pytest.fixture(scope="module")
def phase3():
    return shipped("phase3-cuda", repeats=2)


def field(table, method, tensor, optimizer="SGD"):
    rows = table[table["method"].eq(AXES.label(method)) & table["optimizer"].eq(optimizer)]
    return rows[tensor].item()


def test_every_tensor_of_every_method_has_a_field(phase3):
    table = training.tensor_table(phase3)
    assert list(table) == ["optimizer", "method", "y", "dX", "dW", "db", "W after steps"]
    assert len(table) == 2 * len(AXES.methods)
    assert list(table["optimizer"].unique()) == ["SGD", "AdamW"]
    assert set(table.to_numpy()[:, 2:].ravel()) == {"pass"}
    assert list(training.tensor_table(shipped("phase2-cuda"))) == ["method", "y", "dX"]


def test_a_tensor_over_the_gate_fails_and_what_comes_after_it_is_not_reached(phase3):
    frame = frames.fail(phase3, "block_shock", n=4096, reason="rank 1: dw: largest error is 3x")
    bad = frame["method"].eq("block_shock") & frame["in_features"].eq(4096)
    ratio = frame["metric"].eq("error_max_ratio") & frame["detail"].eq("dw")
    frame["value"] = frame["value"].mask(bad & ratio, 3.0)
    frame = frame[~(bad & frame["detail"].isin(["db", "weight"]))]
    table = training.tensor_table(frame)
    said = [field(table, "block_shock", name) for name in ("y", "dX", "dW", "db", "W after steps")]
    assert said == ["pass", "pass", "FAIL", "not reached", "not reached"]
    assert field(table, "row_parallel", "dW") == "pass"


def test_a_tensor_of_nan_fails_though_it_has_no_error(phase3):
    frame = frames.fail(phase3, "block_shock", reason="rank 0: dx holds NaN or Inf")
    frame = frame[~(frame["method"].eq("block_shock") & frame["detail"].isin(["dx", "dw", "db", "weight"]))]
    table = training.tensor_table(frame)
    assert [field(table, "block_shock", name) for name in ("y", "dX", "dW")] == ["pass", "FAIL", "not reached"]


def test_a_failed_check_whose_errors_are_all_small_still_fails_somewhere(phase3):
    for reason in ("rank 0: y after 3 steps: largest error is 9x", "loss is NaN at step 17 (tensor dw)"):
        table = training.tensor_table(frames.fail(phase3, "block_shock", reason=reason))
        assert [field(table, "block_shock", name) for name in ("dW", "W after steps")] == ["pass", "FAIL"]
    table = training.tensor_table(frames.fail(phase3, "block_shock", reason="rank 0: dx: RMS error is 9x"))
    assert [field(table, "block_shock", name) for name in ("y", "dX", "db")] == ["pass", "FAIL", "not reached"]


def test_a_run_in_which_no_method_came_to_its_first_check_fails_in_y(phase3):
    frame = phase3[phase3["metric"].eq("check")]
    for method in AXES.methods:
        frame = frames.fail(frame, method, reason="rank 0: AttributeError: no such thing")
    table = training.tensor_table(frame)
    assert set(table["y"]) == {"FAIL"} and len(table) == 2 * len(AXES.methods)


def test_unsupported_and_out_of_memory_are_said_of_every_tensor(phase3):
    frame = frames.fail(phase3, "dense", status="oom", reason="asked for 3 GiB")
    frame = frames.fail(frame, "masked_dense", status="unsupported", reason="why")
    table = training.tensor_table(frame)
    assert field(table, "dense", "dW") == "out of memory" and field(table, "masked_dense", "y") == "unsupported"


def test_the_largest_gap_of_a_loss_is_found_at_its_step(phase3):
    frame = phase3[phase3["optimizer"].eq("sgd") & phase3["metric"].isin(["check", "loss"])]
    at = frame["metric"].eq("loss") & frame["repeat"].eq(17)
    b1 = frame.loc[at & frame["method"].eq("row_parallel"), "value"].item()
    frame = frame.assign(value=frame["value"].mask(at & frame["method"].eq("block_shock"), 1.5 * b1))
    table = training.loss_table(frame).set_index("method")
    assert table.loc["Block-Shock", "B1: at step"] == "17" and table.loc["B1 row-parallel", "B1: at step"] == "–"
    assert table.loc["Block-Shock", "largest gap to B1 (%)"] == pytest.approx(50)


def test_the_largest_n_says_what_bounds_it_and_the_smallest_of_several_runs_counts(phase3):
    one = phase3[phase3["optimizer"].eq("adamw")]
    one = one.assign(detail=one["detail"].mask(one["metric"].eq("largest_n"), "memory"))
    hit = one["metric"].eq("largest_n") & one["method"].eq("block_shock")
    detail = one["detail"].mask(hit, "2:4 library")
    other = one.assign(run="other", value=one["value"].mask(hit, 40960), detail=detail)
    for frame in (pd.concat([one, other], ignore_index=True), pd.concat([other, one], ignore_index=True)):
        table = training.largest_table(frame).set_index("method")
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


@pytest.mark.parametrize("name", [*ALL, "step"])
def test_no_records_of_training_give_an_empty_table(name, phase3):
    for frame in (pd.DataFrame(), phase3.iloc[:0]):
        assert len(TABLES[name](frame)) == 0
    TABLES[name](frames.make((4096,), (16,), groups=1, repeats=1))


@pytest.mark.parametrize("name", DRAWN)
def test_no_data_gives_a_figure_that_says_so(name, phase3):
    nothing = frames.make((4096,), (16,), groups=1, repeats=1)
    nothing = nothing[~nothing["unit"].isin(["ms", "B"])]
    failed = phase3
    for method in AXES.methods:
        failed = frames.fail(failed, method)
    for frame in (pd.DataFrame(), phase3.iloc[:0], nothing, failed):
        assert "nothing to draw" in words(FIGURES[name](frame))


@pytest.mark.parametrize("name", SPEED)
def test_cpu_and_emulated_figures_say_that_they_make_no_claim(name, phase3):
    assert "no claim about speed: CPU" in words(FIGURES[name](phase3.assign(device="cpu")))
    assert "no claim about speed: emulated" in words(FIGURES[name](phase3.assign(emulated=True)))
    assert "no claim" not in words(FIGURES[name](phase3))


@pytest.mark.parametrize("name", DRAWN[:-1])
def test_optimizers_never_share_a_panel(name, phase3):
    found = list(filter(None, (ax.get_title(loc="left") for ax in FIGURES[name](phase3).axes)))
    assert any("SGD" in one for one in found) and any("AdamW" in one for one in found)
    assert all(("SGD" in one) != ("AdamW" in one) for one in found)


def test_pieces_rest_and_hidden_add_up_to_the_whole(phase3):
    table = bars.step_pieces(phase3)
    pieces = table[list(bars.PIECE_LOOKS)].sum(axis=1)
    total = pieces + table[bars.REST] - table[bars.HIDDEN]
    assert np.allclose(total, table["whole"])
    assert (table[bars.HIDDEN] > 0).any(), "dX's all-reduce hides behind dW in some of these records"
    slow = phase3["value"].mask(phase3["metric"].eq("step_kernel"), phase3["value"] * 3)
    table = bars.step_pieces(phase3.assign(value=slow))
    assert (table[bars.HIDDEN] == 0).all() and (table[bars.REST] > 0).all()
