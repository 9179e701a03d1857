"""Power, clocks and throttle reasons of the GPUs while a case runs, read through NVML by the parent process."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading

from blockshock_lib import records

PERIOD_S = 0.05

# The bits of NVML's clock event reasons that say a GPU ran slower than it could; idle and application clocks do not.
REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class Sampler:
    """Samples the first `processes` visible GPUs from a thread until closed.

    `rows()` gives what was seen since the last call, in the shape of a record's rows: the median power (W) and SM clock
    (MHz) and whether any sample was throttled, for each GPU. Nothing on a CPU, or where NVML cannot be read.
    """

    def __init__(self, device: str, processes: int):
        self.handles: list = []
        self.seen: list[list[tuple[float, float, int]]] = []
        self._lock, self._stop, self._thread = threading.Lock(), threading.Event(), None
        if device != "cuda":
            return
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self.handles = [_handle(pynvml, place) for place in visible_devices(processes)]
            self.seen = [[] for _ in self.handles]

    def __enter__(self) -> Sampler:
        if self.handles:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        import pynvml

        while not self._stop.wait(PERIOD_S):
            for place, handle in enumerate(self.handles):
                with contextlib.suppress(pynvml.NVMLError):
                    sample = (
                        pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
                        float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
                        pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
                    )
                    with self._lock:
                        self.seen[place].append(sample)

    def rows(self) -> list[dict]:
        with self._lock:
            seen, self.seen = self.seen, [[] for _ in self.handles]
        found = []
        for gpu, samples in enumerate(seen):
            if not samples:
                continue
            power, clock, bits = zip(*samples, strict=True)
            why = ", ".join(text for bit, text in REASONS.items() if any(b & bit for b in bits))
            for metric, value, detail in (
                ("power", statistics.median(power), f"max {max(power):.0f} W"),
                ("sm_clock", statistics.median(clock), f"min {min(clock):.0f}, max {max(clock):.0f} MHz"),
                ("throttle", float(bool(why)), why),
            ):
                found.append(records.row("machine", metric, value, rank=gpu, detail=detail))
        return found


def visible_devices(count: int) -> list[str]:
    """The first `count` GPUs that CUDA programs see: indices, or the names that CUDA_VISIBLE_DEVICES gives them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    places = [str(i) for i in range(count)] if named is None else [p.strip() for p in named.split(",") if p.strip()]
    return places[:count]


def _handle(pynvml, place: str):
    return pynvml.nvmlDeviceGetHandleByIndex(int(place)) if place.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(place)
