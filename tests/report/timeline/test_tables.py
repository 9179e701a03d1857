"""Where the time went: sums that one can do by hand, and the shipped traces."""

import numpy as np
import pandas as pd
import pytest

from blockshock_lib import records
from blockshock_lib.manifest import ROOT
from blockshock_lib.report.timeline import tables, traces
from tests.report.timeline import chrome

REFERENCE = ROOT / "outputs" / "reference"
PARTS = ["compute (ms)", "exposed (ms)", "idle (ms)"]


def one(folder, events, **more):
    chrome.write(folder, events, **more)
    return tables.exposed(traces.read(folder)).iloc[0]


def test_overlaps_are_counted_once_and_only_bare_communication_is_exposed(tmp_path):
    # compute 0-40 (two kernels that overlap) and 60-70; communication 30-50 and 45-65; idle 70-80; compute 80-100.
    row = one(
        tmp_path,
        [
            chrome.event("a", 0, 30),
            chrome.event("b", 20, 20),
            chrome.event("ncclDevKernel_AllReduce", 30, 20, tid=8),
            chrome.event("symm_mem copy", 45, 20, tid=9),
            chrome.event("c", 60, 10),
            chrome.event("d", 80, 20),
        ][::-1],
        base=None,
    )
    # Counted from the end of the first collective, 50: communication 50-65, of it 60-65 under compute.
    assert row["span (ms)"] == pytest.approx(0.050)
    assert row["compute (ms)"] == pytest.approx(0.030) and row["communication (ms)"] == pytest.approx(0.015)
    assert row["exposed (ms)"] == pytest.approx(0.010) and row["idle (ms)"] == pytest.approx(0.010)
    assert (row["compute (%)"], row["exposed (%)"], row["idle (%)"]) == (60, 20, 20) and row["clock"] == "one rank"


def test_the_first_call_is_left_out_for_the_ranks_only_met_at_its_end(tmp_path):
    # Rank 1 starts 900 us late, so rank 0's first all-reduce takes 910 us.
    chrome.write(
        tmp_path,
        [chrome.event("gemm", 0, 100), chrome.event("ncclAllReduce", 100, 910), *chrome.calls(1010, 100, 10, 2)],
    )
    chrome.write(tmp_path, chrome.calls(900, 100, 10), rank=1)
    work = traces.read(tmp_path)
    table = tables.exposed(work)
    assert set(table["clock"]) == {"shared"} and table["span (ms)"].to_numpy() == pytest.approx([0.22, 0.22])
    assert table["exposed (%)"].to_numpy() == pytest.approx([9.1, 9.1])
    parts = tables.stretches(work)
    assert parts["start_ms"].min() == pytest.approx(0.9), "drawn from when both were at work"
    lead = parts[~parts["counted"]]
    assert lead["end_ms"].max() == pytest.approx(1.01) == parts.loc[parts["counted"], "start_ms"].min()


def test_a_single_collective_leaves_nothing_out(tmp_path):
    row = one(tmp_path, chrome.calls(0, 90, 10, count=1))
    assert row["span (ms)"] == pytest.approx(0.1) and row["exposed (%)"] == 10


def test_ranks_without_a_common_clock_have_spans_of_their_own(tmp_path):
    chrome.write(tmp_path, chrome.calls(0, 90, 10), base=None)
    chrome.write(tmp_path, chrome.calls(5_000_000, 40, 10), rank=1)
    table = tables.exposed(traces.read(tmp_path))
    assert set(table["clock"]) == {"own"}
    assert list(table["span (ms)"]) == pytest.approx([0.2, 0.1]) and list(table["exposed (%)"]) == [10, 20]


def test_gloo_counts_as_communication_and_what_hides_it_as_compute(tmp_path):
    events = [chrome.op("aten::mm", 0, 50), chrome.gloo(50, 10)]
    row = one(tmp_path, [*events, chrome.op("aten::mm", 70, 30), chrome.gloo(90, 40), chrome.op("aten::add", 140, 10)])
    assert row["span (ms)"] == pytest.approx(0.09) and row["communication (ms)"] == pytest.approx(0.04)
    assert row["exposed (ms)"] == pytest.approx(0.03) and row["idle (ms)"] == pytest.approx(0.02)


