"""The tables of "How close to the limit": measured numbers where there are any, words where there are none."""

import pandas as pd
import pytest

from blockshock_lib import manifest, records
from blockshock_lib.report.limit import tables
from tests.report import frames
from tests.report.limit import frames as limit

ALL = ("product_table", "gain_table", "call_table", "host_table", "compression_table", "reduce_table", "chunks_table")


@pytest.fixture(scope="module")
def run():
    return limit.make()


def test_the_gain_over_the_stock_op_is_eager_and_kernel_each_with_its_interval(run):
    table = tables.gain_table(run)
    assert len(table) == 6 and table["B"].tolist() == [16, 64, 1024] * 2
    eager, kernel = (table[f"{name}, over the stock op"].iloc[0] for name in ("eager call", "kernel"))
    # 0.43 ms of host time against 0.045, beside kernels of some 30 µs; the same kernel in both.
    assert float(eager.split("x")[0]) == pytest.approx(0.460 / 0.075, rel=0.1) and "[" in eager
    assert float(kernel.split("x")[0]) == pytest.approx(1, rel=0.05)
    assert table["eager call: claim"].iloc[0] == "faster" and table["kernel: claim"].iloc[0] == "undecided"


def test_each_product_has_its_time_and_its_share_of_the_floor(run):
    table = tables.product_table(run)
    row, large = table.iloc[1], table.iloc[2]
    assert row["small-batch (µs)"] == pytest.approx(
        row["planned (µs)"] * limit.OVER["small"] / limit.OVER["cslt"], rel=0.03
    )
    assert row["best 2:4, % of floor"] == pytest.approx(100 / limit.OVER["small"], rel=0.03)
    said = float(row["small-batch over planned"].split("x [")[0])
    assert said == pytest.approx(limit.OVER["cslt"] / limit.OVER["small"], rel=0.03)
    moved = run[run["method"].eq("block_shock") & run["metric"].isin(["bytes_read", "bytes_written"])]
    moved = moved[moved["in_features"].eq(4096) & moved["batch"].eq(64) & moved["group"].eq(0)]["value"].sum()
    assert row["best 2:4 (GB/s)"] == pytest.approx(moved / row["small-batch (µs)"] / 1e3, rel=0.02)
    assert pd.isna(large["small-batch (µs)"]) and large["small-batch over planned"] == "–"


def test_a_call_has_its_eager_its_graphs_and_its_kernels_time(run):
    table = tables.call_table(run)
    assert table["method"].tolist() == ["B1 row-parallel", "Block-Shock"] * 6
    assert (table["graph call (µs)"] > table["kernel (µs)"]).all()
    assert (table["eager call (µs)"] > table["graph call (µs)"]).all()
    assert (table["eager / graph"] > 1).all()
    assert table["graph, vs B1"].iloc[0] == "1 (itself)" and "x [" in table["graph, vs B1"].iloc[1]


def test_host_time_is_in_microseconds_of_each_way(run):
    table = tables.host_table(run).set_index("product")
    assert table.index.tolist() == [
        "dense (A)",
        "2:4, stock op",
        "2:4, cuSPARSELt planned",
        "2:4, small-batch kernel",
    ]
    assert table["host (µs)"].tolist() == pytest.approx(list(limit.HOST.values()), rel=0.03)
    assert table["cells"].tolist() == [6, 6, 6, 4]


def test_compression_is_over_its_floor_and_over_the_library(run):
    table = tables.compression_table(run)
    assert table["shape"].tolist() == ["4096x4096"] * 2 + ["16384x16384"] * 2
    assert table["compression"].tolist() == ["cuSPARSELt, by value", "ours, by mask"] * 2
    assert table["time / floor"].tolist() == pytest.approx([50, 1.6] * 2, rel=0.03)
    assert table["over cuSPARSELt"].iloc[0] == "–"
    assert float(table["over cuSPARSELt"].iloc[1].split("x")[0]) == pytest.approx(50 / 1.6, rel=0.03)


def test_the_all_reduce_has_bandwidth_by_backend_and_the_one_that_was_taken(run):
    table = tables.reduce_table(run)
    row = table.iloc[1]
    assert (row["KiB"], row["taken"]) == (64 * 4096 * 2 / 1024, "one-shot")
    assert row["one-shot (GB/s)"] == pytest.approx(64 * 4096 * 2 / row["one-shot (µs)"] / 1e3, rel=0.02)
    assert row["nccl (µs)"] == pytest.approx(1.4 * row["one-shot (µs)"], rel=0.03)


def test_what_cutting_the_batch_takes_is_beside_what_was_chosen(run):
    table = tables.chunks_table(run)
    assert table["B"].tolist() == [1024] * 4 and set(table["taken"]) == {"2"}
    assert (table["2 (ms)"] < table["1 (ms)"]).all()


def test_a_failed_check_takes_the_method_out_of_every_table(run):
    failed = frames.fail(run, "block_shock")
    assert "Block-Shock" not in set(tables.call_table(failed)["method"])
    assert "not measured" in tables.gain_table(failed).iloc[0, 0]
    assert "2:4, small-batch kernel" not in set(tables.host_table(failed)["product"])


@pytest.mark.parametrize("name", ALL)
def test_what_was_not_measured_is_said_in_words_and_no_number_is_given(name):
    cpu = frames.make(ns=(256,), bs=(16,), device="cpu", kernel=True)
    older = records.load(manifest.ROOT / "outputs" / "reference" / "phase1-cuda")
    older = older[~older["metric"].isin(["product_by_kernel", "reduce_by_kernel", "compress_by_kernel", "host_us"])]
    older = older[~older["metric"].isin(["forward_graph_call", "forward_chunks_kernel"])]
    older = older[older["method"].ne("block_shock_torch")]
    older = older.assign(detail=older["detail"].where(older["metric"].ne("compute_kernel"), ""))
    for frame in (cpu, older, pd.DataFrame()):
        table = getattr(tables, name)(frame)
        assert table.shape == (1, 1) and table.iloc[0, 0].startswith("not measured: ")
    assert "CPU" in str(tables.call_table(cpu).iloc[0, 0]) and "no valid row" in tables.host_table(older).iloc[0, 0]


def test_records_older_than_the_engine_claim_no_gain_of_it(run):
    old = run.assign(detail=run["detail"].where(run["metric"].ne("compute_kernel"), ""))
    assert tables.gain_table(old).iloc[0, 0] == "not measured: these records are older than the engine"
