"""How close to the limit: measured numbers where there are any, words where there are none."""

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.files import ROOT
from blockshock_lib.runs import records
from blockshock_lib.studies.linear.report import TABLES, limit
from blockshock_lib.studies.linear.report.limit import limit_figure, over_floor
from tests.report import frames
from tests.report.frames import words

# µs of an eager product on the host.
HOST = {"dense": 9.0, "torch": 420.0, "cslt": 18.0, "small": 14.0}
# Times over the method's floor.
OVER = {"cslt": 2.5, "small": 1.2}
LINKS = {"nccl": 1.4, "one-shot": 1.0}


@pytest.fixture(scope="module")
def run():
    """The run of `frames.make` with every way of each piece; `small` up to B = 64, compression at B = 16 alone."""
    frame, rng, more = frames.make((4096, 16384), (16, 64, 1024), groups=3), np.random.default_rng(7), []
    for _, cell in frame.groupby(["case", "group"], sort=False):
        about = cell.iloc[0].drop(["method", "metric", "unit", "value", "repeat", "rank", "status", "reason", "detail"])
        effect = np.exp(rng.normal(0, 0.004))

        def add(method, metric, value, detail="", unit="ms", about=about, effect=effect):
            for repeat in range(4):
                shaken = value * effect * np.exp(rng.normal(0, 0.01))
                more.append(about.to_dict() | frames.row(method, metric, unit, shaken, repeat, detail=detail))

        value = cell[cell["repeat"].eq(0)].set_index(["method", "metric"])["value"]
        floor, small = value["block_shock", "floor_compute"], about["batch"] <= 64
        for way in ("cslt", "small")[: 1 + small]:
            if small:
                add("block_shock", "product_by_kernel", OVER[way] * floor, way)
            add("block_shock", "host_us", HOST[way], way, "us")
        add("dense", "host_us", HOST["dense"], "dense", "us")
        add("row_parallel", "host_us", 2 * HOST["dense"], "dense", "us")
        add("block_shock_torch", "host_us", HOST["torch"], "torch", "us")
        for method in ("row_parallel", "block_shock"):
            add(method, "forward_graph_call", 1.05 * value[method, "forward_kernel"] + 0.006)
            if about["batch"] >= 1024:
                for chunks, factor in (("1", 1.0), ("2", 0.93)):
                    add(method, "forward_chunks_kernel", factor * value[method, "forward_kernel"], chunks)
        for way, factor in LINKS.items():
            add("row_parallel", "reduce_by_kernel", factor * value["row_parallel", "reduce_kernel"], way)
        if about["batch"] == min(frame["batch"]):
            least = 4 * about["in_features"] * about["out_features"] / 4.3e12 * 1e3
            more.append(about.to_dict() | frames.row("block_shock", "floor_compress", "ms", least))
            add("block_shock", "compress_by_kernel", 50 * least, "library")
            add("block_shock", "compress_by_kernel", 1.6 * least, "by mask")
    named = {("block_shock", "compute_kernel"): "small", ("row_parallel", "compute_kernel"): "dense"}
    named |= {("block_shock_torch", "compute_kernel"): "torch", ("row_parallel", "reduce_kernel"): "one-shot"}
    for (method, metric), detail in named.items():
        frame.loc[frame["method"].eq(method) & frame["metric"].eq(metric), "detail"] = detail
    large = frame["batch"].gt(64) & frame["method"].eq("block_shock") & frame["metric"].eq("compute_kernel")
    frame.loc[large, "detail"] = "cslt"
    frame.loc[frame["metric"].eq("forward_kernel") & frame["batch"].ge(1024), "detail"] = "2"
    return pd.concat([frame, pd.DataFrame(more)], ignore_index=True).astype({"n": "Int64"})


def test_the_gain_over_the_stock_op_is_eager_and_kernel_each_with_its_interval(run):
    table = limit.gain_table(run)
    assert len(table) == 6 and table["B"].tolist() == [16, 64, 1024] * 2
    eager, kernel = (table[f"{name}, over the stock op"].iloc[0] for name in ("eager call", "kernel"))
    # 0.43 ms of host time against 0.045, beside kernels of some 30 µs; the same kernel in both.
    assert float(eager.split("x")[0]) == pytest.approx(0.460 / 0.075, rel=0.1) and "[" in eager
    assert float(kernel.split("x")[0]) == pytest.approx(1, rel=0.05)
    assert table["eager call: claim"].iloc[0] == "faster" and table["kernel: claim"].iloc[0] == "undecided"


def test_each_product_has_its_time_and_its_share_of_the_floor(run):
    table = limit.product_table(run)
    row, large = table.iloc[1], table.iloc[2]
    assert row["small-batch (µs)"] == pytest.approx(row["planned (µs)"] * OVER["small"] / OVER["cslt"], rel=0.03)
    assert row["best 2:4, % of floor"] == pytest.approx(100 / OVER["small"], rel=0.03)
    said = float(row["small-batch over planned"].split("x [")[0])
    assert said == pytest.approx(OVER["cslt"] / OVER["small"], rel=0.03)
    moved = run[run["method"].eq("block_shock") & run["metric"].isin(["bytes_read", "bytes_written"])]
    moved = moved[moved["in_features"].eq(4096) & moved["batch"].eq(64) & moved["group"].eq(0)]["value"].sum()
    assert row["best 2:4 (GB/s)"] == pytest.approx(moved / row["small-batch (µs)"] / 1e3, rel=0.02)
    assert pd.isna(large["small-batch (µs)"]) and large["small-batch over planned"] == "–"


