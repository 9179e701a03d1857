import numpy as np
import pytest

from blockshock_lib.engine import work
from blockshock_lib.report import labels
from blockshock_lib.report.training import ways
from tests.report.training_frames import METHODS, training_frame


@pytest.fixture(scope="module")
def phase3():
    return training_frame(groups=2, repeats=2)


def test_dw_strategies_are_told_apart_and_the_taken_one_is_named(phase3):
    table = ways.dw_table(phase3)
    assert np.allclose(table["full (ms)"] / table["periodic (ms)"], 2, rtol=0.01)
    assert np.allclose(table["exchange (ms)"] / table["periodic (ms)"], 1.2, rtol=0.01)
    assert set(table["method"]) == {labels.label(m) for m in METHODS[5:]}
    stock = table["method"].eq(labels.label("block_shock_torch"))
    assert set(table.loc[stock, "taken"]) == {"full"} and set(table.loc[~stock, "taken"]) == {"periodic"}


def test_a_strategy_that_cannot_run_leaves_a_gap_and_no_row_is_lost(phase3):
    ours = phase3["method"].eq("block_shock") & phase3["detail"].eq("periodic")
    table = ways.dw_table(phase3[~(ours & phase3["metric"].eq("dw_strategy_kernel"))])
    assert table.loc[table["method"].eq("Block-Shock"), "periodic (ms)"].isna().all() and len(table) == 8 * 3


def test_both_orders_of_the_backward_stand_beside_each_other(phase3):
    table = ways.order_table(phase3)
    assert set(ways.ORDERS) == set(work.ORDERS.values())
    assert np.allclose(table["in turn / overlapped"], table["in turn (ms)"] / table["overlapped (ms)"], rtol=0.01)
    faster = np.where(table["in turn / overlapped"] > 1, "overlapped", "in turn")
    assert (table["taken"] == faster).all() and set(faster) == set(ways.ORDERS)
    assert labels.label("dense") not in set(table["method"])


def test_a_way_measured_alone_has_no_ratio(phase3):
    one = phase3[~(phase3["metric"].eq("backward_order_kernel") & phase3["detail"].eq("in turn"))]
    assert list(ways.order_table(one))[-2:] == ["overlapped (ms)", "taken"]


def test_where_groups_chose_differently_each_choice_is_counted(phase3):
    mixed = phase3["metric"].eq("backward_kernel") & phase3["method"].eq("row_parallel") & phase3["group"].eq(1)
    one = phase3.assign(detail=phase3["detail"].mask(mixed, "in turn"))
    table = ways.order_table(one)
    b1 = table["method"].eq(labels.label("row_parallel"))
    assert set(table.loc[b1, "taken"]) == {"in turn in 1 of 2, overlapped in 1 of 2"}
    assert set(table.loc[~b1, "taken"]) == set(ways.ORDERS)
