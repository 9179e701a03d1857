import ast
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from blockshock_lib import records, report
from blockshock_lib.report import cells
from tests.report import frames
from tests.report.training_frames import training_frame


@pytest.fixture(scope="module")
def small():
    return frames.make((4096, 8192), (16, 256), groups=2, repeats=3)


def test_a_cell_whose_check_failed_gives_no_samples(small):
    broken = frames.fail(small, "block_shock", n=4096, batch=16)
    found = cells.samples(broken, "forward_kernel")
    ours = found[found["method"].eq("block_shock")]
    assert not (ours["in_features"].eq(4096) & ours["batch"].eq(16)).any()
    assert len(ours) == 3 * 2 * 3, "the other three cells keep their samples"
    assert found["method"].eq("row_parallel").sum() == 4 * 2 * 3


def test_a_check_that_failed_in_one_group_removes_the_cell_in_all_groups(small):
    hit = small["method"].eq("dense") & small["metric"].eq("check") & small["group"].eq(1) & small["batch"].eq(16)
    broken = small.assign(value=small["value"].mask(hit, 0.0))
    found = cells.samples(broken, "forward_kernel")
    assert set(found.loc[found["method"].eq("dense"), "batch"]) == {256}


def test_without_any_check_there_is_no_number(small):
    assert cells.samples(small[~small["metric"].eq("check")], "forward_kernel").empty


def test_the_slowest_rank_is_the_sample_where_ranks_are_listed_one_by_one(small):
    one = small[small["metric"].eq("forward_kernel")]
    listed = pd.concat(
        [one.assign(rank=0), one.assign(rank=1, value=one["value"] * 2), small[small["metric"].eq("check")]]
    )
    found = cells.samples(listed, "forward_kernel")
    assert len(found) == len(one)
    assert np.isclose(found["value"].sum(), 2 * one["value"].sum())


def test_a_row_of_all_ranks_wins_over_rows_of_single_ranks(small):
    one = small[small["metric"].eq("forward_kernel")]
    both = pd.concat([small, one.assign(rank=1, value=one["value"] * 2)], ignore_index=True)
    found = cells.samples(both, "forward_kernel")
    assert len(found) == len(one)
    assert np.isclose(found["value"].sum(), one["value"].sum())


def test_kinds_are_told_apart():
    frame = pd.DataFrame({"device": ["cuda", "cuda", "cpu"], "emulated": [False, True, False]})
    assert list(cells.kind(frame)) == ["gpu", "emulated", "cpu"]


def test_focus_prefers_real_gpus_and_names_what_it_left_out(small):
    cpu = frames.make((256, 512, 1024), (16, 64), device="cpu", groups=1, repeats=2, masks=("random", "checkerboard"))
    chosen, words = cells.focus(pd.concat([cpu, small], ignore_index=True))
    assert set(chosen["device"]) == {"cuda"}
    assert "2 GPUs, bf16, checkerboard mask" in words
    assert "2 other settings not drawn" in words


def test_focus_takes_one_optimizer_unless_the_figure_gives_each_a_panel():
    training = training_frame(ns=(4096,), bs=(256,), methods=("dense",), groups=1, repeats=1)
    chosen, words = cells.focus(training)
    assert set(chosen["optimizer"]) == {"sgd"} and words.endswith("SGD (1 other setting not drawn)")
    chosen, words = cells.focus(training, panels=("optimizer",))
    assert set(chosen["optimizer"]) == {"sgd", "adamw"} and "SGD" not in words and "not drawn" not in words


def test_records_from_before_training_have_no_optimizer(small):
    old = small.drop(columns="optimizer")
    pd.testing.assert_frame_equal(cells.summary(old, "forward_kernel"), cells.summary(small, "forward_kernel"))
    assert cells.focus(old)[1] == cells.focus(small)[1]


def test_the_time_of_plain_calls_on_a_cpu_is_not_named_kernel_time(small):
    assert cells.time_name(small, "forward_kernel") == "kernel time of a forward"
    assert "kernel" not in cells.time_name(small.assign(device="cpu"), "forward_kernel")
    assert cells.time_name(small, "step_call") == "call time of a training step"
    assert cells.time_name(small, "pass_kernel") == "kernel time of a forward and dX"


def test_call_time_stands_in_only_where_nothing_has_a_kernel_time(small):
    assert cells.time_metric(small) == "forward_kernel"
    assert cells.time_metric(frames.make((256,), (16,), device="cpu", groups=1, repeats=2)) == "forward_call"
    calls = training_frame(ns=(4096,), bs=(256,), methods=("dense",), groups=1, repeats=1, kernel=False)
    assert cells.time_metric(calls, "step_kernel") == "step_call"


def test_the_worst_check_row_decides(small):
    twice = pd.concat([small, frames.fail(small, "dense", status="oom", reason="asked for 3 GiB")], ignore_index=True)
    outcome = cells.checks(twice).set_index("method")["outcome"]
    assert set(outcome["dense"]) == {"oom"}
    assert set(outcome["row_parallel"]) == {"passed"}


def test_the_columns_are_those_of_loaded_records(small):
    assert set(cells.COLUMNS) == {*records.CASE_COLUMNS, *records.ROW_COLUMNS} == set(small.columns)


def test_reports_read_records_and_run_nothing():
    # page.py also reads the manifest beside its notebook, for the verdict.
    files = {"page.py": ("blockshock_lib.manifest", "blockshock_lib.records")}
    for path in Path(report.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                assert name.split(".")[0] != "torch", path.name
                known = tuple(f"blockshock_lib.{room}" for room in ("report", "methods", "errors"))
                known += files.get(path.name, ())
                assert not name.startswith("blockshock_lib.") or name.startswith(known), path.name
