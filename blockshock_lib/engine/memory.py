"""Memory of one method alone: its peak, and the room there is."""

import math
import os
from contextlib import suppress
from pathlib import Path

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GIB, MIB = 2**30, 2**20
SLACK = 1.3  # blocks that an allocator holds and cannot reuse
# Buffers of the ceilings; on a GPU copies past three L2 caches with their gradients and states, and a graph's outputs.
TIMING = {"cpu": 80 * MIB, "cuda": 19 * GIB}


def upper(held: float, timed: bool, device: str) -> int:
    """An upper estimate for a process whose tensors are `held` bytes at their peak."""
    return math.ceil(SLACK * held + timed * TIMING[device])


class Peak:
    """Allocated bytes above what was there when the meter was made; None on a CPU, whose allocator keeps no peak."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self.base = torch.cuda.memory_allocated(device)

    def restart(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> int | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self.base


def total(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available(path: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes of this computer's memory that its processes could still be given; None where the system does not tell."""
    with suppress(OSError, StopIteration):
        return 1024 * next(int(t.split()[1]) for t in path.read_text().splitlines() if t.startswith("MemAvailable:"))


def free(device: torch.device) -> int:
    """Bytes that this process could still be given now."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    return available() or total(device)
