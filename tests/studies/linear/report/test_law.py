"""The law beside the measurement."""

import pytest

from blockshock_lib.studies.linear.report import FIGURES, law
from tests.report import frames
from tests.studies.linear.report.shipped import shipped


def test_a_machine_that_obeys_the_law_leaves_nothing_over():
    obeys = frames.make((16384,), (4096,), groups=2, repeats=2, noise=0, group_effect=0)
    times = {"dense": 4.0, "row_parallel": 2.0, "block_shock": 2.5}
    for method, ms in times.items():
        mine = obeys["method"].eq(method)
        obeys.loc[mine & obeys["metric"].eq("compute_kernel"), "value"] = ms
        obeys.loc[mine & obeys["metric"].eq("reduce_kernel"), "value"] = 0.5
        obeys.loc[mine & obeys["metric"].eq("forward_kernel"), "value"] = ms + 0.5 * (method != "dense")
    (row,) = law.law_rows(obeys).to_dict("records")
    assert row["s"] == 1.6 and row["predicted"] == pytest.approx(2.5 / 3) and row["ratio"] == pytest.approx(2.5 / 3)
    assert row["residual"] == pytest.approx(0)
    # With four ranks s is still one dense product over one sparse of the same size.
    four = frames.make((16384,), (4096,), groups=2, repeats=2, noise=0, group_effect=0, world_size=4)
    (row,) = law.law_rows(four).to_dict("records")
    assert row["s"] == pytest.approx(row["a"] / row["ours"] / 2)
    assert row["predicted"] == pytest.approx((row["a"] / 4 + row["reduce"]) / (row["ours"] + row["reduce"]))


def test_without_a_time_of_the_collective_s_stays_and_the_law_says_nothing():
    """As with ranks played by one GPU."""
    frame = frames.make((4096, 8192), (16, 4096), groups=3, repeats=4)
    table = law.law_table(frame[~frame["metric"].eq("reduce_kernel")])
    assert len(table) == 4 and set(table["the law says"]) == {"–"} == set(table["law inside the interval"])
    assert not table["s"].eq("–").any()


def test_a_ratio_and_the_times_beside_it_are_of_the_same_mean():
    """Groups that differ in length and level: a median of all samples is not the mean of the groups' medians."""
    frame = frames.make((4096,), (16, 256), groups=3, repeats=5, group_effect=0.05)
    frame = frame[~(frame["group"].eq(0) & frame["repeat"].gt(1))]
    table = law.law_rows(frame)
    times = (table["b1_forward"] / table["ours_forward"]).to_numpy()
    assert table["ratio"].to_numpy() == pytest.approx(times, rel=1e-9)


@pytest.mark.parametrize("name", ("where", "step over B1", "step time over B1", "loss"))
def test_optimizers_never_share_a_panel(name):
    axes = FIGURES[name](shipped("phase3-cuda-before", repeats=2)).axes
    found = list(filter(None, (ax.get_title(loc="left") for ax in axes)))
    assert any("SGD" in one for one in found) and any("AdamW" in one for one in found)
    assert all(("SGD" in one) != ("AdamW" in one) for one in found)
