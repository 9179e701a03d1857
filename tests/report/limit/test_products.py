"""Each way of the product over its own method's floor, once a case."""

import pytest

from blockshock_lib.report.limit.products import over_floor
from tests.report import frames
from tests.report.limit import frames as limit


@pytest.fixture(scope="module")
def table():
    return over_floor(limit.make())


def test_every_way_is_its_time_over_the_floor_of_its_method(table):
    small = table[table["way"].eq("small")]
    assert len(small) == 4 and small["over"].to_numpy() == pytest.approx(limit.OVER["small"], rel=0.03)
    dense = table[table["way"].eq("dense")]
    assert set(dense["method"]) == {"row_parallel"} and len(dense) == 6
    ours = table[table["way"].isin(["cslt", "small"])]
    assert set(ours["method"]) == {"block_shock"}
    both = small.merge(dense, on="case", suffixes=("", "_dense"))
    assert len(both) == 4 and (both["floor_dense"] < both["floor"]).all()


def test_a_product_with_one_way_is_the_one_that_was_timed(table):
    large = table[table["batch"].eq(1024)]
    assert large["way"].tolist() == ["dense", "torch", "cslt"] * 2


def test_a_case_has_each_way_once_and_smallest_first(table):
    assert not table.duplicated(["case", "way"]).any()
    assert table["size"].is_monotonic_increasing
    first = table[table["case"].eq(table.iloc[0]["case"])]
    assert first["way"].tolist() == ["dense", "torch", "cslt", "small"]


def test_older_records_name_no_way():
    table = over_floor(frames.make(ns=(4096,), bs=(16,)))
    assert table["way"].tolist() == ["dense", "torch", ""]


def test_a_method_that_failed_its_check_has_no_line():
    run = frames.fail(limit.make(), "block_shock")
    assert set(over_floor(run)["way"]) == {"dense", "torch"}
    assert over_floor(run.iloc[:0]).empty
