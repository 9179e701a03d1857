"""What a GPU draws, as NVML tells it. Nothing here creates a CUDA context."""

import contextlib
import statistics
import time
import timeit
from typing import Any, NamedTuple

from blockshock_lib.kernels.needs import open_nvml


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
        with contextlib.suppress(self.nvml.NVMLError):
            joules, before = self._joules(), self.last
            self.last = joules
            if joules != before:
                clock = self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)
                return Reading(time.monotonic(), joules, float(clock))
        return None


def meter(index: int) -> Meter | None:
    """Of the GPU that CUDA counts as `index`; None where NVML does not tell its energy."""
    nvml, handles = open_nvml(index + 1)
    try:
        return Meter(nvml, handles[index]) if len(handles) > index else None
    except nvml.NVMLError:
        return None
