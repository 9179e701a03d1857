"""What happens to one rank alone costs its method a row, all the way to the tables and figures, and nothing else."""

import math

import matplotlib.text
import pytest
import torch

from blockshock_lib.engine import experiment
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers.block_shock import BlockShockLinear
from blockshock_lib.report.verdicts import one_line, ratio
from blockshock_lib.runs import records
from blockshock_lib.studies.linear import STUDY, hypotheses
from blockshock_lib.studies.linear.axes import AXES
from blockshock_lib.studies.linear.report import FIGURES, TABLES
from tests.cases import case, write
from tests.faults.workers import CONTEXT
from tests.studies.linear.measuring import asked, measured

METHODS, NAME = ("row_parallel", "dense", "block_shock"), AXES.label("block_shock")
SHORT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has")
REFUSED = UnsupportedError("no algorithm gave right values")


def raises(rank, error):
    """A layer's function that raises on one rank."""

    def new(right):
        def made(layer, *args, **how):
            if layer.group.rank == rank:
                raise error
            return right(layer, *args, **how)

        return made

    return new


def holds_nan(right):
    def local(layer, *args, **how):
        y = right(layer, *args, **how)
        return y.fill_(math.nan) if layer.group.rank == 1 else y

    return local


def no_copies(right):
    """Those of the method that timing rotates over."""

    def tuned(session, method):
        if method == "block_shock" and session.run.group.rank == 1:
            raise SHORT
        return right(session, method)

    return tuned


# What fails -> whose function it takes the place of, status, and reason.
FAULTS = {
    "nothing": (None, "", lambda right: right, "ok", ""),
    "NaN": (BlockShockLinear, "local", holds_nan, "failed", "rank 0: y holds NaN or Inf"),
    "first use": (BlockShockLinear, "local", raises(1, SHORT), "oom", "rank 1: CUDA out of memory. Tried to"),
    "copies": (experiment.Session, "tuned", no_copies, "oom", "rank 1: CUDA out of memory. Tried to"),
    "tuning": (BlockShockLinear, "tune", raises(0, REFUSED), "unsupported", f"rank 0: {REFUSED}"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_of_one_rank_is_a_row_and_a_word_on_the_page_and_the_others_are_timed(what, monkeypatch, tmp_path):
    owner, name, new, status, reason = FAULTS[what]
    if owner:
        monkeypatch.setattr(owner, name, new(getattr(owner, name)))
    if what == "copies":
        monkeypatch.setattr(experiment, "copies_past_cache", lambda *_: 3)
    rows = measured(asked("phase1"), methods=METHODS)
    write(tmp_path, run="r1", case=case(phase="phase1", methods=METHODS), group=0, rows=rows, context=CONTEXT)
    frame = records.load(tmp_path, strict=True)
    mine, right = frame[frame.method == "block_shock"], what == "nothing"
    if not right:
        missed = mine[mine.status == status].set_index("metric").reason
        assert missed["check"].startswith(reason) and frame[frame.status != "ok"].value.isna().all()
    timed = set(frame[frame.unit.eq("ms") & frame.status.eq("ok") & ~frame.method.isin(["ceiling", "twin"])].method)
    assert timed - {"block_shock"} == {"row_parallel", "dense"} and ("block_shock" in timed) == right

    words = {"ok": "pass", "failed": "FAIL", "oom": "out of memory"}
    assert TABLES["correctness"](frame)[NAME].tolist() == [words.get(status, status)]
    assert (NAME in TABLES["speed"](frame).method.tolist()) == right
    assert len(ratio(frame, AXES, "row_parallel", "block_shock")) == right
    if not right:
        assert NAME in TABLES["reasons"](frame).method.tolist()
        assert all(verdict(frame).verdict == "undecided" for verdict in (hypotheses.h1, hypotheses.h3))
    assert ("FAIL" in one_line(frame, AXES, STUDY.hypotheses)) == (status == "failed")
    for figure in ("time over B1", "roofline", "speed over B1", "law"):
        drawn = " ".join(text.get_text() for text in FIGURES[figure](frame).findobj(matplotlib.text.Text))
        compared = figure in ("speed over B1", "law")
        assert ("nothing to draw" not in drawn if compared else NAME in drawn) == right, figure
