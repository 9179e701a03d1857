import getpass
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from blockshock_lib import machine
from blockshock_lib.errors import ParamsError

GPU = {"name": "NVIDIA H200", "memory_bytes": 150 * 10**9, "capability": "9.0", "power_limit_w": 700.0}


def card(gpus=0, unsupported=None):
    return {
        "title": "",
        "gpus": [GPU | {"index": i} for i in range(gpus)],
        "links": [],
        "driver": "580",
        "cpu": {"model": "m", "cores": 2},
        "libraries": {"torch": "2.13.0"},
        "unsupported": unsupported or {},
    }


def asked(device="cuda", processes=2, backend="nccl"):
    return SimpleNamespace(hardware=SimpleNamespace(device=device, processes=processes, backend=backend))


class NVMLError(Exception):
    pass


class FakeNVML:
    """Four GPUs; 0 and 1 share NVLinks through a switch, 2 is joined to 3 directly, the rest goes over PCIe."""

    NVMLError = NVMLError
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK, NVML_NVLINK_MAX_LINKS = 2, 0, 18

    def __init__(self, broken=()):
        self.broken = broken

    def __getattr__(self, name):
        if name in self.broken:
            raise NVMLError(name)
        return {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "580.1",
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid[-1]),
            "nvmlDeviceGetName": lambda h: "NVIDIA H200",
            "nvmlDeviceGetMemoryInfo": lambda h: SimpleNamespace(total=100 + h),
            "nvmlDeviceGetCudaComputeCapability": lambda h: (9, 0),
            "nvmlDeviceGetEnforcedPowerLimit": lambda h: 700_000,
            "nvmlDeviceGetP2PStatus": lambda a, b, what: 0 if {a, b} in ({0, 1}, {2, 3}) else 5,
            "nvmlDeviceGetPciInfo": lambda h: SimpleNamespace(busId=f"bus{h}"),
            "nvmlDeviceGetNvLinkState": lambda h, link: 1,
            "nvmlDeviceGetNvLinkRemotePciInfo": self.remote,
        }[name]

    @staticmethod
    def remote(handle, link):
        if handle < 2:
            return SimpleNamespace(busId="switch")
        if link >= 4:
            raise NVMLError("no such link")
        return SimpleNamespace(busId=f"bus{5 - handle}")


def gpus_of_a_fake_machine(monkeypatch, count, **fake):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML(**fake))
    return machine._nvml(count)


def test_the_card_of_this_machine_is_plain_data_that_names_nobody():
    text = json.dumps(machine.probe())
    found = json.loads(text)
    assert set(found) == {"title", "gpus", "links", "driver", "cpu", "libraries", "unsupported"}
    assert found["cpu"]["cores"] >= 1 and found["libraries"]["python"] == platform.python_version()
    assert found["libraries"]["torch"] and found["libraries"]["pandas"]
    assert bool(found["gpus"]) != ("cuda" in found["unsupported"])
    for private in (platform.node(), getpass.getuser(), str(Path.home()), str(machine.ROOT)):
        assert not re.search(rf"(?<!\w){re.escape(private)}(?!\w)", text)


def test_what_a_machine_without_gpus_cannot_run_has_its_reason(monkeypatch):
    monkeypatch.setattr(machine, "_gpu_count", lambda: 0)
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: True)
    found = machine.probe()
    assert found["title"].startswith(f"CPU, {found['cpu']['cores']} cores: ") and found["gpus"] == []
    assert found["unsupported"] == dict.fromkeys(
        ("cuda", "nccl", "cslt", "triton", "planned products", "small-batch product"), "no NVIDIA GPU is visible"
    )


@pytest.mark.parametrize(("count", "name"), [(0, "cpu"), (1, "cuda-1"), (2, "cuda"), (8, "cuda")])
def test_auto_picks_the_hardware_by_the_number_of_gpus(monkeypatch, count, name):
    monkeypatch.setattr(machine, "_gpu_count", lambda: count)
    assert machine.auto_hardware() == name