@pytest.mark.parametrize("name", ["phase1-cpu", "phase1-cuda"])
def test_in_the_shipped_runs_compute_exposed_and_idle_fill_the_span(name):
    table = tables.exposed(traces.read(REFERENCE / name, strict=True))
    assert len(table) == (11 if "cpu" in name else 13)
    assert np.allclose(table[PARTS].sum(axis=1), table["span (ms)"], rtol=2e-3)
    assert (table["exposed (ms)"] <= table["communication (ms)"] + 1e-9).all()
    dense = table[table["method"].eq("A dense")].iloc[0]
    assert dense["communication (ms)"] == 0 and dense["compute (%)"] > 98


def test_the_shipped_gpu_traces_tell_the_same_as_the_records():
    # Two of three calls are counted. The profiler looks at few calls, at clocks of their own.
    work, frame = traces.read(REFERENCE / "phase1-cuda"), records.load(REFERENCE / "phase1-cuda")
    table = tables.exposed(work).set_index(["method", "rank"])
    frame = frame[frame["case"].eq(work["case"].iloc[0])]
    for method, name in (("row_parallel", "B1 row-parallel"), ("block_shock", "Block-Shock")):
        mine = frame[frame["method"].eq(method)].groupby("metric")["value"].median()
        assert table.loc[(name, 0), "span (ms)"] == pytest.approx(2 * mine["forward_kernel"], rel=0.15)
        share = 100 * mine["reduce_kernel"] / mine["forward_kernel"]
        assert table.loc[name]["exposed (%)"].between(0.5 * share, 2 * share).all()
        assert table.loc[name]["idle (%)"].max() < 0.2


def test_stretches_of_a_kind_never_overlap_and_idle_touches_no_work():
    parts = tables.stretches(traces.read(REFERENCE / "phase1-cpu"))
    for _, rank in parts.groupby(["method", "rank"]):
        for kinds in (["compute", "idle", "exposed"], ["communication", "idle"]):
            rows = rank[rank["kind"].isin(kinds)].sort_values("start_ms")
            assert (rows["start_ms"].to_numpy()[1:] >= rows["end_ms"].to_numpy()[:-1] - 1e-9).all()
    assert (parts["end_ms"] > parts["start_ms"]).all()


def test_no_traces_give_tables_without_rows(tmp_path):
    work = traces.read(tmp_path)
    assert tables.stretches(work).empty and tables.exposed(work).empty
    assert tables.top_kernels(work, "dense").empty
    assert "exposed (%)" in tables.exposed(work)


def test_cases_are_told_apart_only_where_there_are_several(tmp_path):
    chrome.write(tmp_path, chrome.calls(0, 90, 10))
    assert "case" not in tables.exposed(traces.read(tmp_path))
    chrome.write(tmp_path, chrome.calls(0, 90, 10), case="ba9876543210")
    assert list(tables.exposed(traces.read(tmp_path))["case"]) == ["0123456789ab", "ba9876543210"]


def test_top_kernels_add_up_the_calls_of_a_name_largest_first(tmp_path):
    chrome.write(tmp_path, [*chrome.calls(0, 90, 10), chrome.event("void tiny<3>(int)", 400, 1)])
    chrome.write(tmp_path, chrome.calls(0, 10, 90), rank=1)
    work = traces.read(tmp_path)
    table = tables.top_kernels(work, "block_shock")
    assert list(table["kernel"]) == ["gemm", "ncclDevKernel_AllReduce_Sum", "tiny"]
    assert list(table["time (ms)"]) == pytest.approx([0.27, 0.03, 0.001]) and list(table["stretches"]) == [3, 3, 1]
    assert table["share (%)"].sum() == pytest.approx(100, abs=0.1)
    assert tables.top_kernels(work, "block_shock", rank=1)["kernel"].iloc[0] == "ncclDevKernel_AllReduce_Sum"
    assert len(tables.top_kernels(work, "block_shock", count=1)) == 1


def test_merging_and_subtracting_agree_with_a_count_on_a_grid():
    rng = np.random.default_rng(0)
    for _ in range(30):
        sides = []
        for _ in range(2):
            begin = rng.integers(0, 60, 8)
            sides.append(pd.DataFrame({"start_ms": begin, "duration_ms": rng.integers(1, 12, 8)}))
        grid = np.arange(0.5, 80)
        inside = [
            np.any(
                [(row.start_ms < grid) & (grid < row.start_ms + row.duration_ms) for row in side.itertuples()], axis=0
            )
            for side in sides
        ]
        merged = [tables._merged(side) for side in sides]
        assert [float(np.diff(part).sum()) for part in merged] == [part.sum() for part in inside]
        assert np.diff(tables._minus(*merged)).sum() == (inside[0] & ~inside[1]).sum()
