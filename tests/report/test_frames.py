import numpy as np
import pandas as pd
import pytest

from blockshock_lib.report.frames import focus, samples
from blockshock_lib.studies.linear.axes import AXES
from tests.report import frames


@pytest.fixture(scope="module")
def small():
    return frames.make((4096, 8192), (16, 256), groups=2, repeats=3)


def test_a_cell_whose_check_failed_in_a_group_or_was_never_made_gives_no_samples(small):
    rows = samples(frames.fail(small, "block_shock", n=4096, batch=16), "forward_kernel")
    ours = rows[rows["method"].eq("block_shock")]
    assert not (ours["in_features"].eq(4096) & ours["batch"].eq(16)).any()
    assert len(ours) == 3 * 2 * 3, "the other three cells keep their samples"
    assert rows["method"].eq("row_parallel").sum() == 4 * 2 * 3
    hit = frames.where(small, method="dense", metric="check", group=1, batch=16)
    rows = samples(small.assign(value=small["value"].mask(hit, 0.0)), "forward_kernel")
    assert set(rows.loc[rows["method"].eq("dense"), "batch"]) == {256}
    assert samples(small[~small["metric"].eq("check")], "forward_kernel").empty


def test_the_slowest_rank_is_the_sample_and_a_row_of_all_ranks_wins(small):
    whole = small[small["metric"].eq("forward_kernel")]
    slower = whole.assign(rank=1, value=whole["value"] * 2)
    listed = pd.concat([whole.assign(rank=0), slower, small[small["metric"].eq("check")]])
    for frame, factor in ((listed, 2), (pd.concat([small, slower], ignore_index=True), 1)):
        rows = samples(frame, "forward_kernel")
        assert len(rows) == len(whole)
        assert np.isclose(rows["value"].sum(), factor * whole["value"].sum())


def test_focus_prefers_real_gpus_and_names_what_it_left_out(small):
    cpu = frames.make((256, 512, 1024), (16, 64), device="cpu", groups=1, repeats=2, masks=("random", "checkerboard"))
    rows, words = focus(pd.concat([cpu, small], ignore_index=True), AXES)
    assert set(rows["device"]) == {"cuda"}
    for rows, alone in ((small, "1 GPU, bf16"), (cpu, "1 CPU process, bf16")):
        assert focus(rows.assign(world_size=1), AXES)[1].startswith(alone)
    assert "2 GPUs, bf16, checkerboard mask" in words and "2 other settings not drawn" in words