def test_links_are_named_as_nvidia_smi_names_them(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus, links, driver = gpus_of_a_fake_machine(monkeypatch, 4)
    kinds = {(link["a"], link["b"]): link["kind"] for link in links}
    assert kinds[0, 1] == "NV18" and kinds[2, 3] == "NV4"
    assert {kinds[pair] for pair in kinds if pair not in ((0, 1), (2, 3))} == {"PCIe"}
    assert driver == "580.1" and gpus[3] == {
        "index": 3,
        "name": "NVIDIA H200",
        "memory_bytes": 103,
        "capability": "9.0",
        "power_limit_w": 700.0,
    }


def test_gpus_are_counted_in_cudas_order(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-1")
    gpus, _, _ = gpus_of_a_fake_machine(monkeypatch, 2)
    assert [(gpu["index"], gpu["memory_bytes"]) for gpu in gpus] == [(0, 103), (1, 101)]


def test_a_driver_that_does_not_answer_gives_an_empty_card(monkeypatch):
    assert gpus_of_a_fake_machine(monkeypatch, 2, broken=("nvmlInit",)) == ([], [], "")
    assert gpus_of_a_fake_machine(monkeypatch, 2, broken=("nvmlDeviceGetName",)) == ([], [], "")
    gpus, links, _ = gpus_of_a_fake_machine(monkeypatch, 2, broken=("nvmlDeviceGetEnforcedPowerLimit",))
    assert [gpu["power_limit_w"] for gpu in gpus] == [None, None] and len(links) == 1


def test_an_older_gpu_has_no_sparse_products(monkeypatch):
    monkeypatch.setattr(machine, "_gpu_count", lambda: 1)
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: True)
    monkeypatch.setattr("torch.backends.cusparselt.is_available", lambda: True)
    assert "cslt" not in machine._unsupported([GPU | {"index": 0}])
    old = machine._unsupported([GPU | {"index": 0, "capability": "7.5"}])
    assert old["cslt"] == "2:4 products need compute capability 8.0 or newer, GPU 0 has 7.5"


def test_what_the_library_adds_to_the_2_4_product_says_why_it_is_missing(monkeypatch):
    monkeypatch.setattr(machine, "_gpu_count", lambda: 1)
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: True)
    monkeypatch.setattr("torch.backends.cusparselt.is_available", lambda: True)
    monkeypatch.setattr("blockshock_lib.compiled.unsupported", lambda device: "no compiler")
    monkeypatch.setattr(machine, "_version", lambda name: "")
    bare = machine._unsupported([GPU | {"index": 0}])
    assert bare["planned products"] == "nvmath-python is not installed (the extra `cuda`)"
    assert bare["small-batch product"] == "no compiler"
    monkeypatch.setattr(machine, "_version", lambda name: "1.0")
    ampere = machine._unsupported([GPU | {"index": 0, "capability": "8.0"}])
    assert "planned products" not in ampere and "cslt" not in ampere
    assert ampere["small-batch product"] == "its kernel needs compute capability 9.0 (Hopper), GPU 0 has 8.0"
    monkeypatch.setattr("blockshock_lib.compiled.unsupported", lambda device: "")
    newer = machine._unsupported([GPU | {"index": 0, "capability": "10.0"}])
    assert newer["small-batch product"] == "its kernel needs compute capability 9.0 (Hopper), GPU 0 has 10.0"
    hopper = machine._unsupported([GPU | {"index": 0}])
    assert not {"planned products", "small-batch product"} & set(hopper)
    old = machine._unsupported([GPU | {"index": 0, "capability": "7.5"}])
    assert old["planned products"] == old["small-batch product"] == old["cslt"]


