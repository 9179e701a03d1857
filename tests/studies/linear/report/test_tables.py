"""How close to the limit: measured numbers where there are any, words where there are none."""

import pandas as pd
import pytest

from blockshock_lib.studies.linear.report import TABLES, tables
from blockshock_lib.studies.linear.report.tables import over_floor
from tests.report import frames
from tests.studies.linear.report.shipped import shipped


@pytest.fixture(scope="module")
def run():
    """Of the shipped run, whose own tables test_shipped knows."""
    frame = shipped("phase1-cuda-before", repeats=99)
    return frame[frame["in_features"].le(8192) & frame["group"].lt(2)].reset_index(drop=True)


def test_a_newcomer_that_was_timed_stands_beside_ours_and_a_failed_check_takes_ours_out(run):
    """A second packed method, twice as slow as ours throughout."""
    ours = run[run["method"].eq("block_shock")]
    timed = ours["unit"].isin(["ms", "us"]) & ~ours["metric"].str.startswith("floor")
    newcomer = ours.assign(method="newcomer", value=ours["value"].mask(timed, 2 * ours["value"]))
    both = pd.concat([run, newcomer], ignore_index=True)
    for _, cell in tables.call_table(both).groupby(["shape", "B"]):
        one, other = (cell.set_index("method").loc[name, "kernel (µs)"] for name in ("Block-Shock", "newcomer"))
        assert other / one == pytest.approx(2, rel=0.02)
    failed = frames.fail(run, "block_shock")
    assert "Block-Shock" not in set(tables.call_table(failed)["method"])
    assert set(over_floor(failed)["way"]) == {"dense", "torch"}


@pytest.mark.parametrize("name", ("products", "calls", "all-reduce", "chunks"))
def test_what_was_not_measured_is_said_in_words_and_no_number_is_given(name, run):
    cpu = frames.make(ns=(256,), bs=(16,), device="cpu", kernel=True)
    lacks = ["product_by_kernel", "reduce_by_kernel", "forward_chunks_kernel", "forward_graph_call"]
    older = run[~run["metric"].isin(lacks) & run["method"].ne("block_shock_torch")]
    older = older.assign(detail=older["detail"].where(older["metric"].ne("compute_kernel"), ""))
    for frame in (cpu, older):
        table = TABLES[name](frame)
        assert table.shape == (1, 1) and table.iloc[0, 0].startswith("not measured: ")
    assert "CPU" in str(tables.call_table(cpu).iloc[0, 0]) and "no valid row" in tables.call_table(older).iloc[0, 0]
