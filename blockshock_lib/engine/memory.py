"""Memory of one method alone: its peak, its parts, and the room there is."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from blockshock_lib.engine.protocol import Runner
from blockshock_lib.engine.training import Trainer

GIB = 2**30


class Peak:
    """Allocated bytes above what was there when the meter was made; None on a CPU, whose allocator keeps no peak."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self.base = torch.cuda.memory_allocated(device)

    def restart(self) -> None:
        """Forgets what building needed, so that the peak is that of running."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> int | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self.base


def held(runner: Runner, trainer: Trainer, activations: int) -> dict[str, int]:
    """Bytes that a training step holds on this rank, by metric; after a backward, so that gradients are there."""
    if not runner.active:
        return dict.fromkeys(FORMULAS, 0)
    own = runner.hold_bytes()
    return {
        "weights_bytes_held": own["weights"],
        "copies_bytes": own["copies"] + own["pattern"],
        "gradient_bytes": trainer.gradient_bytes(),
        "optimizer_bytes": trainer.state_bytes(),
        "activation_bytes": activations,
    }


FORMULAS = {
    "weights_bytes_held": "weights",
    "copies_bytes": "copies",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "activation_bytes": "activations",
}
"""Metric -> the part of a method's formula (`Holding`) that foretells it."""


def total(device: torch.device) -> int:
    """Bytes of memory that the device has; a CPU's is the computer's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free(device: torch.device) -> int:
    """Bytes that this process could still be given now; of a computer's memory, which its processes share, all."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + idle
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    return total(device)


def make_room(device: torch.device, needed: float, what: str) -> None:
    """Raises torch.OutOfMemoryError before anything is allocated, where `what` needs more bytes than are free."""
    there = free(device)
    if needed > there:
        raise torch.OutOfMemoryError(f"{what} needs {needed / GIB:.4g} GiB, {there / GIB:.4g} GiB are free")
