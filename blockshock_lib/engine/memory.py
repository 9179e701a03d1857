"""Peak memory of one method alone."""

from __future__ import annotations

import torch


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
