"""The file of measured all-reduces: how long each backend took, at its best, for a size on a group of GPUs.

One JSON file holds a list of entries. An entry is used only where its whole key agrees: size, ranks, GPU, versions and
the source of the kernels and of what launches them. What is damaged is ignored with a warning and measured again.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from blockshock_lib import cache
from blockshock_lib.comm import symm

SCHEMA = 1


class Way(NamedTuple):
    """A backend of all_reduce.BACKENDS, and of how many blocks its kernel is; 0 for a library's own."""

    backend: str
    blocks: int = 0


@dataclass(frozen=True)
class Key:
    """What a choice depends on; `nbytes` is a power of two."""

    nbytes: int
    world: int
    gpu: str
    driver: str
    torch: str
    nccl: str
    source: str

    @classmethod
    def of(cls, nbytes: int, world: int, device: torch.device) -> Key:
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return cls(size_class(nbytes), world, gpu, cache.driver_version(), torch.__version__, _nccl(device), _source())


def size_class(nbytes: int) -> int:
    """The power of two that is not smaller: one choice serves all sizes up to it, from half of it on."""
    return 1 << max(0, nbytes - 1).bit_length()


def default_path() -> Path:
    return cache.folder() / "all_reduce.json"


def load(path: Path | None = None) -> dict[Key, dict[Way, float]]:
    """Every entry: key -> milliseconds of each way that was right. A missing file is an empty one."""
    path = path or default_path()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']!r}, not {SCHEMA}")
        found: dict[Key, dict[Way, float]] = {}
        for key, way, ms in map(_entry, content["choices"]):
            found.setdefault(key, {})[way] = ms
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{path.name} of measured all-reduces is ignored, as it is damaged: {error!r}", stacklevel=2)
        return {}


def table(world: int, device: torch.device, path: Path | None = None) -> dict[int, list[Way]]:
    """Size class -> ways, the fastest first; of the entries that hold for this machine and so many ranks. Warns where
    all that were measured on such GPUs are of other versions.
    """
    entries = load(path)
    if not entries:
        return {}
    here = Key.of(1, world, device)
    found = {key.nbytes: ordered(times) for key, times in entries.items() if replace(key, nbytes=1) == here}
    old = next((key for key in reversed(entries) if (key.world, key.gpu) == (world, here.gpu)), None)
    if not found and old is not None:
        names = ("driver", "torch", "nccl", "source")
        pairs = [(name, getattr(old, name), getattr(here, name)) for name in names]
        differing = "; ".join(f"{name} {theirs!r}, now {ours!r}" for name, theirs, ours in pairs if theirs != ours)
        name = (path or default_path()).name
        said = f"{name} of measured all-reduces is ignored, as it is stale: measured with {differing}"
        warnings.warn(said, stacklevel=2)
    return found


def ordered(times: dict[Way, float]) -> list[Way]:
    """The fastest first."""
    return sorted(times, key=lambda way: (times[way], way))


def keep(key: Key, times: dict[Way, float], path: Path | None = None) -> None:
    """Add or replace what is known of one key. A file that cannot be written costs a warning only."""
    path = path or default_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with cache.locked(path):
            entries = {**load(path), key: times}
            rows = [{**asdict(k), **way._asdict(), "ms": ms} for k, ways in entries.items() for way, ms in ways.items()]
            cache.replace(path, json.dumps({"schema": SCHEMA, "choices": rows}, indent=1) + "\n")
    except OSError as error:
        warnings.warn(f"the measured all-reduces are not kept: {error!r}", stacklevel=2)


def _entry(entry: dict) -> tuple[Key, Way, float]:
    key = Key(**{name: entry[name] for name in Key.__dataclass_fields__})
    way = Way(**{name: entry[name] for name in Way._fields})
    whole = (key.nbytes, key.world, way.blocks)
    words = (way.backend, key.gpu, key.driver, key.torch, key.nccl, key.source)
    if any(type(value) is not int for value in whole) or any(type(value) is not str for value in words):
        raise TypeError(f"an entry with a wrong type: {entry}")
    if way.blocks < 0 or not 0 < float(entry["ms"]) < math.inf:
        raise ValueError(f"an entry out of range: {entry}")
    return key, way, float(entry["ms"])


def _source() -> str:
    """Of the kernels, of how they are launched, and of the numbers of blocks that are tried."""
    return cache.version_of(symm.SOURCE, Path(symm.__file__), Path(symm.__file__).with_name("all_reduce.py"))


def _nccl(device: torch.device) -> str:
    return ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else ""
