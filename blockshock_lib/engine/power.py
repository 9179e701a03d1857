"""What a GPU draws, as NVML tells it. Nothing here creates a CUDA context."""

import contextlib
import os
import time
from typing import Any, NamedTuple


class Reading(NamedTuple):
    seconds: float  # of this computer's monotonic clock
    joules: float  # used since some moment
    mhz: float  # of the SMs


class Meter:
    """One GPU's energy and clock: by NVML's counter, or where it has none, by the power times the time between two
    readings. `source` says which.
    """

    def __init__(self, nvml: Any, handle: Any):
        self.nvml, self.handle, self.source = nvml, handle, "the energy counter"
        self.last = Reading(time.monotonic(), 0.0, 0.0)
        try:
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except nvml.NVMLError:
            self.source = "power x time"
        self._ask()

    def read(self) -> Reading:
        """The `last` one again where nothing was added since, or NVML does not answer."""
        with contextlib.suppress(self.nvml.NVMLError):
            self._ask()
        return self.last

    def _ask(self) -> None:
        now, ask = time.monotonic(), self.nvml
        if self.source == "power x time":
            joules = self.last.joules + ask.nvmlDeviceGetPowerUsage(self.handle) / 1e3 * (now - self.last.seconds)
        else:
            joules = ask.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3
        if joules != self.last.joules:
            self.last = Reading(now, joules, float(ask.nvmlDeviceGetClockInfo(self.handle, ask.NVML_CLOCK_SM)))


def meter(index: int) -> Meter | None:
    """Of the GPU that CUDA counts as `index`; None where NVML tells neither its energy nor its power and clock."""
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
