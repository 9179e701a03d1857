"""A product that is not finite costs its method the row, all the way from two real ranks to the page."""

import json

import matplotlib.text
import pytest

from blockshock_lib import launch, params, plan, records
from blockshock_lib.report import labels, plots, tables, verdicts
from tests.faults import not_finite, workers

SETTINGS = {
    "sweep.n": [128],
    "sweep.b": list(not_finite.PLANTED.values()),
    "methods": ["dense", "row_parallel", "block_shock"],
    "timing.groups": 1,
    "timing.samples": 3,
    "timing.warmup": 1,
    "profile": "none",
}
DRAWN = (plots.time_vs_n, plots.stacked, plots.roofline)  # every method that has a time
COMPARED = (plots.ratio_heatmap, plots.law)  # nothing where one of the compared has none
NAME = labels.label("block_shock")


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    """What is planted -> the records of its case, and the files they were read from."""
    folder = tmp_path_factory.mktemp("run")
    asked = params.load("phase1", SETTINGS, choose={"hardware": "cpu"})
    cases, fault = plan.expand(asked), not_finite.by_batch
    launch.run(asked, cases, folder, measure=fault, run_name="r1", context=workers.CONTEXT)
    frame = records.load(folder, strict=True)
    files = {case.batch: folder / "records" / f"{case.id}-0.json" for case in cases}
    return {what: (frame[frame.batch == batch], files[batch]) for what, batch in not_finite.PLANTED.items()}


def words(figure):
    return " ".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


@pytest.mark.parametrize("what", [what for what in not_finite.PLANTED if what != "nothing"])
def test_nan_or_inf_in_a_product(what, frames):
    frame, path = frames[what]
    mine = frame[frame.method == "block_shock"]
    failed = mine[mine.status == "failed"]
    assert failed.metric.tolist() == ["check"] and "y holds NaN or Inf" in failed.reason.iloc[0]
    assert not (mine.unit.eq("ms") & mine.status.eq("ok")).any()
    assert {row["value"] for row in json.loads(path.read_text())["rows"] if row["status"] != "ok"} == {None}

    assert tables.correctness_table(frame)[NAME].tolist() == ["FAIL"]
    assert NAME in tables.failures(frame).method.tolist()
    assert sorted(tables.speed_table(frame).method) == sorted(map(labels.label, ("dense", "row_parallel")))
    assert verdicts.ratio(frame, "row_parallel", "block_shock").empty
    assert all(verdict(frame).verdict == "undecided" for verdict in (verdicts.h1, verdicts.h3))
    assert "FAIL" in verdicts.one_line(frame)
    for figure in DRAWN:
        assert labels.label("row_parallel") in words(figure(frame)), figure.__name__
        assert NAME not in words(figure(frame)), figure.__name__
    for figure in COMPARED:
        assert "nothing to draw" in words(figure(frame)), figure.__name__


def test_without_the_fault_there_is_a_time_in_each_of_them(frames):
    frame, _ = frames["nothing"]
    assert NAME in tables.speed_table(frame).method.tolist()
    assert len(verdicts.ratio(frame, "row_parallel", "block_shock")) == 1
    for figure in DRAWN:
        assert NAME in words(figure(frame)), figure.__name__
    for figure in COMPARED:
        assert "nothing to draw" not in words(figure(frame)), figure.__name__
