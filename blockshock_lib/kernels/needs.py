"""What the kernels need of a machine, told from its card alone, and NVML: no CUDA context is created to ask."""

import contextlib
import functools
import importlib.metadata
import os
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any

from blockshock_lib.errors import first_line

NAMES = ("cslt", "triton", "planned products", "small-batch product")


def missing(gpus: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Which of NAMES these GPUs cannot run -> why; `gpus` as a machine card has them, with index and capability."""
    import torch

    from blockshock_lib.kernels import compiled

    capabilities = [tuple(map(int, gpu["capability"].split("."))) for gpu in gpus]
    told = [f"GPU {gpu['index']} has {gpu['capability']}" for gpu in gpus]
    old = [gpu for gpu, capability in zip(told, capabilities, strict=True) if capability < (8, 0)]
    odd = [gpu for gpu, capability in zip(told, capabilities, strict=True) if capability != (9, 0)]
    cslt = "" if torch.backends.cusparselt.is_available() else "this build of torch has no cuSPARSELt"
    if old:  # 2:4 tensor cores came with Ampere; the small-batch kernel's instructions are Hopper's own
        cslt = f"2:4 products need compute capability 8.0 or newer, {old[-1]}"
    small = f"its kernel needs compute capability 9.0 (Hopper), {odd[0]}" if odd else ""
    # Whether the binding finds PyTorch's own cuSPARSELt is seen by the ranks: to ask it takes a CUDA context.
    plans = "" if version("nvmath-python") else "nvmath-python is not installed (the extra `cuda`)"
    why = {
        "cslt": cslt,
        "triton": "" if version("triton") else "triton is not installed",
        "planned products": cslt or plans,
        "small-batch product": cslt or small or compiled.unsupported(torch.device("cuda")),
    }
    return {name: reason for name, reason in why.items() if reason}


def version(name: str) -> str:  # of an installed package; "" where it is not
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""


@functools.cache
def lacks(package: str, extra: str, module: str) -> str:
    """Why `module:name` of an installed package cannot be used, or that the package is not there; "" where it can."""
    if not version(package):
        return f"{package} is not installed (the extra `{extra}`)"
    try:
        pkgutil.resolve_name(module)
    except Exception as error:  # a beta may ask for what is not there, in its own words
        return f"{package} cannot be imported: {first_line(error)}"
    return ""


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