def test_the_fingerprint_changes_with_whatever_can_change_a_time():
    same = machine.fingerprint(card(2))
    assert same == machine.fingerprint(json.loads(json.dumps(card(2)))) and len(same) == 12
    changes = [
        {"gpus": card(1)["gpus"]},
        {"gpus": [card(1)["gpus"][0] | {"power_limit_w": 500.0}]},
        {"links": [{"a": 0, "b": 1, "kind": "PCIe"}]},
        {"driver": "570"},
        {"cpu": {"model": "m", "cores": 3}},
        {"libraries": {"torch": "2.11.0"}},
    ]
    prints = {machine.fingerprint(card(2) | change) for change in changes}
    assert len(prints) == len(changes) and same not in prints
    assert machine.fingerprint(card(2) | {"title": "another name"}) == same


def test_more_ranks_than_gpus_are_refused():
    machine.admit(asked(processes=2), card(2))
    machine.admit(asked(processes=1, backend="gloo"), card(1))
    machine.admit(asked(device="cpu", processes=8, backend="gloo"), card(0, {"cuda": "none"}))
    with pytest.raises(ParamsError, match="world_size: 4 ranks were asked for, this machine has 2 GPUs"):
        machine.admit(asked(processes=4), card(2))
    with pytest.raises(ParamsError, match=r"this machine has 1 GPU$"):
        machine.admit(asked(processes=2), card(1))


def test_cuda_where_there_is_none_is_refused_with_the_reason():
    with pytest.raises(ParamsError, match="cuda was asked for, but no NVIDIA GPU is visible"):
        machine.admit(asked(), card(0, {"cuda": "no NVIDIA GPU is visible"}))
    with pytest.raises(ParamsError, match="nccl was asked for, but this build"):
        machine.admit(asked(), card(2, {"nccl": "this build of torch has no NCCL"}))


@pytest.fixture
def project(tmp_path):
    (tmp_path / "blockshock_lib").mkdir()
    (tmp_path / "blockshock_lib" / "a.py").write_text("a = 1\n")
    (tmp_path / "notebooks").mkdir()
    write_notebook(tmp_path, "print(1)", output="1")
    (tmp_path / "outputs").mkdir()
    return tmp_path


def write_notebook(folder, source, output):
    cell = {"cell_type": "code", "source": [source], "outputs": [output]}
    (folder / "notebooks" / "n.ipynb").write_text(json.dumps({"cells": [cell]}))


def test_a_copy_without_its_repository_is_told_its_commit_and_claims_nothing_about_changes(project, monkeypatch):
    monkeypatch.setenv("BLOCKSHOCK_COMMIT", "abc123")
    assert machine.code_version(project).items() >= {"commit": "abc123", "dirty": None}.items()


def test_the_sources_change_with_the_library_and_the_notebooks_cells_but_not_with_their_outputs(project):
    first = machine.code_version(project)
    assert first == {"commit": "", "dirty": None, "sources": first["sources"]} and len(first["sources"]) == 12
    write_notebook(project, "print(1)", output="2")
    assert machine.code_version(project) == first
    write_notebook(project, "print(2)", output="2")
    second = machine.code_version(project)
    (project / "blockshock_lib" / "a.py").write_text("a = 2\n")
    third = machine.code_version(project)
    (project / "notebooks" / "n.ipynb").write_text("no notebook")
    assert len({v["sources"] for v in (first, second, third, machine.code_version(project))}) == 4


def test_the_commit_is_known_and_only_outputs_may_differ_from_it(project):
    def git(*args):
        options = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", "-C", str(project), *options, *args], check=True, capture_output=True, text=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    sha = git("rev-parse", "HEAD").stdout.strip()
    (project / "outputs" / "new").write_text("x")
    assert machine.code_version(project).items() >= {"commit": sha, "dirty": False}.items()
    (project / "blockshock_lib" / "a.py").write_text("a = 2\n")
    assert machine.code_version(project).items() >= {"commit": sha, "dirty": True}.items()
