"""What this machine has, what it cannot run and why; the same of the machines of one job; and what its GPUs draw.

The card goes into records and manifests that are shared, so it holds no host name, user name or path. Nothing here
creates a CUDA context: the parent of a run must not take memory on the GPUs that it measures.
"""

import contextlib
import functools
import importlib.util
import json
import os
import platform
import runpy
import statistics
import threading
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from blockshock_lib import files
from blockshock_lib.engine.study import CORE, row
from blockshock_lib.errors import ParamsError
from blockshock_lib.kernels import needs
from blockshock_lib.kernels.needs import open_nvml
from blockshock_lib.params.models import RunParams
from blockshock_lib.runs import code

PERIOD_S = 0.05

# The bits of NVML's clock event reasons that say a GPU ran slower than it could; idle and application clocks do not.
REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}

LIBRARIES = ("triton", "numpy", "pandas", "nvmath-python", "cuda-bindings")


def auto_hardware() -> str:
    """The hardware file that fits this machine: "cuda" with two GPUs or more, "cuda-1" with one, else "cpu"."""
    count = _gpu_count()
    return "cuda" if count >= 2 else "cuda-1" if count else "cpu"


def probe() -> dict[str, Any]:
    """The machine card, plain JSON: title; gpus (index, name, memory_bytes, capability, power_limit_w, uuid_digest);
    links (a, b, kind "NV18" or "PCIe"); driver; cpu (model, cores); libraries (name -> version); unsupported (what
    cannot run here -> why).
    """
    gpus, links, driver = _gpus(_gpu_count())
    cpu = {"model": _cpu_model(), "cores": len(os.sched_getaffinity(0))}
    libraries, unsupported = _software(gpus)
    title = " + ".join(f"{count}x {name}" for name, count in Counter(gpu["name"] for gpu in gpus).items())
    title = title or "CPU, {cores} cores: {model}".format_map(cpu)
    card = {"title": title, "gpus": gpus, "links": links, "driver": driver, "cpu": cpu}
    return card | {"libraries": libraries, "unsupported": unsupported}


def fingerprint(card: dict[str, Any], portable: bool = False) -> str:
    """12 hex digits of everything on the card that can change a time; portable: of its kinds of GPU, else of CPU, and
    the libraries.
    """
    counts = {key: card[key] for key in ("gpus", "links", "driver", "cpu", "libraries")}
    if portable:
        kinds = sorted({gpu["name"] for gpu in card["gpus"]}) or [card["cpu"]["model"]]
        counts = {"kinds": kinds, "libraries": card["libraries"]}
    return files.sha256(json.dumps(counts, sort_keys=True))[:12]


def admit(params: RunParams, card: dict[str, Any]) -> None:
    """Raise ParamsError when the hardware asked for is not on the card, or what else the study needs is not there."""
    if why := params.lacks():
        raise ParamsError(why)
    hardware, unsupported, have = params.hardware, card["unsupported"], len(card["gpus"])
    if hardware.device != "cuda":
        return
    if why := unsupported.get("cuda"):
        raise ParamsError(f"hardware {hardware.name}: cuda was asked for, but {why}; choose hardware cpu")
    if hardware.processes > have:
        raise ParamsError(f"hardware {hardware.name}: {hardware.processes} ranks were asked for, GPUs here: {have}")
    if hardware.processes > 1 and hardware.backend == "nccl" and "nccl" in unsupported:
        raise ParamsError(f"hardware {hardware.name}: nccl was asked for, but {unsupported['nccl']}")


def describe(ctx: Any) -> dict[str, Any]:
    card, local = probe(), int(os.environ.get("LOCAL_RANK", "0"))
    gpu = next(iter(card["gpus"][local:] or card["gpus"]), None)
    return {"node": os.environ.get("GROUP_RANK", "0"), "card": card, "code": code.version()["sources"], "gpu": gpu}


