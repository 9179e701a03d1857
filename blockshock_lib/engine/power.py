"""What a GPU draws, as NVML tells it. Nothing here creates a CUDA context."""

import os
import statistics
import time
import timeit
from typing import Any, NamedTuple


class Reading(NamedTuple):
    seconds: float  # of this computer's monotonic clock
    joules: float  # used since some moment
    mhz: float  # of the SMs


class Meter:
    """One GPU's energy counter and clock; NVMLError where it has no counter. A read takes `read_ms`."""

    def __init__(self, nvml: Any, handle: Any):
        self.nvml, self.handle = nvml, handle
        self.last = self._joules()
        self.read_ms = 1e3 * statistics.median(timeit.repeat(self._joules, number=1, repeat=5, timer=time.monotonic))

    def _joules(self) -> float:
        return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3

    def change(self) -> Reading | None:
        """What the counter shows; None where that is the same as last time, or NVML does not answer."""
        try:
            joules, before = self._joules(), self.last
            self.last = joules
            if joules != before:
                clock = self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)
                return Reading(time.monotonic(), joules, float(clock))
        except self.nvml.NVMLError:
            pass
        return None


def meter(index: int) -> Meter | None:
    """Of the GPU that CUDA counts as `index`; None where NVML does not tell its energy."""
    nvml, handles = open_nvml(index + 1)
    try:
        return Meter(nvml, handles[index]) if len(handles) > index else None
    except nvml.NVMLError:
        return None


def open_nvml(count: int) -> tuple[Any, list[Any]]:
    """NVML and its handles of the first `count` GPUs that CUDA sees, in its order; (None, []) without an answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
        by_index, by_name = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        return pynvml, [by_index(int(p)) if p.isdigit() else by_name(p) for p in visible_devices(count)]
    except Exception:  # no NVML library, no driver: the module raises its own kind for each
        return None, []


def visible_devices(count: int) -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    places = [str(i) for i in range(count)] if named is None else [p.strip() for p in named.split(",") if p.strip()]
    return places[:count]
