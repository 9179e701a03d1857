"""Chrome traces, one a rank and method, and the kernels that took the time."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

CALLS = 3
TOP = 6


def trace(fn: Callable[[], object], device: torch.device, path: Path) -> list[tuple[str, float]]:
    """Profiles a few calls of `fn`, writes a Chrome trace (gzip; Perfetto opens it) and returns the top kernels.

    Returns: (name, ms a call) of the device kernels, NCCL's among them, largest first; on a CPU, of the operators. The
    first call does not count: a collective in it waits for the other ranks' profilers to start.
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
    _hide_host(path)
    spent: dict[str, list[tuple[float, float]]] = {}
    for event in seen.events():
        us = event.self_device_time_total if cuda else event.self_cpu_time_total
        on_device = str(event.device_type).endswith("CUDA")
        # "nccl:..." is a range drawn around the kernel of that name, not work of its own.
        if us > 0 and on_device == cuda and not event.key.startswith("nccl:"):
            spent.setdefault(event.key, []).append((event.time_range.start, us))
    found = [(name, ms_a_call(each)) for name, each in spent.items()]
    return sorted(found, key=lambda item: -item[1])[:TOP]


def ms_a_call(spent: list[tuple[float, float]], calls: int = CALLS) -> float:
    """Of a kernel's (start, us) in so many calls: ms in a call, the first one left out, where each has as many."""
    each = [us for _, us in sorted(spent)]
    first = 0 if len(each) % calls else len(each) // calls
    return sum(each[first:]) / 1e3 / (calls - bool(first))


def _hide_host(path: Path) -> None:
    """Takes the file's name on this machine out of a trace, and puts a digest for the host's, which cannot be guessed:
    whoever draws the traces of several ranks asks only whether their hosts differ.
    """
    trace = json.loads(gzip.decompress(path.read_bytes()))
    trace.pop("traceName", None)
    if host := trace.get("host_name"):
        trace["host_name"] = hashlib.sha256(f"{host} {_boot()}".encode()).hexdigest()[:12]
    path.write_bytes(gzip.compress(json.dumps(trace).encode(), mtime=0))


def _boot() -> str:
    # The same for all processes since this machine started, and known to nobody else.
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return str(uuid.getnode())
