"""The memory that a case asks for is above what its tensors take, and not far above."""

import json

import pytest
import torch

from blockshock_lib.comm import Group
from blockshock_lib.engine import memory
from blockshock_lib.studies.gpt import latency
from blockshock_lib.studies.gpt.need import need
from tests.studies.gpt.test_latency import STUDY, asked

SIZES = {"prefill": {"latency.prefill": [512]}, "step": {"latency.step": [[64, 2048]]}}


def peak(run, path):
    """Bytes that PyTorch's allocator has given at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    seen.export_chrome_trace(str(path))
    told = [event["args"] for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"]
    return max(one["Total Allocated"] for one in told) - told[0]["Total Allocated"] + told[0]["Bytes"]


@pytest.mark.parametrize("work", SIZES)
def test_what_a_timed_case_and_its_truth_hold_is_foreseen(work, tmp_path):
    more = {"latency.widths": [64], "hardware.emulated": False, "hardware.world_size": 1}
    params = asked(work, "tensor_parallel", **more | SIZES[work])
    (case,) = STUDY.expand(params)

    def run():
        problem = latency.opened(case, params, device=torch.device("cpu"), group=Group())
        runner = problem.build("tensor_parallel")
        runner.call(runner.model)
        problem.expected("tensor_parallel")

    measured, foreseen = peak(run, tmp_path / "trace"), need(case, {}).bytes - memory.TIMING["cpu"]
    assert measured <= foreseen <= 4 * measured, (measured, foreseen)
