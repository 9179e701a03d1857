"""What happens to one rank alone costs its method a row, and neither hangs the others nor ends the case."""

import pytest

from blockshock_lib import launch, params
from tests.cases import case
from tests.faults import rank_faults


@pytest.mark.parametrize(
    "fault, status, reason",
    [
        (rank_faults.first_use_does_not_fit, "oom", "rank 1: CUDA out of memory. Tried to allocate 20.00 GiB."),
        (rank_faults.copies_do_not_fit, "oom", "rank 1: CUDA out of memory. Tried to allocate 20.00 GiB."),
        (rank_faults.tuning_is_refused, "unsupported", "rank 0: no algorithm gave right values"),
    ],
)
def test_a_fault_of_one_rank_is_a_row_and_the_other_methods_are_timed(fault, status, reason, tmp_path):
    asked = params.load(
        "phase1", {"timing.samples": 2, "timing.warmup": 1, "profile": "none"}, choose={"hardware": "cpu"}
    )
    one = case(phase="phase1", emulated=False, methods=("row_parallel", "dense", "block_shock"))
    both = launch.call(fault, one, asked, 0, processes=2, logs=tmp_path, seconds=60)
    for rows in both:
        missed = [row for row in rows if row["method"] == "row_parallel" and row["status"] == status]
        assert len(missed) == 1 and missed[0]["reason"].startswith(reason)
        assert not [row for row in rows if row["method"] == "row_parallel" and row["metric"] == "forward_kernel"]
        for method in ("dense", "block_shock"):
            assert [row["metric"] for row in rows if row["method"] == method].count("forward_kernel") == 2
