"""Power and clocks are read through NVML and become rows; a stand-in NVML plays the GPU."""

import sys
import time
import types

import pytest

from blockshock_lib.engine import power


@pytest.fixture
def nvml(monkeypatch):
    fake = types.SimpleNamespace(
        NVMLError=RuntimeError,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetHandleByUUID=lambda u: u,
        nvmlDeviceGetPowerUsage=lambda h: 650_000,
        nvmlDeviceGetClockInfo=lambda h, kind: 1500,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda h: 0x4,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(power, "PERIOD_S", 0.002)
    return fake


def rows_soon(sampler):
    for _ in range(500):
        if rows := sampler.rows():
            return rows
        time.sleep(0.005)
    raise AssertionError("the sampler's thread brought nothing")


def test_each_gpu_gets_power_clock_and_the_throttle_reason(nvml):
    with power.Sampler("cuda", 1) as sampler:
        rows = {row["metric"]: row for row in rows_soon(sampler)}
    assert rows["power"]["value"] == 650 and rows["sm_clock"]["value"] == 1500
    assert rows["throttle"]["value"] == 1 and "software power cap" in rows["throttle"]["detail"]


def test_an_idle_clock_is_not_a_throttle(nvml):
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda h: 0x1
    with power.Sampler("cuda", 1) as sampler:
        rows = {row["metric"]: row for row in rows_soon(sampler)}
    assert rows["throttle"]["value"] == 0


def test_a_gpu_without_readings_gives_no_rows(nvml):
    def fail(handle):
        raise RuntimeError("not supported")

    nvml.nvmlDeviceGetPowerUsage = fail
    with power.Sampler("cuda", 1) as sampler:
        time.sleep(0.02)
        assert sampler.rows() == []


def test_a_cpu_has_no_rows():
    with power.Sampler("cpu", 2) as sampler:
        assert sampler.rows() == []


@pytest.mark.parametrize("value, places", [(None, ["0", "1"]), ("3,5,7", ["3", "5"]), ("GPU-a", ["GPU-a"]), ("", [])])
def test_the_gpus_watched_are_those_that_cuda_sees(monkeypatch, value, places):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert power.visible_devices(2) == places
