"""A product that is not finite costs its method the row, all the way from two real ranks to the page."""

import matplotlib.text
import pytest

from blockshock_lib import params
from blockshock_lib.report.verdicts import one_line, ratio
from blockshock_lib.runs import measure, records
from blockshock_lib.studies.linear import STUDY, hypotheses
from blockshock_lib.studies.linear.axes import AXES
from blockshock_lib.studies.linear.report import FIGURES, TABLES
from tests.faults import not_finite, workers

SETTINGS = {
    "sweep.n": [128],
    "sweep.b": [batch for batch, *_ in not_finite.PLANTED.values()],
    "methods": ["dense", "row_parallel", "block_shock"],
    "timing.groups": 1,
    "timing.samples": 3,
    "timing.warmup": 1,
    "profile": "none",
}
DRAWN = (FIGURES["time over N"], FIGURES["parts of a call"], FIGURES["roofline"])  # every method that has a time
COMPARED = (FIGURES["speed over B1"], FIGURES["law"])  # nothing where one of the compared has none
NAME = AXES.label("block_shock")


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    """What is planted -> the records of its case."""
    folder = tmp_path_factory.mktemp("run")
    asked, options = params.load(STUDY, "phase1", SETTINGS, choose={"hardware": "cpu"}), {"context": workers.CONTEXT}
    measure.run(asked, STUDY.expand(asked), folder, task=not_finite.by_batch, study=STUDY, run_name="r1", **options)
    frame = records.load(folder, strict=True)
    return {what: frame[frame.batch == batch] for what, (batch, *_) in not_finite.PLANTED.items()}


def shown(frame):
    """Whether Block-Shock is in each of the figures, of which those that draw every method are never empty."""
    words = [" ".join(t.get_text() for t in f(frame).findobj(matplotlib.text.Text)) for f in (*DRAWN, *COMPARED)]
    drawn, compared = words[: len(DRAWN)], words[len(DRAWN) :]
    assert all(AXES.label("row_parallel") in text for text in drawn)
    return [*(NAME in text for text in drawn), *("nothing to draw" not in text for text in compared)]


@pytest.mark.parametrize("what", [what for what in not_finite.PLANTED if what != "nothing"])
def test_nan_or_inf_in_a_product(what, frames):
    frame = frames[what]
    mine = frame[frame.method == "block_shock"]
    failed = mine[mine.status == "failed"]
    assert failed.metric.tolist() == ["check"] and "y holds NaN or Inf" in failed.reason.iloc[0]
    assert not (mine.unit.eq("ms") & mine.status.eq("ok")).any()
    assert frame[frame.status != "ok"].value.isna().all()

    assert TABLES["correctness"](frame)[NAME].tolist() == ["FAIL"]
    assert NAME in TABLES["failures"](frame).method.tolist()
    assert sorted(TABLES["speed"](frame).method) == sorted(map(AXES.label, ("dense", "row_parallel")))
    assert ratio(frame, AXES, "row_parallel", "block_shock").empty
    assert all(verdict(frame).verdict == "undecided" for verdict in (hypotheses.h1, hypotheses.h3))
    assert "FAIL" in one_line(frame, AXES, STUDY.hypotheses)
    assert not any(shown(frame))


def test_without_the_fault_there_is_a_time_in_each_of_them(frames):
    frame = frames["nothing"]
    assert NAME in TABLES["speed"](frame).method.tolist()
    assert len(ratio(frame, AXES, "row_parallel", "block_shock")) == 1
    assert all(shown(frame))