def test_compression_is_over_its_floor_and_over_the_library(run):
    table = limit.compression_table(run)
    assert table["shape"].tolist() == ["4096x4096"] * 2 + ["16384x16384"] * 2
    assert table["compression"].tolist() == ["cuSPARSELt, by value", "ours, by mask"] * 2
    assert table["time / floor"].tolist() == pytest.approx([50, 1.6] * 2, rel=0.03)
    assert table["over cuSPARSELt"].iloc[0] == "–"
    assert float(table["over cuSPARSELt"].iloc[1].split("x")[0]) == pytest.approx(50 / 1.6, rel=0.03)


def test_a_newcomer_that_was_timed_stands_in_every_table_beside_ours(run):
    """A second packed method, twice as slow as ours throughout."""
    ours = run[run["method"].eq("block_shock")]
    slower = ours["value"].mask(
        ours["unit"].isin(["ms", "us"]) & ~ours["metric"].str.startswith("floor"), 2 * ours["value"]
    )
    both = pd.concat([run, ours.assign(method="newcomer", value=slower)], ignore_index=True)
    products = limit.product_table(both)
    times = ours[ours["metric"].eq("compute_kernel")].groupby(["in_features", "batch"])["value"].median()
    assert products["newcomer (µs)"].tolist() == pytest.approx((2e3 * times).tolist(), rel=0.02)
    assert len(products) == 6 and (products["newcomer, % of floor"] < 60).all()
    for table, column in (
        (limit.gain_table(both), "kernel, over the stock op"),
        (limit.call_table(both), "kernel (µs)"),
    ):
        rows = table.set_index(["shape", "B", "method"])[column]
        one = [float(str(rows["4096x4096", 64, name]).split("x")[0]) for name in ("Block-Shock", "newcomer")]
        assert sorted(one)[1] / sorted(one)[0] == pytest.approx(2, rel=0.05)
    hosts = limit.host_table(both).set_index("product")["host (µs)"]
    assert hosts["newcomer: 2:4, small-batch kernel"] == pytest.approx(2 * HOST["small"], rel=0.05)
    packed = limit.compression_table(both)
    assert packed.groupby("method").size().to_dict() == {"Block-Shock": 4, "newcomer": 4}
    assert packed.set_index("method").loc["newcomer", "time / floor"].tolist() == pytest.approx(
        [100, 3.2] * 2, rel=0.03
    )
    pd.testing.assert_frame_equal(
        packed[packed["method"].eq("Block-Shock")].reset_index(drop=True), limit.compression_table(run)
    )


def test_the_all_reduce_has_bandwidth_by_backend_and_the_one_that_was_taken(run):
    table = limit.reduce_table(run)
    row = table.iloc[1]
    assert (row["KiB"], row["taken"]) == (64 * 4096 * 2 / 1024, "one-shot")
    assert row["one-shot (GB/s)"] == pytest.approx(64 * 4096 * 2 / row["one-shot (µs)"] / 1e3, rel=0.02)
    assert row["nccl (µs)"] == pytest.approx(1.4 * row["one-shot (µs)"], rel=0.03)


def test_a_failed_check_takes_the_method_out_of_everything(run):
    failed = frames.fail(run, "block_shock")
    assert "Block-Shock" not in set(limit.call_table(failed)["method"])
    assert "not measured" in limit.gain_table(failed).iloc[0, 0]
    assert "2:4, small-batch kernel" not in set(limit.host_table(failed)["product"])
    assert set(over_floor(failed)["way"]) == {"dense", "torch"}


@pytest.mark.parametrize(
    "name", ("products", "over the stock op", "calls", "host", "compression", "all-reduce", "chunks")
)
def test_what_was_not_measured_is_said_in_words_and_no_number_is_given(name):
    cpu = frames.make(ns=(256,), bs=(16,), device="cpu", kernel=True)
    older = records.load(ROOT / "outputs" / "reference" / "phase1-cuda")
    lacks = ["product_by_kernel", "reduce_by_kernel", "compress_by_kernel", "forward_chunks_kernel", "host_us"]
    older = older[~older["metric"].isin([*lacks, "forward_graph_call"]) & older["method"].ne("block_shock_torch")]
    older = older.assign(detail=older["detail"].where(older["metric"].ne("compute_kernel"), ""))
    for frame in (cpu, older, pd.DataFrame()):
        table = TABLES[name](frame)
        assert table.shape == (1, 1) and table.iloc[0, 0].startswith("not measured: ")
    assert "CPU" in str(limit.call_table(cpu).iloc[0, 0]) and "no valid row" in limit.host_table(older).iloc[0, 0]


def test_every_way_is_its_time_over_the_floor_of_its_method(run):
    table = over_floor(run)
    small = table[table["way"].eq("small")]
    assert len(small) == 4 and small["over"].to_numpy() == pytest.approx(OVER["small"], rel=0.03)
    dense = table[table["way"].eq("dense")]
    assert set(dense["method"]) == {"row_parallel"} and len(dense) == 6
    ours = table[table["way"].isin(["cslt", "small"])]
    assert set(ours["method"]) == {"block_shock"}
    both = small.merge(dense, on="case", suffixes=("", "_dense"))
    assert len(both) == 4 and (both["floor_dense"] < both["floor"]).all()


def test_a_cpu_makes_no_claim_and_an_empty_frame_says_so():
    cpu = limit_figure(frames.make(ns=(256,), bs=(16,), device="cpu", kernel=True))
    assert "no claim about speed: CPU" in words(cpu) and "times its floor" not in words(cpu)
    for nothing in (pd.DataFrame(), frames.make(timed=False)):
        assert "nothing to draw" in words(limit_figure(nothing))
