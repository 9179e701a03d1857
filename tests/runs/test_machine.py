import getpass
import json
import platform
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from blockshock_lib import files
from blockshock_lib.errors import ParamsError
from blockshock_lib.kernels import needs
from blockshock_lib.runs import machine
from tests.processes import wait_for

GPU = {"name": "NVIDIA H200", "memory_bytes": 150 * 10**9, "capability": "9.0", "power_limit_w": 700.0}


def card(gpus=0, unsupported=None):
    gpus = [GPU | {"index": i} for i in range(gpus)]
    parts = dict(cpu={"model": "m", "cores": 2}, libraries={"torch": "2.13.0"}, unsupported=unsupported or {})
    return dict(title="", gpus=gpus, links=[], driver="580", **parts)


def asked(device="cuda", processes=2, backend="nccl"):
    hardware = SimpleNamespace(name=device, device=device, processes=processes, backend=backend)
    return SimpleNamespace(hardware=hardware, lacks=lambda: "")


def fake_nvml(*broken):
    """Four GPUs; 0 and 1 share NVLinks through a switch, 2 is joined to 3 directly, the rest goes over PCIe."""

    def remote(handle, link):
        if handle > 1 and link >= 4:
            raise ValueError("no such link")
        return SimpleNamespace(busId="switch" if handle < 2 else f"bus{5 - handle}")

    made = mock.MagicMock(NVMLError=ValueError, NVML_P2P_STATUS_OK=0, NVML_NVLINK_MAX_LINKS=18)
    made.nvmlSystemGetDriverVersion.return_value = "580.1"
    facts = dict(Name="NVIDIA H200", CudaComputeCapability=(9, 0), EnforcedPowerLimit=700_000, NvLinkState=1)
    facts |= dict(PowerUsage=650_000, ClockInfo=1500, CurrentClocksThrottleReasons=0x4)
    asked = dict(HandleByIndex=lambda index: index, UUID=lambda h: f"GPU-{h}-secret", NvLinkRemotePciInfo=remote)
    asked |= dict(P2PStatus=lambda a, b, what: 0 if {a, b} in ({0, 1}, {2, 3}) else 5)
    asked |= {name: lambda h: SimpleNamespace(total=100 + h, busId=f"bus{h}") for name in ("MemoryInfo", "PciInfo")}
    for name in (*facts, *asked):
        getattr(made, f"nvmlDeviceGet{name}").configure_mock(return_value=facts.get(name), side_effect=asked.get(name))
    for name in broken:
        getattr(made, name).side_effect = ValueError(name)
    return made


