"""What happens to one rank alone costs its method a row, and nothing else; tables and figures: test_all_studies."""

import math

import pytest
import torch

from blockshock_lib.engine import experiment
from blockshock_lib.errors import UnsupportedError
from blockshock_lib.layers.block_shock import BlockShockLinear
from tests.cases import picked
from tests.studies.linear.measuring import asked, measured

METHODS = ("row_parallel", "dense", "block_shock")
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
def test_a_fault_of_one_rank_is_a_row_and_the_others_are_timed(what, monkeypatch):
    owner, name, new, status, reason = FAULTS[what]
    if owner:
        monkeypatch.setattr(owner, name, new(getattr(owner, name)))
    if what == "copies":
        monkeypatch.setattr(experiment, "copies_past_cache", lambda *_: 3)
    rows = measured(asked("phase1"), methods=METHODS)
    *_, check = picked(rows, "block_shock", "check")
    assert check["status"] == status and check["reason"].startswith(reason)
    timed = {row["method"] for row in rows if row["unit"] == "ms" and row["status"] == "ok"} - {"ceiling", "twin"}
    assert timed == {"row_parallel", "dense"} | ({"block_shock"} if status == "ok" else set())
