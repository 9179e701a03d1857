"""What was measured on this machine: the fastest right ways to do a thing, with their times, in one JSON file a search.

An entry belongs to a problem (sizes, dtype, GPU) and to the versions it was measured with (driver, libraries, source of
the kernels); it is used only where both agree, and stays beside those of other versions, as machines share the folder.
"""

import functools
import json
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from blockshock_lib.errors import RecordError
from blockshock_lib.files import locked, short_digest, write_atomic
from blockshock_lib.kernels.needs import open_nvml
from blockshock_lib.kernels.tuning.search import Way, from_json, to_json

SCHEMA = 3


def folder() -> Path:
    return Path(os.environ.get("BLOCKSHOCK_CACHE") or Path.cwd() / ".cache" / "blockshock")


@functools.cache
def driver_version() -> str:  # of NVIDIA's driver, like "580.65.06"; "" where NVML cannot be asked
    nvml, _ = open_nvml(0)
    try:
        return nvml.nvmlSystemGetDriverVersion() if nvml else ""
    except nvml.NVMLError:
        return ""


def versions(*sources: Path, **libraries: str) -> dict[str, str]:
    """What an entry depends on beside its problem; torch also fixes the run-time compiler."""
    ours = {"driver": driver_version(), "torch": str(torch.__version__)}
    return ours | libraries | {"source": short_digest(*sources) if sources else ""}


@dataclass(frozen=True)
class Store:
    """The file of one search."""

    name: str
    kinds: Mapping[str, type]  # name -> the NamedTuple of one kind of ways

    @property
    def path(self) -> Path:
        return folder() / f"{self.name}.json"

    def find(self, problem: dict, versions: dict) -> dict[Way, float]:
        """The ways kept for exactly this problem and these versions -> milliseconds; warns as `matching`."""
        return next((ways for its, ways in self.matching(problem, versions) if its == problem), {})

    def matching(self, part: dict, versions: dict) -> list[tuple[dict, dict[Way, float]]]:
        """(problem, ways -> milliseconds) of these versions and problems that agree with `part`. Warns where all of
        those are of other versions, and of a file that it cannot use: the next entry replaces that.
        """
        entries, unusable = self._load()
        if unusable:
            warnings.warn(f"{self.path.name} is ignored, as it is {unusable}", stacklevel=3)
        same = [entry for entry in entries if part.items() <= entry[0].items()]
        current = [(problem, ways) for problem, its, ways in same if its == versions]
        if same and not current:
            theirs = same[-1][1]
            names = [name for name in versions if theirs.get(name) != versions[name]]
            differing = "; ".join(f"{name} {theirs.get(name)!r}, now {versions[name]!r}" for name in names)
            warnings.warn(f"{self.path.name} is ignored, as it is stale: measured with {differing}", stacklevel=3)
        return current

    def keep(self, problem: dict, versions: dict, ways: Mapping[Way, float]) -> None:
        """Adds or replaces one entry, other processes at the same time. A file that cannot be written is a warning."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path):
                others = [entry for entry in self._load()[0] if entry[:2] != (problem, versions)]
                entries = [
                    {"problem": p, "versions": v, "ways": [{**to_json(way, self.kinds), "ms": w[way]} for way in w]}
                    for p, v, w in [*others, (problem, versions, ways)]
                ]
                write_atomic(self.path, json.dumps({"schema": SCHEMA, "entries": entries}, indent=1) + "\n")
        except (OSError, RecordError) as error:
            warnings.warn(f"what was tuned is not kept: {error!r}", stacklevel=2)

    def _load(self) -> tuple[list[tuple[dict, dict, dict[Way, float]]], str]:
        """(problem, versions, ways) of every entry, none where there is no file; and why the file cannot be used."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["schema"] != SCHEMA:
                return [], f"of another release: schema {content['schema']!r}, not {SCHEMA}"
            return [self._entry(**entry) for entry in content["entries"]], ""
        except FileNotFoundError:
            return [], ""
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return [], f"damaged: {error!r}"

    def _entry(self, problem: dict, versions: dict, ways: list[dict]) -> tuple[dict, dict, dict[Way, float]]:
        times = {from_json({k: v for k, v in way.items() if k != "ms"}, self.kinds): float(way["ms"]) for way in ways}
        if not times or not all(0 < ms < math.inf for ms in times.values()):
            raise ValueError(f"no way, or a time out of range: {ways}")
        return dict(problem.items()), dict(versions.items()), times