@pytest.fixture
def nvml(monkeypatch):
    """Has the fake in the place of NVML, with these of its functions broken."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "PERIOD_S", 0.002)
    return lambda *broken: monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(*broken))


def test_the_card_of_this_machine_is_plain_data_that_names_nobody():
    text = json.dumps(machine.probe())
    found = json.loads(text)
    assert set(found) == {"title", "gpus", "links", "driver", "cpu", "libraries", "unsupported"}
    assert found["cpu"]["cores"] >= 1 and found["libraries"]["python"] == platform.python_version()
    assert found["libraries"]["torch"] and found["libraries"]["pandas"]
    assert bool(found["gpus"]) != ("cuda" in found["unsupported"])
    for private in (platform.node(), getpass.getuser(), str(Path.home()), str(files.ROOT)):
        assert not re.search(rf"(?<!\w){re.escape(private)}(?!\w)", text)


@pytest.mark.parametrize(("count", "name"), [(0, "cpu"), (1, "cuda-1"), (2, "cuda"), (8, "cuda")])
def test_auto_picks_the_hardware_by_the_number_of_gpus(monkeypatch, count, name):
    monkeypatch.setattr(machine, "_gpu_count", lambda: count)
    assert machine.auto_hardware() == name


def test_links_are_named_as_nvidia_smi_names_them(nvml):
    nvml()
    gpus, links, driver = machine._gpus(4)
    kinds = {(link["a"], link["b"]): link["kind"] for link in links}
    assert kinds[0, 1] == "NV18" and kinds[2, 3] == "NV4"
    assert {kinds[pair] for pair in kinds if pair not in ((0, 1), (2, 3))} == {"PCIe"}
    named = {"uuid_digest": files.sha256("GPU-3-secret")[:12]}
    assert driver == "580.1" and gpus[3] == GPU | {"index": 3, "memory_bytes": 103} | named
    assert "secret" not in json.dumps(gpus) and len({gpu["uuid_digest"] for gpu in gpus}) == 4
    nvml("nvmlDeviceGetUUID")
    assert "uuid_digest" not in machine._gpus(1)[0][0]


def test_a_driver_that_does_not_answer_gives_an_empty_card(nvml):
    for broken in ("nvmlInit", "nvmlDeviceGetName"):
        nvml(broken)
        assert machine._gpus(2) == ([], [], "")
    nvml("nvmlDeviceGetEnforcedPowerLimit")
    gpus, links, _ = machine._gpus(2)
    assert [gpu["power_limit_w"] for gpu in gpus] == [None, None] and len(links) == 1


def test_each_gpu_gets_power_clock_and_the_throttle_reason_while_a_case_runs(nvml):
    nvml()
    with machine.Sampler("cuda", 1) as sampler:
        rows = {row["metric"]: row for row in wait_for(sampler.rows)}
    assert rows["power"]["value"] == 650 and rows["sm_clock"]["value"] == 1500
    assert rows["throttle"]["value"] == 1 and "software power cap" in rows["throttle"]["detail"]
    nvml("nvmlDeviceGetPowerUsage")
    with machine.Sampler("cuda", 1) as sampler, machine.Sampler("cpu", 2) as none:
        time.sleep(0.02)
    assert sampler.rows() == none.rows() == [], "without readings, and on a CPU"


@pytest.mark.parametrize("value, places", [(None, ["0", "1"]), ("3,5,7", ["3", "5"]), ("GPU-a", ["GPU-a"]), ("", [])])
def test_the_gpus_watched_are_those_that_cuda_sees(nvml, monkeypatch, value, places):
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert needs.visible_devices(2) == places


def test_the_fingerprint_changes_with_whatever_can_change_a_time():
    same = machine.fingerprint(card(2))
    assert same == machine.fingerprint(json.loads(json.dumps(card(2)))) and len(same) == 12
    changes = [
        {"gpus": card(1)["gpus"]},
        {"gpus": [card(1)["gpus"][0] | {"power_limit_w": 500.0}]},
        {"gpus": [gpu | {"uuid_digest": "of another"} for gpu in card(2)["gpus"]]},
        {"links": [{"a": 0, "b": 1, "kind": "PCIe"}]},
        {"driver": "570"},
        {"cpu": {"model": "m", "cores": 3}},
        {"libraries": {"torch": "2.11.0"}},
    ]
    prints = {machine.fingerprint(card(2) | change) for change in changes}
    assert len(prints) == len(changes) and same not in prints
    assert machine.fingerprint(card(2) | {"title": "another name"}) == same
    portable = {machine.fingerprint(card(2) | change, portable=True) for change in changes}
    assert len(portable) == 2, "libraries count, and kinds of GPU"
    other = [gpu | {"name": "another kind"} for gpu in card(2)["gpus"]]
    assert machine.fingerprint(card(2) | {"gpus": other}, portable=True) not in portable


def test_hardware_that_is_not_there_is_refused_with_the_reason():
    for fits, on in ((asked(), card(2)), (asked(processes=1), card(1)), (asked("cpu", 8), card(0, {"cuda": "none"}))):
        machine.admit(fits, on)
    for wrong, on, why in (
        (asked(processes=4), card(2), "hardware cuda: 4 ranks were asked for, GPUs here: 2$"),
        (asked(), card(1), "GPUs here: 1$"),
        (asked(), card(0, {"cuda": "no GPU is visible"}), "cuda was asked for, but no GPU is visible"),
        (asked(), card(2, {"nccl": "this build has none"}), "nccl was asked for, but this build"),
    ):
        with pytest.raises(ParamsError, match=why):
            machine.admit(wrong, on)
