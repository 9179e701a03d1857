"""Chrome traces, one a rank and method, and the kernels that took the time."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

CALLS = 3
TOP = 6


def trace(fn: Callable[[], object], device: torch.device, path: Path) -> list[tuple[str, float]]:
    """Profiles CALLS calls of `fn` into a Chrome trace (gzip); the top (kernel, on a CPU operator; ms a call)."""
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
    written = json.loads(gzip.decompress(path.read_bytes()))
    for name in ("traceName", "host_name"):  # a path on this machine, and the machine
        written.pop(name, None)
    path.write_bytes(gzip.compress(json.dumps(written).encode(), mtime=0))
    spent: dict[str, list[tuple[float, float]]] = {}
    for event in seen.events():
        us = event.self_device_time_total if cuda else event.self_cpu_time_total
        on_device = str(event.device_type).endswith("CUDA")
        # "nccl:..." is a range drawn around the kernel of that name, not work of its own.
        if us > 0 and on_device == cuda and not event.key.startswith("nccl:"):
            spent.setdefault(event.key, []).append((event.time_range.start, us))
    return sorted(((name, ms_a_call(each)) for name, each in spent.items()), key=lambda item: -item[1])[:TOP]


def ms_a_call(spent: list[tuple[float, float]]) -> float:
    """Of a kernel's (start, us) in CALLS calls; the first, where ranks wait for each other's profilers, left out."""
    each = [us for _, us in sorted(spent)]
    first = 0 if len(each) % CALLS else len(each) // CALLS
    return sum(each[first:]) / 1e3 / (CALLS - bool(first))
