"""The tables behind H2: every ratio with its interval, and the pieces of the gap between T1 and T3."""

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.report import verdicts
from blockshock_lib.report.training import h2
from blockshock_lib.report.training.ratios import training_ratios
from tests.report.training_frames import training_frame

FOUR = ("row_parallel", "block_shock", "block_shock_recompress", "block_shock_torch")
PIECES = ["re-mask + compress", "refresh", "optimizer step", "dW", "rest"]


@pytest.fixture(scope="module")
def run():
    return training_frame(methods=FOUR, noise=1e-4)


def test_the_ratios_stand_with_their_intervals_and_the_stock_op_beside_them(run):
    table, numbers = h2.ratios_table(run), training_ratios(run)
    assert len(table) == len(numbers) == 8
    assert table.loc[0, "s3/f"] == verdicts.quotient_text(numbers.iloc[0], "keep")
    assert table.loc[0, "T3 over T1"] == verdicts.quotient_text(numbers.iloc[0], "gain")
    stock = verdicts.ratio(run, "block_shock_torch", "block_shock", "step_kernel").set_index("case")
    said = [verdicts.interval_text(stock.loc[case]) for case in numbers["case"]]
    assert list(table["T3 over stock T1"]) == said


def test_without_the_stock_op_its_column_is_a_dash(run):
    table = h2.ratios_table(run[run["method"].ne("block_shock_torch")])
    assert set(table["T3 over stock T1"]) == {"–"} and len(table) == 8


def test_the_pieces_of_the_gap_add_up_to_it_in_the_largest_case_of_each_optimizer(run):
    table = h2.gap_table(run)
    assert list(table["optimizer"]) == ["SGD", "AdamW"] and set(table["shape"]) == {"16384x16384"}
    assert np.allclose(table[PIECES].sum(axis=1), table["T1 - T3 (ms)"], rtol=2e-3)
    assert (table["refresh"] < 0).all() and (table["re-mask + compress"] > 0).all()
    assert (table["T1 - T3 (ms)"] > 0).all()


def test_a_slower_optimizer_moves_its_own_column_alone(run):
    slow = run["method"].eq("block_shock_recompress") & run["metric"].eq("optimizer_kernel")
    later = h2.gap_table(run.assign(value=run["value"].mask(slow, run["value"] + 1)))
    before = h2.gap_table(run)
    assert np.allclose(later["optimizer step"] - before["optimizer step"], 1, atol=1e-2)
    assert np.allclose(later["rest"] - before["rest"], -1, atol=1e-2)
    same = ["re-mask + compress", "refresh", "dW", "T1 - T3 (ms)"]
    assert np.allclose(later[same], before[same])


def test_s1_over_f_without_recompression_takes_re_mask_and_compress_off_t1s_step(run):
    table = h2.gap_table(run)
    row = training_ratios(run).query("size == 16384 and batch == 4096 and optimizer == 'sgd'").iloc[0]
    rows = run[run["case"].eq(row["case"]) & run["method"].eq("block_shock_recompress")]
    step, remask, compress = (
        rows.loc[rows["metric"].eq(f"{m}_kernel"), "value"].median() for m in ("step", "remask", "compress")
    )
    left = float(table.loc[0, "s1/f without"].split("x")[0])
    assert left == pytest.approx(row["shrink"] * step / (step - remask - compress), abs=6e-3)


def test_no_records_of_training_give_empty_tables(run):
    for frame in (pd.DataFrame(), run.iloc[:0], run[run["method"].ne("block_shock")]):
        assert h2.ratios_table(frame).empty and h2.gap_table(frame).empty
