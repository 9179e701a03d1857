"""What happens to one rank alone costs its method a row, and nothing else; tables and figures: test_all_studies."""

import math
from unittest import mock

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


def on(rank, act):
    """What one rank of Block-Shock made goes through `act`, which may raise."""

    def new(right):
        def made(owner, *args, **how):
            found, of_layer = right(owner, *args, **how), isinstance(owner, BlockShockLinear)
            group = owner.group if of_layer else owner.run.group
            return act(found) if (of_layer or args == ("block_shock",)) and group.rank == rank else found

        return made

    return new


short, refused = mock.Mock(side_effect=SHORT), mock.Mock(side_effect=REFUSED)
# What fails -> whose function it takes the place of, status, and reason.
FAULTS = {
    "nothing": (BlockShockLinear, "local", on(1, lambda y: y), "ok", ""),
    "NaN": (BlockShockLinear, "local", on(1, lambda y: y.fill_(math.nan)), "failed", "rank 0: y holds NaN or Inf"),
    "first use": (BlockShockLinear, "local", on(1, short), "oom", "rank 1: CUDA out of memory. Tried to"),
    "copies": (experiment.Session, "tuned", on(1, short), "oom", "rank 1: CUDA out of memory. Tried to"),
    "tuning": (BlockShockLinear, "tune", on(0, refused), "unsupported", f"rank 0: {REFUSED}"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_of_one_rank_is_a_row_and_the_others_are_timed(what, monkeypatch):
    owner, name, new, status, reason = FAULTS[what]
    monkeypatch.setattr(owner, name, new(getattr(owner, name)))
    if what == "copies":
        monkeypatch.setattr(experiment, "copies_past_cache", lambda *_: 3)
    rows = measured(asked("phase1"), methods=METHODS)
    *_, check = picked(rows, "block_shock", "check")
    assert check["status"] == status and check["reason"].startswith(reason)
    timed = {row["method"] for row in rows if row["unit"] == "ms" and row["status"] == "ok"} - {"ceiling", "twin"}
    assert timed == {"row_parallel", "dense"} | ({"block_shock"} if status == "ok" else set())