def joined(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One card of all `ranks`; over nodes `gpus` has one a rank. ParamsError: code, libraries or GPUs differ."""
    first = ranks[0]
    for rank, one in enumerate(ranks):
        if one["code"] != first["code"]:
            raise ParamsError(f"rank {rank} runs other code than rank 0: bring all machines to the same files")
        for name, version in first["card"]["libraries"].items():
            if (other := one["card"]["libraries"].get(name, "")) != version:
                raise ParamsError(f"rank {rank} has {name} {other or 'missing'}, rank 0 has {version or 'none'}")
        if bool(one["gpu"]) != bool(first["gpu"]):
            raise ParamsError(f"rank {rank if first['gpu'] else 0} has no GPU, and another rank has one")
    cards = {one["node"]: one["card"] for one in ranks}
    if len(cards) == 1:
        return first["card"]
    numbers = {node: number for number, node in enumerate(cards)}
    titles = Counter(card["title"] for card in cards.values())
    gpus = [one["gpu"] | {"index": i, "node": numbers[one["node"]]} for i, one in enumerate(ranks) if one["gpu"]]
    return first["card"] | {
        "title": " + ".join(f"{count} node{'s' if count > 1 else ''} of {title}" for title, count in titles.items()),
        "gpus": gpus,
        "links": [link | {"node": numbers[node]} for node, card in cards.items() for link in card["links"]],
        "cpu": first["card"]["cpu"] | {"nodes": len(cards)},
        "unsupported": {what: why for card in cards.values() for what, why in card["unsupported"].items()},
    }


@functools.cache
def _build() -> dict[str, Any]:
    """What torch/version.py says of this build of torch, whose own import takes seconds."""
    return runpy.run_path(str(Path(importlib.util.find_spec("torch").origin).with_name("version.py")))


def _gpu_count() -> int:
    if not (_build()["cuda"] or _build().get("hip")):
        return 0
    import torch

    return torch.cuda.device_count()


def _gpus(count: int) -> tuple[list[dict], list[dict], str]:
    # In CUDA's order; nothing where NVML cannot be asked.
    nvml, handles = open_nvml(count)
    if nvml is None:
        return [], [], ""
    try:
        gpus = [_gpu(nvml, index, handle) for index, handle in enumerate(handles)]
        pairs = combinations(range(len(handles)), 2)
        links = [{"a": a, "b": b, "kind": _link(nvml, handles[a], handles[b])} for a, b in pairs]
        return gpus, links, nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError:
        return [], [], ""
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml, index: int, handle) -> dict[str, Any]:
    memory, limit = nvml.nvmlDeviceGetMemoryInfo(handle).total, None
    capability = ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(handle)))
    with contextlib.suppress(nvml.NVMLError):
        limit = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
    facts = {"index": index, "name": nvml.nvmlDeviceGetName(handle), "memory_bytes": memory}
    facts |= {"capability": capability, "power_limit_w": limit}
    with contextlib.suppress(nvml.NVMLError):  # which GPU it was, for those who have it: never its UUID
        facts["uuid_digest"] = files.sha256(str(nvml.nvmlDeviceGetUUID(handle)))[:12]
    return facts


def _link(nvml, a, b) -> str:
    # As `nvidia-smi topo -m` names it: NV and the number of links, which end at the peer or at a switch to it.
    try:
        if nvml.nvmlDeviceGetP2PStatus(a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK) != nvml.NVML_P2P_STATUS_OK:
            return "PCIe"
    except nvml.NVMLError:
        return "PCIe"
    peer, active, direct = nvml.nvmlDeviceGetPciInfo(b).busId, 0, 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        with contextlib.suppress(nvml.NVMLError):
            if nvml.nvmlDeviceGetNvLinkState(a, link):
                active += 1
                direct += nvml.nvmlDeviceGetNvLinkRemotePciInfo(a, link).busId == peer
    return f"NV{direct or active}"


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _software(gpus: list[dict]) -> tuple[dict[str, str], dict[str, str]]:
    """Library -> version, "" where missing; what cannot run here -> why."""
    libraries = {"python": platform.python_version(), "torch": _build()["__version__"], "cuda": "", "nccl": ""}
    libraries |= {"cusparselt": "", **{name: needs.version(name) for name in LIBRARIES}}
    why = "this build of torch has no CUDA"
    if _build()["cuda"] or _build().get("hip"):
        import torch

        has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        libraries |= {"cuda": torch.version.cuda or "", "cusparselt": str(torch.backends.cusparselt.version() or "")}
        libraries["nccl"] = ".".join(map(str, torch.cuda.nccl.version() if has_nccl else ()))
        why = "" if _gpu_count() else "no NVIDIA GPU is visible"
    if why:
        return libraries, dict.fromkeys(("cuda", "nccl", *needs.NAMES), why)
    return libraries, ({} if has_nccl else {"nccl": "this build of torch has no NCCL"}) | needs.missing(gpus)


class Sampler:
    """Watches GPUs from `first` on in a thread; `rows()`: power (W), SM clock (MHz), throttling since the last."""

    def __init__(self, device: str, processes: int, first: int = 0):
        self._nvml, handles = open_nvml(first + processes) if device == "cuda" else (None, [])
        self.handles, self._first = handles[first:], first
        self._seen: list[list[tuple[float, float, int]]] = [[] for _ in self.handles]
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Sampler":
        if self.handles:
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        ask = self._nvml
        while not self._stop.wait(PERIOD_S):
            for place, handle in enumerate(self.handles):
                with contextlib.suppress(ask.NVMLError):
                    watts = ask.nvmlDeviceGetPowerUsage(handle) / 1e3
                    clock = float(ask.nvmlDeviceGetClockInfo(handle, ask.NVML_CLOCK_SM))
                    bits = ask.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
                    self._seen[place].append((watts, clock, bits))

    def rows(self) -> list[dict]:
        seen, self._seen = self._seen, [[] for _ in self.handles]
        found = []
        for gpu, samples in ((gpu, samples) for gpu, samples in enumerate(seen, self._first) if samples):
            watts, clock, bits = zip(*samples, strict=True)
            why = ", ".join(text for bit, text in REASONS.items() if any(b & bit for b in bits))
            power = "power", statistics.median(watts), f"max {max(watts):.0f} W"
            clocks = "sm_clock", statistics.median(clock), f"min {min(clock):.0f}, max {max(clock):.0f} MHz"
            for name, value, detail in (power, clocks, ("throttle", bool(why), why)):
                found.append(row(CORE, "machine", name, value, rank=gpu, detail=detail))
        return found
