from functools import partial

import numpy as np
import pandas as pd
import pytest

from blockshock_lib.report import tables
from blockshock_lib.studies.linear.axes import AXES
from tests.report import frames

NAMES = ("correctness_table", "error_table", "reasons", "speed_table", "top_kernels")
OF_STUDY = tuple(partial(getattr(tables, name), axes=AXES) for name in NAMES)
correctness_table, error_table, reasons, speed_table, top_kernels = OF_STUDY


def memory_table(frame):
    return tables.memory_table(frame, AXES, {"weight": "weight_bytes", "peak": "peak_bytes"}, whole="weight")


ALL = (*OF_STUDY, memory_table, tables.ceilings_table, tables.machine_table)


@pytest.fixture(scope="module")
def phase0():
    masks, workloads = ("checkerboard", "random", "uniform_1100"), ("mlp_up", "gaussian")
    return frames.make((256,), (16,), device="cpu", groups=1, timed=False, masks=masks, workloads=workloads)


@pytest.fixture(scope="module")
def phase1():
    return frames.make((4096, 40960), (16, 4096), repeats=5)


def test_correctness_says_pass_unsupported_and_fail(phase0):
    table = correctness_table(frames.fail(phase0, "block_shock", mask="random"))
    assert list(table.index)[:2] == [("uniform_1100", "gaussian"), ("uniform_1100", "mlp_up")]
    assert table.loc[("random", "gaussian"), "Block-Shock"] == "FAIL"
    assert table.loc[("checkerboard", "gaussian"), "Block-Shock"] == "pass"
    assert table.loc[("random", "mlp_up"), "D permuted dense"] == "unsupported"
    assert set(table["Block-Shock (stock op)"]) == {"unsupported"}


def test_correctness_says_the_worst_of_a_field_and_why_is_said_beside_it(phase0):
    twice = pd.concat([phase0, frames.make((512,), (16,), device="cpu", groups=1, timed=False)], ignore_index=True)
    field = ("checkerboard", "gaussian"), "B1 row-parallel"
    for status, word in (("unsupported", "pass, some unsupported"), ("oom", "out of memory"), ("failed", "FAIL")):
        broken = frames.fail(twice, "row_parallel", n=512, status=status, reason="why")
        assert correctness_table(broken).loc[field] == word
        assert ("B1 row-parallel", status, 1, "why") in set(reasons(broken).itertuples(index=False, name=None))


def test_a_check_that_ran_and_did_not_hold_is_a_fail(phase0):
    zero = phase0["value"].mask(phase0["metric"].eq("check") & phase0["method"].eq("dense"), 0.0)
    frame = phase0.assign(value=zero)
    assert set(correctness_table(frame)["A dense"]) == {"FAIL"}


def test_errors_are_the_worst_of_valid_cells(phase0):
    frame = phase0.copy()
    place = frame.index[frame["metric"].eq("error_max_ratio") & frame["method"].eq("dense")][0]
    frame.loc[place, "value"] = 1.9
    assert error_table(frame).loc["A dense", "worst max ratio (x, gate 2)"] == 1.9
    broken = frames.fail(frame, "dense", mask=frame.loc[place, "mask"])
    assert error_table(broken).loc["A dense", "worst max ratio (x, gate 2)"] < 1.9


def test_speed_parts_add_up_and_the_floor_is_a_share(phase1):
    table = speed_table(phase1)
    assert len(table) == 4 * 7
    parts = table["compute (ms)"] + table["exposed communication (ms)"] + table["host (ms)"]
    assert np.allclose(parts, table["call (ms)"])
    assert table["of floor (%)"].between(1, 110).all()
    spread = table["kernel p10–p90 (ms)"].str.split("–", expand=True).astype(float)
    assert (spread[0] <= table["kernel (ms)"]).all() and (table["kernel (ms)"] <= spread[1]).all()


def test_speed_claims_only_what_the_interval_excludes(phase1):
    table = speed_table(phase1)
    own = table["method"].eq("B1 row-parallel")
    interval = table.loc[~own, "vs B1"].str.extract(r"\[(.+), (.+)\]").astype(float)
    assert (table.loc[~own, "claim"].eq("faster") == interval[0].gt(1)).all()
    assert (table.loc[~own, "claim"].eq("slower") == interval[1].lt(1)).all()
    assert set(table.loc[~own, "claim"]) >= {"faster", "slower"}
    assert set(table.loc[own, "vs B1"]) == {"1 (itself)"} and set(table.loc[own, "claim"]) == {"–"}


def test_speed_on_a_cpu_carries_no_claim():
    table = speed_table(frames.make((256,), (16,), device="cpu", groups=2, repeats=3))
    assert set(table["claim"]) == {"no claim", "–"}
    plain = speed_table(frames.make((256,), (16,), device="cpu", kernel=True, groups=2, repeats=3))
    assert plain["host (ms)"].isna().all(), "both times are plain calls: their difference is no host time"
    assert table["call (ms)"].gt(0).all()


def test_memory_shows_nine_sixteenths_on_the_fullest_gpu(phase1):
    table = memory_table(phase1).set_index(["shape", "B", "method"])
    ours = table.loc[("40960x40960", 16, "Block-Shock")]
    assert ours["weight (GiB)"] == 1.758
    assert ours["weight / dense"] == 9 / 16
    assert table.loc[("40960x40960", 4096, "Block-Shock"), "peak / formula"] > 1
    peaks = phase1[phase1["metric"].eq("peak_bytes") & phase1["method"].eq("block_shock") & phase1["batch"].eq(16)]
    assert ours["peak (GiB)"] == pytest.approx(peaks["value"].max() / 2**30, rel=5e-4)


def test_ceilings_and_gpus_are_summarised(phase1):
    ceilings = tables.ceilings_table(phase1).set_index("ceiling")
    assert ceilings.loc["dense GEMM", "median"] == pytest.approx(720, rel=0.03)
    gpus = tables.machine_table(phase1).set_index("GPU")
    assert list(gpus.index) == [0, 1]
    assert list(gpus["cases throttled (%)"]) == [0, 100]
    assert list(gpus["reasons"]) == ["", "power cap"]
    assert "shared for sums (GiB)" not in gpus


@pytest.mark.parametrize("table", ALL)
def test_no_records_give_an_empty_table(table):
    assert table(pd.DataFrame()).empty
    assert len(table(frames.make((4096,), (16,), groups=1, repeats=1).iloc[:0])) == 0
