"""Chrome traces, one a rank and method, and the kernels that took the time."""

import contextlib
import gzip
import json
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from blockshock_lib.files import sha256

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


def ms_a_call(spent: list[tuple[float, float]]) -> float:
    """Of a kernel's (start, us) in CALLS calls; the first, where ranks wait for each other's profilers, left out."""
    each = [us for _, us in sorted(spent)]
    first = 0 if len(each) % CALLS else len(each) // CALLS
    return sum(each[first:]) / 1e3 / (CALLS - bool(first))


def _hide_host(path: Path) -> None:
    # The file's name on this machine goes, and the host's becomes a digest that cannot be guessed: whoever draws the
    # traces of several ranks asks only whether their hosts differ.
    trace = json.loads(gzip.decompress(path.read_bytes()))
    trace.pop("traceName", None)
    if host := trace.get("host_name"):
        secret = str(uuid.getnode())
        with contextlib.suppress(OSError):  # one since this machine started, known to nobody else
            secret = Path("/proc/sys/kernel/random/boot_id").read_text()
        trace["host_name"] = sha256(f"{host} {secret}")[:12]
    path.write_bytes(gzip.compress(json.dumps(trace).encode(), mtime=0))
