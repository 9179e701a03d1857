"""Chrome traces, one a rank and method, and the kernels that took the time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

CALLS = 3
TOP = 6


def trace(fn: Callable[[], object], device: torch.device, path: Path) -> list[tuple[str, float]]:
    """Profiles a few calls of `fn`, writes a Chrome trace (gzip; Perfetto opens it) and returns the top kernels.

    Returns: (name, ms a call) of the device kernels, NCCL's among them, largest first; on a CPU, of the operators.
    """
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    fn()
    with profile(activities=activities) as seen:
        for _ in range(CALLS):
            fn()
        if cuda:
            torch.cuda.synchronize(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    seen.export_chrome_trace(str(path))
    total: dict[str, float] = {}
    for event in seen.key_averages():
        us = event.self_device_time_total if cuda else event.self_cpu_time_total
        on_device = str(event.device_type).endswith("CUDA")
        # "nccl:..." is a range drawn around the kernel of that name, not work of its own.
        if us > 0 and on_device == cuda and not event.key.startswith("nccl:"):
            total[event.key] = total.get(event.key, 0.0) + us / 1e3 / CALLS
    return sorted(total.items(), key=lambda item: -item[1])[:TOP]
