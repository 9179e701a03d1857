"""compute-sanitizer's memcheck and racecheck over our own kernels; and faults that they must find.

Tensors are allocated one by one and with a gap behind each, so that an access past the end of one is an access to
nothing.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import sanitized

ROOT = Path(__file__).parents[2]
FOUND = 9  # the exit status asked for
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="for Hopper"),
    pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer comes with the CUDA toolkit"),
]


def run(tool: str, subject: str, folder: Path) -> list[tuple[int, str]]:
    """(exit status, output) of each rank."""
    ranks = 2 if subject.startswith("sums") else 1
    if torch.cuda.device_count() < ranks:
        pytest.skip("two GPUs are needed")
    # What CUDA's functions answer with an error, PyTorch asks on purpose: whether a pointer is known, and the like.
    options = ["--error-exitcode", str(FOUND), "--print-limit", "5"]
    options += ["--report-api-errors", "no", "--padding", "4096"] if tool == "memcheck" else []
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    for rank in range(ranks):
        more = [str(rank), str(folder / "store")] if ranks > 1 else []
        command = ["compute-sanitizer", "--tool", tool, *options, sys.executable, "-m", "tests.gpu.sanitized", subject]
        how = dict(cwd=ROOT, env=env, text=True, start_new_session=True, stdout=subprocess.PIPE)
        processes.append(subprocess.Popen([*command, *more], stderr=subprocess.STDOUT, **how))
    try:
        outputs = [process.communicate(timeout=sanitized.SECONDS + 20)[0] for process in processes]
        return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the sanitizer and the program under it


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("subject", sanitized.CLEAN)
def test_the_kernels_are_clean(subject, tool, tmp_path):
    for status, output in run(tool, subject, tmp_path):
        assert status == 0 and "done" in output, output[-4000:]
        assert "COMPUTE-SANITIZER" in output and (": 0 errors" in output or ": 0 hazards" in output), output[-4000:]


@pytest.mark.parametrize("subject", sanitized.PLANTED)
def test_a_write_past_the_end_and_a_race_are_found(subject, tmp_path):
    tool, said = ("racecheck", "hazard") if subject == "race" else ("memcheck", "Invalid __global__ write")
    for status, output in run(tool, subject, tmp_path):
        assert status == FOUND and said in output, output[-4000:]
