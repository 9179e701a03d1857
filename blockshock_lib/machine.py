"""What this machine has, what it cannot run and why, and which code runs on it.

The card goes into records and manifests that are shared, so it holds no host name, user name or path. Nothing here
creates a CUDA context: the parent of a run must not take memory on the GPUs that it measures.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockshock_lib import sources
from blockshock_lib.engine.power import visible_devices
from blockshock_lib.errors import ParamsError

if TYPE_CHECKING:
    from blockshock_lib.params import Params

ROOT = sources.ROOT
CSLT_CAPABILITY = (8, 0)  # 2:4 tensor cores came with Ampere
SMALL_CAPABILITY = (9, 0)  # the small-batch kernel's instructions are Hopper's own
OWN = ("planned products", "small-batch product")  # what the library adds to PyTorch's 2:4 product


def auto_hardware() -> str:
    """The hardware file that fits this machine: "cuda" with two GPUs or more, "cuda-1" with one, else "cpu"."""
    count = _gpu_count()
    return "cuda" if count >= 2 else "cuda-1" if count else "cpu"


def probe() -> dict[str, Any]:
    """The machine card, serialisable as JSON.

    Returns:
        title; gpus (index, name, memory_bytes, capability, power_limit_w); links (a, b, kind "NV18" or "PCIe"); driver;
        cpu (model, cores); libraries (name -> version, "" where missing); unsupported (what cannot run here -> why).
    """
    gpus, links, driver = _nvml(_gpu_count())
    cpu = {"model": _cpu_model(), "cores": _cores()}
    names = Counter(gpu["name"] for gpu in gpus)
    title = " + ".join(f"{count}x {name}" for name, count in names.items())
    return {
        "title": title or f"CPU, {cpu['cores']} cores: {cpu['model']}",
        "gpus": gpus,
        "links": links,
        "driver": driver,
        "cpu": cpu,
        "libraries": _libraries(),
        "unsupported": _unsupported(gpus),
    }


def fingerprint(card: dict[str, Any]) -> str:
    """12 hex digits of everything on the card that can change a time."""
    text = json.dumps({key: card[key] for key in ("gpus", "links", "driver", "cpu", "libraries")}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def admit(params: Params, card: dict[str, Any]) -> None:
    """Raise ParamsError when the hardware asked for is not on the card."""
    hardware = params.hardware
    if hardware.device != "cuda":
        return
    why = card["unsupported"].get("cuda")
    if why:
        raise ParamsError(f"hardware.device: cuda was asked for, but {why}; choose hardware cpu")
    have = len(card["gpus"])
    if hardware.processes > have:
        gpus = "1 GPU" if have == 1 else f"{have} GPUs"
        raise ParamsError(f"hardware.world_size: {hardware.processes} ranks were asked for, this machine has {gpus}")
    if hardware.processes > 1 and hardware.backend == "nccl" and "nccl" in card["unsupported"]:
        raise ParamsError(f"hardware.backend: nccl was asked for, but {card['unsupported']['nccl']}")


def code_version(root: Path = ROOT) -> dict[str, Any]:
    """Which code this is.

    Returns:
        commit: sha; outside git what BLOCKSHOCK_COMMIT says, for a copy that travelled without its repository, else
        "". dirty: whether anything but outputs/ differs from the commit; None outside git, where nobody can tell.
        sources: 12 hex digits of the library's files and the notebooks' cells as they now stand on disk; the same
        digits mean the same code, whatever the commit says. imported: the same with the library as this process
        imported it; where it is not `sources`, the library was edited since. Only for the project's own code.
    """
    digits = {"sources": sources.digest(root)}
    if root == ROOT:
        digits["imported"] = sources.digest(root, sources.AT_IMPORT)
    # Only this project's own repository: installed elsewhere, git would speak of whatever folder surrounds it.
    commit = _git(root, "rev-parse", "--verify", "HEAD") if (root / ".git").exists() else ""
    if not commit:
        return {"commit": os.environ.get("BLOCKSHOCK_COMMIT", ""), "dirty": None, **digits}
    changes = _git(root, "status", "--porcelain", "--", ".", ":(exclude)outputs")
    return {"commit": commit, "dirty": bool(changes), **digits}


def _git(root: Path, *args: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    return ""


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def _nvml(count: int) -> tuple[list[dict], list[dict], str]:
    # GPUs in CUDA's order, the links between them, the driver's version; nothing where NVML cannot be asked.
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no NVML library, no driver: the module raises its own kind for each
        return [], [], ""
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(place))
            if place.isdigit()
            else pynvml.nvmlDeviceGetHandleByUUID(place)
            for place in visible_devices(count)
        ]
        gpus = [
            {
                "index": index,
                "name": pynvml.nvmlDeviceGetName(handle),
                "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                "capability": ".".join(map(str, pynvml.nvmlDeviceGetCudaComputeCapability(handle))),
                "power_limit_w": _power_limit(pynvml, handle),
            }
            for index, handle in enumerate(handles)
        ]
        links = [
            {"a": a, "b": b, "kind": _link(pynvml, handles[a], handles[b])}
            for a in range(len(handles))
            for b in range(a + 1, len(handles))
        ]
        return gpus, links, pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return [], [], ""
    finally:
        pynvml.nvmlShutdown()


def _power_limit(pynvml, handle) -> float | None:
    with contextlib.suppress(pynvml.NVMLError):
        return pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
    return None


def _link(pynvml, a, b) -> str:
    # As `nvidia-smi topo -m` names it: NV and the number of links, which end at the peer or at a switch to it.
    try:
        if pynvml.nvmlDeviceGetP2PStatus(a, b, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) != pynvml.NVML_P2P_STATUS_OK:
            return "PCIe"
    except pynvml.NVMLError:
        return "PCIe"
    peer, active, direct = pynvml.nvmlDeviceGetPciInfo(b).busId, 0, 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not pynvml.nvmlDeviceGetNvLinkState(a, link):
                continue
            active += 1
            direct += pynvml.nvmlDeviceGetNvLinkRemotePciInfo(a, link).busId == peer
        except pynvml.NVMLError:
            continue
    return f"NV{direct or active}"


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _libraries() -> dict[str, str]:
    import torch

    nccl = torch.cuda.nccl.version() if _has_nccl() else ()
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, nccl)),
        "cusparselt": str(torch.backends.cusparselt.version() or ""),
    }
    names = ("triton", "numpy", "pandas", "nvmath-python", "cuda-bindings")
    return found | {name: _version(name) for name in names}


def _version(name: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""


def _unsupported(gpus: list[dict]) -> dict[str, str]:
    import torch

    why: dict[str, str] = {}
    if not torch.backends.cuda.is_built():
        why["cuda"] = "this build of torch has no CUDA"
    elif not _gpu_count():
        why["cuda"] = "no NVIDIA GPU is visible"
    if "cuda" in why:
        return why | dict.fromkeys(("nccl", "cslt", "triton", *OWN), why["cuda"])
    if not _has_nccl():
        why["nccl"] = "this build of torch has no NCCL"
    if not torch.backends.cusparselt.is_available():
        why["cslt"] = "this build of torch has no cuSPARSELt"
    for gpu in gpus:
        if _capability(gpu) < CSLT_CAPABILITY:
            why["cslt"] = (
                f"2:4 products need compute capability 8.0 or newer, GPU {gpu['index']} has {gpu['capability']}"
            )
    if not _version("triton"):
        why["triton"] = "triton is not installed"
    for name, reason in zip(OWN, (_plans_missing(), _small_missing(gpus)), strict=True):
        if reason := why.get("cslt") or reason:
            why[name] = reason
    return why


def _capability(gpu: dict) -> tuple[int, ...]:
    return tuple(map(int, gpu["capability"].split(".")))


def _plans_missing() -> str:
    # Whether the binding finds PyTorch's own cuSPARSELt is seen by the ranks: to ask it takes a CUDA context.
    return "" if _version("nvmath-python") else "nvmath-python is not installed (the extra `cuda`)"


def _small_missing(gpus: list[dict]) -> str:
    import torch

    from blockshock_lib import compiled

    for gpu in gpus:
        if _capability(gpu) != SMALL_CAPABILITY:
            return f"its kernel needs compute capability 9.0 (Hopper), GPU {gpu['index']} has {gpu['capability']}"
    return compiled.unsupported(torch.device("cuda"))


def _has_nccl() -> bool:
    import torch

    return torch.distributed.is_available() and torch.distributed.is_nccl_available()
